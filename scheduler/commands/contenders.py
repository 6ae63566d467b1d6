"""Who is compared: policies by name, each with its admission and roles, and the pool of processes that runs them."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

from ..sim.spec import RunSpec
from .guard import InputError
from .options import run_spec

In = TypeVar("In")
Out = TypeVar("Out")
#: Told how many are done, and of how many.
Told = Callable[[int, int], None]

#: A further setting of the policy before it: "sglang:ratio=0.5,imbalance=64".
_SETTING = re.compile(r"\s*\w+=")


def contenders(text: str, admission: str, seed: int = 0) -> dict[str, RunSpec]:
    """By label. POLICY[+ADMISSION][+roles], with commas between. Raises InputError, UnknownName."""
    labels: list[str] = []
    for part in text.split(","):
        if _SETTING.match(part) and labels and ":" in labels[-1]:
            labels[-1] += "," + part
        elif part.strip():
            labels.append(part.strip())
    if len(set(labels)) != len(labels):
        raise InputError(f"--policies {text}: one is named twice")
    if not labels:
        raise InputError("--policies is empty: name policies, with commas between")
    return {label: _contender(label, admission, seed) for label in labels}


def _contender(label: str, admission: str, seed: int) -> RunSpec:
    policy, *extras = label.split("+")
    roles = "roles" in extras
    named = [extra for extra in extras if extra != "roles"]
    if len(named) > 1 or len(extras) - len(named) > 1:
        raise InputError(f"{label!r} is no contender: write POLICY, POLICY+ADMISSION or POLICY+ADMISSION+roles")
    return run_spec(policy, named[0] if named else admission, roles, seed)


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def pool(jobs: int) -> Iterator[ProcessPoolExecutor | None]:
    """None for one job: it runs here."""
    if jobs == 1:
        yield None
        return
    # Not forked: threads of numpy's and the terminal's state stay behind. They leave Ctrl-C to this process.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _ignore_interrupt) as executor:
        yield executor


def each(
    executor: ProcessPoolExecutor | None, work: Callable[[In], Out], items: Sequence[In], done: Told
) -> tuple[list[Out | None], bool]:
    """Results in the order of `items`, and whether all are there: after Ctrl-C, those that are."""
    results: list[Out | None] = [None] * len(items)
    try:
        if executor is None:
            for i, item in enumerate(items):
                results[i] = work(item)
                done(i + 1, len(items))
            return results, True
        waiting: dict[Future[Out], int] = {executor.submit(work, item): i for i, item in enumerate(items)}
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                results[waiting.pop(future)] = future.result()
            done(len(items) - len(waiting), len(items))
    except KeyboardInterrupt:
        _end(executor)
        return results, False
    except BrokenExecutor:
        raise InputError("a process was killed while it ran, for its memory perhaps: try --jobs 1") from None
    except BaseException:
        _end(executor)
        raise
    return results, True


def _end(executor: ProcessPoolExecutor | None) -> None:
    """What still runs there is wanted no more, and would take minutes. (The executor has no method for it.)"""
    if executor is not None:
        processes = list(executor._processes.values())
        executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()


def _ignore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
