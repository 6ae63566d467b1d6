"""Backends by name. To add one: a file here and a line in BACKENDS, or an entry point in another package's metadata:

[project.entry-points."pyengine.cluster_backends"]
my-engine = "my_package:MyBackend"       # makes a ClusterBackend, called with the settings behind its name

`conductor simulate --backend my-engine:url=http://host:8000,n=4` calls MyBackend(url="http://host:8000", n="4").
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from ..explanation import Explanation
from ..sim.report import Report
from ..sim.trace import TraceError
from .base import BackendError, ClusterBackend, Found, Progress, Task

GROUP = "pyengine.cluster_backends"

Kind = TypeVar("Kind")


def _sim(**settings: str) -> ClusterBackend:
    from .sim import SimBackend

    return SimBackend(**settings)


def _live(**settings: str) -> ClusterBackend:
    from .live import LiveBackend

    return LiveBackend(**settings)


BACKENDS: dict[str, Callable[..., ClusterBackend]] = {"sim": _sim, "live": _live}


def find_backend(text: str) -> ClusterBackend:
    """From "name" or "name:setting=value,...". Raises BackendError: unknown, wrong settings, a plugin that raises."""
    name, _, rest = text.partition(":")
    settings = _settings(name, rest)
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in BACKENDS:
        try:
            return BACKENDS[name](**settings)
        except TypeError as error:
            raise BackendError(f"the backend {name} does not take these settings: {error}") from None
    if name in found:
        return _Guarded(found[name], settings)
    known = [*BACKENDS, *sorted(found)]
    near = difflib.get_close_matches(name, known, 1, 0.4)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    raise BackendError(f"there is no backend {name!r}: known are {', '.join(known)}{guess}")


def _settings(name: str, text: str) -> dict[str, str]:
    settings = {}
    for setting in filter(None, text.split(",")):
        key, equals, value = setting.partition("=")
        if not equals or not key.strip().isidentifier():
            raise BackendError(f"backend {name}: {setting!r} is no setting; write name=value, with commas between")
        settings[key.strip()] = value.strip()
    return settings


class _Guarded:
    """A backend of another package: what it raises names it, so that nobody searches here."""

    def __init__(self, entry: EntryPoint, settings: dict[str, str]) -> None:
        self._says = functools.partial(_blame, entry)
        with self._says("load"):
            inner: ClusterBackend = entry.load()(**settings)
            self._inner = inner
            self.name, self.fidelity, self.deterministic = inner.name, inner.fidelity, inner.deterministic

    def run(self, task: Task, progress: Progress | None = None) -> Report:
        with self._says("run"):
            return _is(Report, self._inner.run(task, progress))

    def explain(self, task: Task, number: int) -> Explanation:
        with self._says("explain"):
            return _is(Explanation, self._inner.explain(task, number))

    def cluster(self) -> Found | None:
        with self._says("describe its cluster"):
            found = self._inner.cluster()
            return None if found is None else _is(Found, found)


def _is(kind: type[Kind], answer: object) -> Kind:
    if not isinstance(answer, kind):
        raise TypeError(f"it answered {answer!r:.60} instead of a {kind.__name__}")
    return answer


@contextmanager
def _blame(entry: EntryPoint, what: str) -> Iterator[None]:
    try:
        yield
    except (BackendError, TraceError):
        raise
    except Exception as error:
        where = f"{entry.name} ({entry.value})"
        raise BackendError(f"the backend {where} failed to {what}: {type(error).__name__}: {error}") from error


__all__ = ["BACKENDS", "GROUP", "BackendError", "ClusterBackend", "Found", "Progress", "Task", "find_backend"]
