"""What the machine did meanwhile: whether it, and not what was measured, set the times."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np

#: Seconds between two looks of the probe at the clock.
EVERY = 5e-3
#: Niceness by which a worker stands behind what shares its core with it: one tenth of the weight.
GIVES_WAY = 10
_HZ = os.sysconf("SC_CLK_TCK")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """seconds: that it was watched. own: processors that the cluster and its client used, others: all else. cores: that
    there are. late_p50, late_p99, late_max: by how many seconds a process that sleeps was woken too late.
    """

    seconds: float
    own: float
    others: float
    cores: int
    late_p50: float
    late_p99: float
    late_max: float


class Watched:
    """Context manager; `load` afterwards. processes: ids whose time is the cluster's, this process's apart."""

    def __init__(self, processes: list[int]) -> None:
        self._processes = [*processes, os.getpid()]
        self.load: Load | None = None

    def __enter__(self) -> Watched:
        here, there = multiprocessing.Pipe()
        self._pipe = here
        self._probe = multiprocessing.get_context("fork").Process(target=_probe, args=(there,), daemon=True)
        self._probe.start()
        self._began, self._busy, self._own = time.monotonic(), busy_seconds(), self._used()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        seconds = time.monotonic() - self._began
        own, busy = self._used() - self._own, busy_seconds() - self._busy
        self._pipe.send(None)
        late: list[float] = self._pipe.recv() if self._pipe.poll(2.0) else [float("nan")] * 3
        self._probe.join(1.0)
        self.load = Load(
            seconds=seconds,
            own=own / seconds,
            others=max(busy - own, 0.0) / seconds,
            cores=len(os.sched_getaffinity(0)),
            late_p50=late[0],
            late_p99=late[1],
            late_max=late[2],
        )

    def _used(self) -> float:
        return sum(used_seconds(process) for process in self._processes)


def used_seconds(process: int) -> float:
    """Processor time of a process so far; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _HZ


def busy_seconds() -> float:
    """Of all processors, since the machine started."""
    user, nice, system, _, _, interrupts, soft, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + interrupts + soft) / _HZ


def pin(process: int, core: int) -> None:
    """All threads of a process, and those they start, to one core."""
    _each_thread(process, lambda thread: os.sched_setaffinity(thread, {core}))


def hurry(wanted: bool) -> None:
    """This thread, and what it starts, comes before all else on this machine, or not. Raises PermissionError."""
    policy, priority = (os.SCHED_RR, 1) if wanted else (os.SCHED_OTHER, 0)
    os.sched_setscheduler(0, policy, os.sched_param(priority))


def prefer(processes: Sequence[int], niceness: int) -> None:
    """They share the processors with each other as ever, and leave others little with a niceness of -20.

    Raises PermissionError.
    """
    for process in processes:
        _each_thread(process, lambda thread: _prefer(thread, niceness))
        # Between sessions it is the group's that counts, where there are such groups.
        group = Path(f"/proc/{process}/autogroup")
        if group.exists():
            group.write_text(str(niceness))


def give_way(processes: Sequence[int]) -> None:
    """All else that wants their cores has them at once: it is little, and would wait for milliseconds each time."""
    for process in processes:
        _each_thread(process, _give_way)


def _each_thread(process: int, call: Callable[[int], None]) -> None:
    """Of those that a process has now; threads may end meanwhile."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            call(int(thread.name))


def _prefer(thread: int, niceness: int) -> None:
    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, thread, niceness)


def _give_way(thread: int) -> None:
    niceness = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, min(niceness + GIVES_WAY, 19))


def _probe(pipe: Connection) -> None:
    late = []
    while not pipe.poll():
        due = time.perf_counter() + EVERY
        time.sleep(EVERY)
        late.append(time.perf_counter() - due)
    pipe.send([*np.percentile(late or [0.0], (50, 99)).tolist(), max(late, default=0.0)])
