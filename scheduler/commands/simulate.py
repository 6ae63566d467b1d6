"""`conductor simulate`: one trace, one cluster, one policy; what comes of it."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ..backends import Task, find_backend
from ..report.document import document, dumps, text
from ..report.plots import plot_run
from ..report.summary import summarize
from ..sim.report import FAILED, Report
from .guard import INTERRUPTED, Watch, guarded, told, write_text
from .options import ClusterOptions, Output, RunOptions
from .trace import TraceOptions


def simulate(
    *,
    trace: TraceOptions | None = None,
    cluster: ClusterOptions | None = None,
    run: RunOptions | None = None,
    backend: Annotated[str, Parameter(name="--backend")] = "sim",
    output: Output | None = None,
) -> int:
    """Runs a trace through a simulated cluster, with the scheduler that serves, and tells what would come of it.

    Ctrl-C ends it early: the report is of what had come to an end, and says so; exit status 130. Ends with 1 if the
    policy failed, which costs the request that it was asked about.

    Parameters
    ----------
    backend
        sim, live:url=http://HOST:PORT, or an entry point of the group pyengine.cluster_backends; settings behind its
        name: name:setting=value,...
    """
    trace, cluster = trace or TraceOptions(), cluster or ClusterOptions()
    run, output = run or RunOptions(), output or Output()

    def work() -> int:
        output.check()
        spec, scheduled = cluster.spec(), run.spec()
        where = find_backend(backend)
        requests = trace.made(spec.block_tokens, scheduled.seed)
        watch = Watch("requests", output.progress)
        task = Task(requests=requests, description=requests.description, cluster=spec, run=scheduled)
        report = where.run(task, watch)
        watch.close()
        summary = summarize(report, spec.slo)
        with told(text(report, summary, spec.slo)):
            write_text(output.json, dumps(document(report, summary, spec.slo)))
            if output.plot is not None:
                plot_run(report, spec.slo, output.plot)
        return status(report)

    return guarded("simulate", work)


def status(report: Report) -> int:
    if not report.complete:
        return INTERRUPTED
    # What a policy that fails leaves is no answer: the report has a note that says how.
    return 1 if report.totals.get(FAILED) else 0
