"""Options that several commands share: which requests, which cluster, how it is scheduled, where the results go."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from ..policies import find_admission, find_policy
from ..report.plots import need_plots
from ..sim.spec import ClusterSpec, RunSpec
from ..sim.specfile import load_cluster
from ..types import Slo
from .guard import InputError, try_output

Flag = Annotated[bool, Parameter(negative=())]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Which cluster, and what is promised there.

    Parameters
    ----------
    cluster
        A cluster file (TOML), or one that comes along: paper (8 prefill and 8 decode nodes of 8 A800), small (2 and 2).
    ttft
        Objective for the time to the first token, seconds; instead of the cluster file's.
    tbt
        Objective for the time between tokens (mean of a request's longest tenth), seconds; instead of the file's.
    """

    cluster: str = "paper"
    ttft: float | None = None
    tbt: float | None = None

    def spec(self) -> ClusterSpec:
        """Raises SpecError, InputError."""
        found = load_cluster(self.cluster)
        return msgspec.structs.replace(found, slo=self.slo(found.slo))

    def slo(self, base: Slo) -> Slo:
        changed = {
            name: positive(f"--{name}", value) for name in ("ttft", "tbt") if (value := getattr(self, name)) is not None
        }
        return msgspec.structs.replace(base, **changed)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How it is scheduled.

    Parameters
    ----------
    policy
        random, round-robin, least-loaded, least-queue-time, cache-aware, kvcache-centric, least-harm; models of others:
        dynamo, sglang, llm-d, lmetric, preble, netkv; or an entry point of the group pyengine.policies. Settings:
        name:knob=value,...
    admission
        none, or who refuses what would miss an objective: at-arrival, patient, predictive, predictive-system, baseline.
    roles
        Workers change between prefill and decode as the load asks.
    seed
        Of all that is drawn: jitter, policies, the generated trace.
    """

    policy: str = "kvcache-centric"
    admission: str = "none"
    roles: Flag = False
    seed: int = 0

    def spec(self) -> RunSpec:
        """Raises UnknownName, InputError."""
        return run_spec(self.policy, self.admission, self.roles, self.seed)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Output:
    """Where results go.

    Parameters
    ----------
    json
        File for everything, as JSON.
    plot
        File for a picture (.png, .svg or .pdf; needs matplotlib).
    progress
        Shows progress also where stderr is no terminal (a line every 10 s); --no-progress: never.
    """

    json: Path | None = None
    plot: Path | None = None
    progress: bool | None = None

    def check(self) -> None:
        """Raises InputError, NoPlots: before the work."""
        if self.plot is not None:
            need_plots()
            if self.plot.suffix not in (".png", ".svg", ".pdf"):
                raise InputError(f"--plot {self.plot}: pictures are .png, .svg or .pdf")
        try_output(self.json, self.plot)


def run_spec(policy: str, admission: str, roles: bool, seed: int) -> RunSpec:
    """Raises UnknownName, InputError."""
    find_policy(policy)
    find_admission(admission)
    # Generators take the size of a negative number: two seeds would be one.
    at_least("--seed", seed, 0)
    return RunSpec(policy=policy, admission=admission, roles=roles, seed=seed)


def positive(name: str, value: float) -> float:
    """Raises InputError."""
    if not 0 < value < math.inf:
        raise InputError(f"{name} must be a number above 0, not {value:g}")
    return value


def share(name: str, value: float) -> float:
    """Raises InputError."""
    if not 0 < value <= 1:
        raise InputError(f"{name} is a share, above 0 and at most 1, not {value:g}")
    return value


def at_least(name: str, value: int, least: int) -> int:
    """Raises InputError."""
    if value < least:
        raise InputError(f"{name} must be at least {least}, not {value}")
    return value
