"""`pyengine bench`: an open loop. Requests come when they are due, whatever has become of those before them.

It asks as `conductor replay` does, with the same code; that one compares with a simulation, this one is for any server
of the API. Exit status: 0 all requests were answered, 1 some were not (or Ctrl-C: the figures are of what there was),
2 impossible as asked.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.live import Live
from rich.text import Text

from pyengine.commands import figures, load
from pyengine.config import ConfigError
from pyengine.scheduler.backends import Task
from pyengine.scheduler.backends.live import LiveBackend
from pyengine.scheduler.backends.replies import Reply
from pyengine.scheduler.commands.guard import try_output
from pyengine.scheduler.report.document import dumps, plain
from pyengine.scheduler.report.plots import need_plots, plot_run
from pyengine.scheduler.sim.report import DONE, UNFINISHED
from pyengine.scheduler.sim.spec import ClusterSpec
from pyengine.scheduler.sim.trace import Trace
from pyengine.scheduler.sim.traces import read_trace
from pyengine.scheduler.types import BLOCK_TOKENS, Slo

DEFAULT_URL = "http://127.0.0.1:8000"
#: Looks at the progress a second on a terminal; elsewhere a line in so many seconds.
LOOKS, LINE_EVERY = 4, 10.0
#: Of the layout of --json: a change over which a reader would stumble raises it.
FORMAT = 1


def bench(
    url: str = DEFAULT_URL,
    *,
    model: str | None = None,
    rate: float = 1.0,
    duration: float = 30.0,
    requests: int | None = None,
    arrivals: load.Arrivals = "poisson",
    concurrency: int = 0,
    prompt_tokens: str = "64-192",
    output_tokens: str = "16-32",
    shared_prefix: float = 0.5,
    trace: Path | None = None,
    speed: float = 1.0,
    scale: float = 1.0,
    slo_ttft: float | None = None,
    slo_tbt: float | None = None,
    slo_deadline: float | None = None,
    timeout: float = 600.0,
    seed: int = 0,
    json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    plot: Path | None = None,
) -> int:
    """Loads a gateway and measures it. An API key is taken from PYENGINE_API_KEY.

    Parameters
    ----------
    url
        The gateway.
    model
        Name there (default: the only one).
    rate
        Requests a second.
    duration
        Seconds in which they come.
    requests
        Their number, instead of duration. Of a trace: only the first so many.
    arrivals
        poisson: at random times; constant: evenly.
    concurrency
        So many under way at most; 0, the default: as many as come.
    prompt_tokens
        A number or a range.
    output_tokens
        A number or a range.
    shared_prefix
        Share of the shortest prompt with which all begin.
    trace
        A trace to replay instead: Mooncake's JSONL or Azure's CSV, also gzipped.
    speed
        How many times faster than in the trace requests come.
    scale
        The trace's lengths are multiplied by it, for a model that takes shorter prompts: 0.1, say.
    slo_ttft
        Objective for the time to the first token, seconds, for the goodput.
    slo_tbt
        Objective for the time between tokens (mean of a request's longest tenth), seconds.
    slo_deadline
        Objective for the whole answer, seconds.
    timeout
        Seconds after which a request is given up.
    seed
        Of arrivals, lengths and prompts.
    json
        The figures as one JSON object on stdout, instead of tables.
    plot
        File for a picture (.png, .svg or .pdf; needs matplotlib).
    """

    def run() -> int:
        _check(rate=rate, duration=duration, speed=speed, timeout=timeout, slo_ttft=slo_ttft, slo_tbt=slo_tbt)
        _check(slo_deadline=slo_deadline, requests=requests)
        if concurrency < 0 or not 0 <= shared_prefix <= 1:
            raise ConfigError("--concurrency is a number of requests, and --shared-prefix a share from 0 to 1")
        if plot is not None:
            need_plots()
            if plot.suffix not in (".png", ".svg", ".pdf"):
                raise ConfigError(f"--plot {plot}: pictures are .png, .svg or .pdf")
        try_output(plot)
        if trace is not None:
            asked = _replayed(trace, speed, scale, requests)
        else:
            asked = load.made_up(
                load.Wish(
                    rate=rate,
                    count=requests or max(1, round(rate * duration)),
                    arrivals=arrivals,
                    prompt=load.span("--prompt-tokens", prompt_tokens),
                    output=load.span("--output-tokens", output_tokens),
                    shared=shared_prefix,
                    seed=seed,
                ),
                BLOCK_TOKENS,
            )
        slo = Slo(slo_ttft, slo_tbt, slo_deadline)
        live = LiveBackend(url=url, model=model or "", timeout=str(timeout), concurrency=str(concurrency))
        total = sum(1 for _ in asked)
        task = Task(
            requests=asked,
            description=asked.description,
            cluster=ClusterSpec(workers=(), block_tokens=BLOCK_TOKENS, slo=slo),
        )
        with Watch(live, total) as watch:
            report = live.run(task, watch)
        found = figures.measure(live.replies, slo)
        if json:
            shown = {"format": FORMAT, "complete": report.complete, "provenance": plain(report.provenance)}
            sys.stdout.write(
                dumps({**shown, "slo": plain(slo), **msgspec.to_builtins(found), "notes": list(report.notes)})
            )
        else:
            head = [f"{report.provenance['url']}, {report.provenance['model']}", asked.description]
            if not report.complete:
                head.insert(0, f"PARTIAL: stopped early, after {found.done + found.failed} of {total} requests")
            notes = [f"note: {note}" for note in report.notes if not any(error in note for error in found.errors)]
            print("\n".join(head) + "\n\n" + "\n\n".join([figures.text(found, slo), *notes]), flush=True)
        if plot is not None:
            plot_run(report, slo, plot)
        return 0 if report.complete and not found.failed else 1

    from pyengine.cli import guarded

    return guarded("bench", run)


def _check(**given: float | None) -> None:
    for name, value in given.items():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} must be a number above 0, not {value:g}")


def _replayed(path: Path, speed: float, scale: float, limit: int | None) -> Trace:
    found = read_trace(path, BLOCK_TOKENS)
    if limit is not None:
        found = found.limit(limit)
    found = load.scaled(found, scale)
    return found.speed(speed) if speed != 1 else found


class Watch:
    """Progress on stderr while requests are under way: drawn anew on a terminal, elsewhere a line now and then."""

    def __init__(self, live: LiveBackend, total: int) -> None:
        self._live, self._total = live, total
        self._begun = self._said = time.monotonic()
        console = Console(stderr=True)
        self._shown = (
            Live(get_renderable=self._line, console=console, refresh_per_second=LOOKS, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Watch:
        if self._shown is not None:
            self._shown.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._shown.stop()

    def __call__(self, ended: int, total: int | None, seconds: float) -> None:
        now = time.monotonic()
        if self._shown is None and now - self._said >= LINE_EVERY:
            self._said = now
            sys.stderr.write(f"{ended} of {self._total} requests have ended, after {now - self._begun:.0f} s\n")
            sys.stderr.flush()

    def _line(self) -> Text:
        """The run so far; TTFT by p50 and p99. Another thread draws it, so it looks at a copy."""
        replies: list[Reply] = list(self._live.replies)
        ended = [reply for reply in replies if reply.outcome != UNFINISHED]
        done = [reply for reply in ended if reply.outcome == DONE]
        first = [reply.tokens[0] - reply.due for reply in replies if reply.tokens]
        tokens = sum(len(reply.tokens) for reply in replies)
        elapsed = time.monotonic() - self._begun
        late = figures.spread(first) if first else None
        parts = [
            f"[bold]{elapsed:.0f} s[/]",
            f"{len(replies)}/{self._total} sent",
            f"[cyan]{len(replies) - len(ended)} under way[/]",
            f"[green]{len(done)} done[/]",
            *([f"[red]{len(ended) - len(done)} failed[/]"] if len(ended) > len(done) else []),
            f"{tokens / elapsed:.0f} tokens/s" if elapsed else "",
            f"TTFT {1000 * late.p50:.0f}/{1000 * late.p99:.0f} ms" if late is not None else "",
        ]
        return Text.from_markup("  ".join(parts), overflow="ellipsis")
