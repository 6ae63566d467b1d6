"""`conductor replay`: a trace sent to a live cluster, and the simulation of the same beside it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from ..backends import BackendError, ClusterBackend, Found, Task, find_backend
from ..report.document import document, dumps, objectives, provenance, text
from ..report.fidelity import gap_table, gaps
from ..report.plots import plot_run
from ..report.summary import Summary, summarize
from ..sim.report import Report
from ..sim.spec import ClusterSpec
from ..sim.specfile import load_cluster, to_toml
from ..types import Slo
from .guard import INTERRUPTED, WISHES, InputError, Watch, guarded, told, try_output, write_text
from .options import Flag, Output, positive, run_spec
from .trace import TraceOptions


def replay(
    *,
    trace: TraceOptions | None = None,
    url: str | None = None,
    backend: Annotated[str | None, Parameter(name="--backend")] = None,
    cluster: str | None = None,
    save_cluster: Path | None = None,
    policy: str | None = None,
    admission: str = "none",
    roles: Flag = False,
    seed: int = 0,
    ttft: float | None = None,
    tbt: float | None = None,
    output: Output | None = None,
) -> int:
    """Sends a trace to a live cluster at the trace's times, measures, and compares with the simulation of the same.

    Prompts are made up so that equal prefixes of the trace are equal prefixes there, and new for each replay. The
    simulated cluster is made from what the gateway tells (workers, their measured costs) or from a file.

    Parameters
    ----------
    url
        The gateway: http://HOST:PORT.
    backend
        Another live backend instead: NAME:setting=value,...
    cluster
        Cluster file to simulate; by default what the live cluster says of itself.
    save_cluster
        File for the cluster as it was found (.toml; its cost models beside it).
    policy
        Of the simulation; by default the one that the live cluster routes by.
    admission
        Of the simulation: as the live conductor was started.
    roles
        Of the simulation, likewise.
    seed
        Of the jitter and the simulation.
    ttft
        Objective for the time to the first token, seconds; instead of the cluster file's. The simulated cluster keeps
        to it, holding first tokens by it: name what the live one was started with (--slo-ttft).
    tbt
        Objective for the time between tokens, seconds; instead of the file's; likewise (--slo-tbt).
    """
    trace, output = trace or TraceOptions(), output or Output()

    def work() -> int:
        output.check()
        if (url is None) == (backend is None):
            raise InputError("name the live cluster: --url http://HOST:PORT (or --backend, one of them)")
        if save_cluster is not None and save_cluster.suffix != ".toml":
            raise InputError(f"--save-cluster {save_cluster}: a cluster file ends in .toml")
        try_output(save_cluster)
        given = load_cluster(cluster) if cluster is not None else None
        live = find_backend(backend or f"live:url={url}")
        found = None if given is not None and save_cluster is None else live.cluster()
        if found is None and given is None:
            raise BackendError(f"the backend {live.name} tells nothing of its cluster: name a file (--cluster)")
        known = given if given is not None else found.spec if found is not None else None
        assert known is not None
        slo = _slo(known.slo, ttft, tbt)
        scheduled = run_spec(policy or (found and found.policy) or "kvcache-centric", admission, roles, seed)
        # As this client asks, and as workers serve.
        scheduled = msgspec.structs.replace(scheduled, exact_limits=True, write_through=True)

        def run(where: ClusterBackend, spec: ClusterSpec, what: str) -> Report:
            requests = trace.made(spec.block_tokens, seed)
            watch = Watch(what, output.progress)
            spec = msgspec.structs.replace(spec, slo=slo)
            task = Task(requests=requests, description=requests.description, cluster=spec, run=scheduled)
            report = where.run(task, watch)
            watch.close()
            return report

        reports = [run(live, known, "live requests")]
        assumed: list[str] = []
        failure: ValueError | None = None
        try:
            if reports[0].complete:
                if found is not None and found.unmeasured:
                    found = live.cluster()
                    assumed.append(
                        "costs as they were fitted while this trace ran: the workers had measured none before"
                    )
                with _saved(found, save_cluster) as discovered:
                    simulated = given or discovered
                    assert simulated is not None
                    assumed += found.assumed if found is not None and given is None else ()
                    reports.append(run(find_backend("sim"), simulated, "simulated requests"))
        except WISHES as error:
            # What was measured took as long as the trace: it is told first.
            failure = error
        status = _tell(reports, slo, [f"simulated with {sentence}" for sentence in assumed], output)
        if failure is not None:
            raise failure
        return status

    return guarded("replay", work)


def _tell(reports: list[Report], slo: Slo, assumed: list[str], output: Output) -> int:
    summaries = [summarize(report, slo) for report in reports]
    live, first = reports[0], summaries[0]
    found = gaps(first, summaries[1]) if len(reports) == 2 and reports[1].complete else []
    if found:
        notes = [f"note: {note}" for note in [*live.notes, *reports[1].notes, *assumed]]
        shown = [
            provenance({**live.provenance, "simulated as": reports[1].provenance.get("fidelity", "")}),
            f"objectives: {objectives(slo)}; {_counts(first)} live, {_counts(summaries[1])} simulated",
            gap_table(found),
            *notes,
        ]
    else:
        shown = [text(live, first, slo)]
    names = ("live", "simulated")
    parts = {
        name: document(report, summary, slo) for name, report, summary in zip(names, reports, summaries, strict=False)
    }
    with told("\n\n".join(shown)):
        write_text(output.json, dumps({"complete": bool(found), **parts, "differences": found, "assumed": assumed}))
        if output.plot is not None:
            plot_run(live, slo, output.plot)
    return 0 if found else INTERRUPTED


def _counts(summary: Summary) -> str:
    return f"{summary.done:,} of {summary.requests:,} done"


def _slo(base: Slo, ttft: float | None, tbt: float | None) -> Slo:
    given = {name: positive(f"--{name}", value) for name, value in (("ttft", ttft), ("tbt", tbt)) if value is not None}
    return msgspec.structs.replace(base, **given)


@contextlib.contextmanager
def _saved(found: Found | None, path: Path | None) -> Iterator[ClusterSpec | None]:
    """Writes what was found, cost models beside it, where the user wants it or for as long as this lasts.

    Raises BackendError if some worker's costs are not known even now.
    """
    if found is None:
        yield None
        return
    if found.unmeasured:
        idle = ", ".join(found.unmeasured)
        raise BackendError(f"{idle}: nobody of that role has worked, so nothing is known of its costs (give --cluster)")
    with tempfile.TemporaryDirectory(prefix="conductor-") as scratch:
        target = path or Path(scratch) / "cluster.toml"
        names = {name: f"{target.stem}.{name}.toml" for name in found.models}
        for name, model in found.models.items():
            model.save(target.parent / names[name])
        workers = tuple(
            msgspec.structs.replace(worker, model=names.get(worker.model, worker.model))
            for worker in found.spec.workers
        )
        head = "".join(f"# assumed: {sentence}\n" for sentence in found.assumed)
        write_text(target, head + to_toml(msgspec.structs.replace(found.spec, workers=workers)))
        yield load_cluster(str(target))
