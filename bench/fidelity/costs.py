"""What workers say of their own costs while they serve: fits of their latest hundred steps, which come and go."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from types import TracebackType

import msgspec

from pyengine.scheduler.backends import BackendError, ClusterBackend, Found
from pyengine.scheduler.sim.compute import Coefficients, StepTime

#: Seconds between two questions: each is two requests to the gateway, some milliseconds.
EVERY = 2.0


class Told:
    """Context manager around a run: asks a live cluster every EVERY seconds, from the beginning on."""

    def __init__(self, live: ClusterBackend) -> None:
        self._live = live
        self._found: list[tuple[float, Found]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="costs", daemon=True)

    def __enter__(self) -> Told:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def between(self, first: float, last: float) -> Found:
        """The mean of what was told from `first` to `last` seconds after the beginning.

        Raises RuntimeError: nothing was.
        """
        told = [found for at, found in self._found if first <= at <= last and not found.unmeasured]
        if not told:
            raise RuntimeError(f"the workers told of no costs between {first:.0f} and {last:.0f} s")
        return mean(told)

    def _ask(self) -> None:
        while not self._over.wait(EVERY):
            try:
                found = self._live.cluster()
            except BackendError:
                continue  # the run itself will say what is wrong
            if found is not None:
                self._found.append((time.monotonic() - self._began, found))


def mean(told: Sequence[Found]) -> Found:
    """The cluster of the last, with each worker's costs as their mean: predictions are linear in them."""
    last = told[-1]
    models = {name: _mean([found.models[name] for found in told]) for name in last.models}
    beside = [[worker.step_overhead for worker in found.spec.workers] for found in told]
    workers = tuple(
        msgspec.structs.replace(worker, step_overhead=sum(each) / len(told))
        for worker, each in zip(last.spec.workers, zip(*beside, strict=True), strict=True)
    )
    return dataclasses.replace(last, spec=msgspec.structs.replace(last.spec, workers=workers), models=models)


def _mean(times: Sequence[StepTime]) -> StepTime:
    columns = [msgspec.structs.asdict(each.coefficients) for each in times]
    coefficients = Coefficients(**{name: sum(each[name] for each in columns) / len(columns) for name in columns[0]})
    return StepTime(times[-1].name, times[-1].about, f"{len(times)} fits, their mean", coefficients)
