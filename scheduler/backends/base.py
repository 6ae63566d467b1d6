"""The seam between the scheduler's commands and what they are asked about: a simulation, a live cluster, an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Protocol, TypeAlias

from ..explanation import Explanation
from ..sim.compute import StepTime
from ..sim.report import Report
from ..sim.spec import ClusterSpec, RunSpec
from ..sim.trace import Request

#: Called now and then with the requests that have come to an end, of how many (None: not known), and the seconds of the
#: trace gone by.
Progress: TypeAlias = Callable[[int, int | None, float], None]


class BackendError(ValueError):
    """The backend cannot do what it was asked; one sentence that says what to do."""


DISTRIBUTION = "pyengine-llm"


def version() -> str:
    """Of this package, for reports."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "not installed"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be run.

    requests: in order of arrival; may be read once only. description: of the trace and what was done to it, for the
    report. cluster, run: what a backend that has no cluster of its own makes one of; `cluster.slo` judges in any case.
    """

    requests: Iterable[Request]
    description: str
    cluster: ClusterSpec
    run: RunSpec = field(default_factory=RunSpec)


@dataclass(frozen=True)
class Found:
    """A cluster that runs, as one to be simulated. models: the cost models that `spec` names; unmeasured: those of
    them that are not there yet, as nobody has worked. policy: what it routes by, None: it has not said. assumed:
    sentences on what could not be asked for.
    """

    spec: ClusterSpec
    models: Mapping[str, StepTime]
    unmeasured: Sequence[str] = ()
    policy: str | None = None
    assumed: Sequence[str] = ()


class ClusterBackend(Protocol):
    """Somewhere a trace can be run. Made by a call with the settings that a user wrote behind its name, as keywords.

    A backend is deterministic if it can be: `deterministic` says whether equal tasks give equal digests.
    """

    name: str
    #: What of a report's figures is measured and what modelled, in a few words.
    fidelity: str
    deterministic: bool

    def run(self, task: Task, progress: Progress | None = None) -> Report:
        """Sends all requests, at their times, and returns when each has come to an end: one record for each, in order.

        Ctrl-C (KeyboardInterrupt, raised in here or seen as a cancelled loop) ends it early: the report has what there
        is, with `complete` False. The provenance has the task's description as `trace`, and `backend`, `fidelity`,
        `version`, `policy` and `seed` as they were in force. Raises BackendError.
        """

    def explain(self, task: Task, number: int) -> Explanation:
        """Why the request of this number in the trace (from 0) goes where it goes, after all before it have come.

        Raises BackendError, also if the backend does not know.
        """

    def cluster(self) -> Found | None:
        """What runs there, so that it can be simulated; None: whatever a task says. Raises BackendError."""
