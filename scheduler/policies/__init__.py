"""Policies by name. To add one: a file here and a line in POLICIES, or an entry point in another package's metadata:

[project.entry-points."pyengine.policies"]
my-policy = "my_package:MyPolicy"        # a class (or function) that makes a Policy, called without arguments
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points

from .admission import ADMISSIONS, Admission
from .base import Ask, Choice, Policy
from .kvcache_centric import KvCacheCentric
from .least_loaded import LeastLoaded
from .random import Random
from .round_robin import RoundRobin

GROUP = "pyengine.policies"

POLICIES: dict[str, Callable[[], Policy]] = {
    "random": Random,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "kvcache-centric": KvCacheCentric,
}


class UnknownName(ValueError):
    """No such policy or admission; the text lists what there is."""


def find_policy(name: str) -> Policy:
    """A policy by name: one of POLICIES, or an entry point. Raises UnknownName."""
    maker = POLICIES.get(name)
    if maker is not None:
        return maker()
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in found:
        made: Policy = found[name].load()()
        return made
    raise UnknownName(_unknown("policy", name, [*POLICIES, *found]))


def find_admission(name: str) -> Admission:
    """An admission by name. Raises UnknownName."""
    if name in ADMISSIONS:
        made: Admission = EntryPoint(name, ADMISSIONS[name], GROUP).load()()
        return made
    raise UnknownName(_unknown("admission", name, ADMISSIONS))


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.4)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    return f"there is no {kind} {name!r}: known are {', '.join(known)}{guess}"


__all__ = [
    "ADMISSIONS",
    "POLICIES",
    "Admission",
    "Ask",
    "Choice",
    "Policy",
    "UnknownName",
    "find_admission",
    "find_policy",
]
