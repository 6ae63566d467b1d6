"""Policies by name. To add one: a file here and a line in POLICIES, or an entry point in another package's metadata:

[project.entry-points."pyengine.policies"]
my-policy = "my_package:MyPolicy"        # a class (or function) that makes a Policy, called without arguments

Fields of a policy that is a dataclass are its settings: `my-policy:weight=2,fetch=true`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from .admission import ADMISSIONS, Admission
from .base import Ask, Choice, Policy
from .deciding import PolicyFailed, decide
from .settings import UnknownName, knobs, make, split, unknown

GROUP = "pyengine.policies"

#: Ours, in the notation of entry points: a file is read when its policy is asked for. The models of others live beside
#: the simulator, a floor above, and are named here so that one list has all.
POLICIES: dict[str, str] = {
    "random": "pyengine.scheduler.policies.random:Random",
    "round-robin": "pyengine.scheduler.policies.round_robin:RoundRobin",
    "least-loaded": "pyengine.scheduler.policies.least_loaded:LeastLoaded",
    "least-queue-time": "pyengine.scheduler.policies.least_queue_time:LeastQueueTime",
    "cache-aware": "pyengine.scheduler.policies.cache_aware:CacheAware",
    "kvcache-centric": "pyengine.scheduler.policies.kvcache_centric:KvCacheCentric",
    "least-harm": "pyengine.scheduler.policies.least_harm:LeastHarm",
    "dynamo": "pyengine.scheduler.sim.policies.dynamo:Dynamo",
    "sglang": "pyengine.scheduler.sim.policies.sglang:Sglang",
    "llm-d": "pyengine.scheduler.sim.policies.llm_d:LlmD",
    "lmetric": "pyengine.scheduler.sim.policies.lmetric:Lmetric",
    "preble": "pyengine.scheduler.sim.policies.preble:Preble",
    "netkv": "pyengine.scheduler.sim.policies.netkv:NetKv",
}


def known_policies() -> list[str]:
    """Names of all policies there are, those of other packages behind ours."""
    return [*POLICIES, *sorted({entry.name for entry in entry_points(group=GROUP)} - set(POLICIES))]


def find_maker(name: str) -> Callable[[], Policy]:
    """What makes the policy of this name, a name without settings. Raises UnknownName."""
    found = {entry.name: entry for entry in entry_points(group=GROUP)} if name not in POLICIES else {}
    if name in POLICIES:
        entry = EntryPoint(name, POLICIES[name], GROUP)
    elif name in found:
        entry = found[name]
    else:
        raise unknown("policy", name, [*POLICIES, *sorted(found)])
    try:
        # Another package may raise anything: it is named.
        maker: Callable[[], Policy] = entry.load()
    except Exception as error:
        raise _broken(entry, error) from error
    return maker


def find_policy(text: str) -> Policy:
    """A policy by name and settings: `kvcache-centric`, `kvcache-centric:threshold=2`. Raises UnknownName."""
    name, settings = split(text)
    maker = find_maker(name)
    try:
        policy = make(maker, name, settings)
        # Asked now: who lacks it would be noticed with the first hot prefix, hours later.
        complete = callable(policy) and isinstance(policy.replicates, bool)
    except UnknownName:
        raise
    except Exception as error:
        raise UnknownName(f"the policy {name!r} cannot be made: {type(error).__name__}: {error}") from error
    if not complete:
        raise UnknownName(f"{name!r} makes no policy: it can be called, and has a `replicates` that is True or False")
    return policy


def find_admission(text: str) -> Admission:
    """An admission by name and settings: `predictive`, `predictive:margin=1.2`. Raises UnknownName."""
    name, settings = split(text)
    if name in ADMISSIONS:
        maker: Callable[[], Admission] = EntryPoint(name, ADMISSIONS[name], GROUP).load()
        return make(maker, name, settings)
    raise unknown("admission", name, ADMISSIONS)


def _broken(entry: EntryPoint, error: Exception) -> UnknownName:
    package = f" of {entry.dist.name}" if entry.dist is not None else ""
    return UnknownName(
        f"the policy {entry.name!r} ({entry.value}{package}) cannot be loaded: {type(error).__name__}: {error}"
    )


__all__ = [
    "ADMISSIONS",
    "GROUP",
    "POLICIES",
    "Admission",
    "Ask",
    "Choice",
    "Policy",
    "PolicyFailed",
    "UnknownName",
    "decide",
    "find_admission",
    "find_maker",
    "find_policy",
    "knobs",
    "known_policies",
]
