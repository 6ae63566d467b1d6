"""The simulator behind the seam: production conductor, batcher and pools; steps, links and tiers by models."""

from __future__ import annotations

import dataclasses
import itertools

from ..explanation import Explanation
from ..sim.cluster import Simulation, simulate
from ..sim.report import Report
from .base import BackendError, Found, Progress, Task


class SimBackend:
    """Takes no settings: all that can be set is in the task."""

    name = "sim"
    fidelity = "simulated: production conductor, batcher and pools; steps, links and SSDs by models"
    deterministic = True

    def run(self, task: Task, progress: Progress | None = None) -> Report:
        def told(seconds: float, ended: int, count: int) -> None:
            if progress is not None:
                progress(ended, count, seconds)

        report = simulate(
            task.requests,
            task.cluster,
            task.run,
            description=task.description,
            progress=told,
        )
        facts = {"backend": self.name, **report.provenance, "fidelity": self.fidelity}
        return dataclasses.replace(report, provenance=facts)

    def explain(self, task: Task, number: int) -> Explanation:
        """What comes after the request changes nothing about it: only what comes up to it is simulated."""
        requests = list(itertools.islice(task.requests, number + 1))
        if len(requests) <= number:
            raise BackendError(f"the trace has no request {number}: its last is {len(requests) - 1}")
        simulation = Simulation(requests, task.cluster, task.run)
        simulation.run()
        if simulation.interrupted:
            raise KeyboardInterrupt
        found = simulation.conductor.router.decisions.find(number)
        if found is None:
            raise BackendError(f"request {number} never came to be routed: nobody was there for it")
        return found

    def cluster(self) -> Found | None:
        return None
