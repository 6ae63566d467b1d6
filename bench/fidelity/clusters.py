"""The two clusters that are compared: sixteen workers that keep time by a cost model, and two that compute."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from bench.server import Server
from pyengine.scheduler.backends import Found
from pyengine.scheduler.sim import sessions
from pyengine.scheduler.sim.compute import Coefficients, StepTime
from pyengine.scheduler.sim.sessions import Kind, Lengths
from pyengine.scheduler.sim.spec import ClusterSpec
from pyengine.scheduler.types import Slo

#: Of prompts and answers as the repository's generated trace has them; who thinks for seconds only comes to a steady
#: load within the seconds that do not count.
CHAT = replace(sessions.CHAT, output=Lengths(mean=80, sigma=0.6), think=6.0, longest=4096)
AGENT = replace(sessions.AGENT, system=1024, think=2.0, longest=4096)
#: Short enough for one core to prefill in a second.
SMALL_CHAT = Kind(
    name="small chat",
    share=1.0,
    system=64,
    first=Lengths(mean=100, sigma=0.6),
    turn=Lengths(mean=40, sigma=0.6),
    output=Lengths(mean=24, sigma=0.5),
    turns=3.0,
    think=3.0,
    longest=512,
)
BASE_MODEL = "llama3-70b-a800"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One cluster and what it is asked.

    limits: by which share of the live value the simulated may differ, by figure. rates: requests per second among which
    the one with the most goodput is sought. low: share of that rate at which it is compared first. single: count, every
    so many seconds, tokens of prompts and of answers of the requests that are sent alone; no decode worker takes such
    prompts. warm, seconds, rest: of a load; they do not count, count, and bring nothing. learns: costs are those which
    its workers tell while they serve; otherwise they keep time by a model, times time_scale. pinned: each worker has a
    core of its own, and gives way to what else wants that core.
    """

    name: str
    about: str
    prefill: int
    decode: int
    backend: str
    model: str
    flags: tuple[str, ...]
    kinds: tuple[Kind, ...]
    slo: Slo
    limits: Mapping[str, float]
    rates: tuple[float, ...]
    low: float = 0.5
    single: tuple[int, float, tuple[int, ...], int] = (20, 1.5, (1500,), 9)
    warm: float = 12.0
    seconds: float = 45.0
    rest: float = 8.0
    learns: bool = False
    pinned: bool = False
    time_scale: float = 1.0

    def server(self, folder: Path) -> Server:
        """Not started yet. folder: for its secret and its cost model."""
        model = self.model
        if not self.learns:
            model = f"{model},cost={self._cost(folder)}"
        flags = ("--prefill", str(self.prefill), "--decode", str(self.decode), *self.flags)
        for name, seconds in (("ttft", self.slo.ttft), ("tbt", self.slo.tbt)):
            if seconds is not None:
                flags += (f"--slo-{name}", str(seconds))
        # A converted model is kept where it is; the other cluster has nothing to keep.
        state = None if self.learns else folder / "state"
        return Server(*flags, model=model, backend=self.backend, state_dir=state, start_timeout=300.0)

    def spec(self, found: Found, folder: Path) -> ClusterSpec:
        """The cluster file: as the gateway tells, costs as the workers keep or have fitted them."""
        files = {}
        for name, fitted in found.models.items():
            files[name] = folder / f"{name}.toml"
            fitted.save(files[name])
        cost = None if self.learns else self._cost(folder)
        workers = tuple(
            msgspec.structs.replace(worker, model=str(cost or files[worker.model])) for worker in found.spec.workers
        )
        return msgspec.structs.replace(found.spec, workers=workers, slo=self.slo)

    def _cost(self, folder: Path) -> Path:
        """The model that the workers keep time by: one that comes along, slowed down."""
        path = folder / "cost.toml"
        if not path.exists():
            base = StepTime.load(BASE_MODEL)
            slow = {name: self.time_scale * value for name, value in msgspec.structs.asdict(base.coefficients).items()}
            about = f"{base.about}, {self.time_scale:g} times as long"
            StepTime("cost", about, base.source, Coefficients(**slow)).save(path)
        return path


_PERCENTILES = ("ttft p50", "ttft p90", "ttft p99", "tbt p50", "tbt p90", "tbt p99")

FAKE = Setting(
    name="fake",
    about="8 prefill and 8 decode workers on 16 nodes, the fake backend keeping time by a cost model",
    prefill=8,
    decode=8,
    backend="fake",
    model="fake:layers=1,kv_heads=1,head_dim=2",
    flags=(
        *("--nodes", "16", "--dram-bytes", "32MiB", "--pages", "8000", "--threads", "1"),
        *("--max-tokens-per-step", "2048", "--max-sequences", "64"),
    ),
    kinds=(CHAT, AGENT),
    slo=Slo(ttft=3.0, tbt=0.2),
    limits={**dict.fromkeys(_PERCENTILES, 0.10), "goodput": 0.05},
    rates=(8.0, 10.0, 12.0, 14.0, 16.0, 18.0, 21.0, 24.0, 28.0),
    time_scale=2.0,
)

REAL = Setting(
    name="real",
    about="1 prefill and 1 decode worker that compute SmolLM2 (135M), each on a core of its own",
    prefill=1,
    decode=1,
    backend="torch",
    model="smollm2",
    flags=("--nodes", "2", "--dram-bytes", "512MiB", "--pages", "2048", "--threads", "1", "--max-sequences", "16"),
    kinds=(SMALL_CHAT,),
    # Five times what a request takes that is alone.
    slo=Slo(ttft=1.0, tbt=0.1),
    limits=dict.fromkeys(("ttft p50", "ttft p90", "tbt p50", "tbt p90"), 0.15),
    rates=(2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0),
    single=(12, 1.6, (192, 64), 9),
    warm=6.0,
    seconds=36.0,
    rest=6.0,
    learns=True,
    pinned=True,
)

SETTINGS = (FAKE, REAL)


def quick(setting: Setting) -> Setting:
    """The same with as little as shows that all works."""
    if setting.learns:
        return replace(setting, warm=2.0, seconds=6.0, rest=3.0, single=(4, 1.6, (192, 64), 9), rates=(0.5, 1.0))
    flags = tuple("4" if flag == "16" else flag for flag in setting.flags)
    small = replace(setting, prefill=2, decode=2, flags=flags, single=(4, 0.7, (1500,), 9), rates=(2.0, 4.0))
    return replace(small, warm=1.0, seconds=3.0, rest=2.0, time_scale=0.5, slo=Slo(ttft=0.75, tbt=0.05))


def cores() -> list[int]:
    """Of this machine, as far as they may be used."""
    return sorted(os.sched_getaffinity(0))
