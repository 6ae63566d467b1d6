"""What is measured of a simulated run: one row per request, curves over time, totals, and a digest of it all."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from .gateway import RequestModel
from .node import TIERS
from .report import DONE, F64, FAILED, I64, UNFINISHED, Records, Report, longest_tenth

if TYPE_CHECKING:
    from .cluster import Simulation

#: Seconds between two points of a curve.
EVERY = 10.0
#: Ranks, by requests that name them, of the blocks whose copies are counted: those of the paper's figure.
RANKS = (10, 100, 1_000, 10_000)


class Measure:
    """Follows a simulation."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        count = len(sim.requests)
        self._floats: dict[str, F64] = {
            name: np.full(count, np.nan)
            for name in ("ttft", "second_gap", "tbt", "tbt_mean", "finished", "predicted_ttft", "held")
        }
        self._numbers: dict[str, I64] = {
            name: np.zeros(count, np.int64) for name in ("cached", "prefill_worker", "decode_worker", "outcome")
        }
        self._numbers["outcome"][:] = UNFINISHED
        self._tiers = {tier: np.zeros(count, np.int64) for tier in TIERS}
        self._prefill_seconds = np.zeros(count)
        self._wasted = np.zeros(count, bool)
        self._seconds: list[float] = []
        self._curves: dict[str, list[float]] = {}
        self._ranked = self._rank()
        self._over = 0
        sim.loop.measure(0.0, self._sample)

    def _rank(self) -> dict[str, bytes]:
        uses: Counter[bytes] = Counter()
        for model in self.sim.requests:
            uses.update(model.request.blocks)
        # Equally often used ones in the order in which they come first.
        keys = [key for key, _ in uses.most_common(max(RANKS))]
        return {f"replicas {rank}": keys[rank - 1] for rank in RANKS if rank <= len(keys)}

    # -- requests --------------------------------------------------------------------------------------------------

    def over(self, model: RequestModel) -> None:
        """The request has its outcome."""
        sim, number = self.sim, model.number
        self._over += 1
        numbers, floats = self._numbers, self._floats
        numbers["outcome"][number] = model.outcome
        floats["ttft"][number] = model.first_token - model.request.arrival
        floats["finished"][number] = model.finished
        floats["predicted_ttft"][number] = model.predicted
        floats["held"][number] = model.first_token - model.came
        numbers["cached"][number] = model.cached or 0
        for tier, blocks in zip(TIERS, model.reused, strict=False):
            self._tiers[tier][number] = blocks * sim.block_tokens
        numbers["prefill_worker"][number] = sim.number_of(model.prefill)
        numbers["decode_worker"][number] = sim.number_of(model.decode)
        self._prefill_seconds[number] = model.prefill_seconds
        self._wasted[number] = model.prefills > 0 and not math.isfinite(model.finished)
        if not math.isnan(model.first_token):
            gaps = model.gaps()
            floats["tbt"][number] = longest_tenth(gaps)
            floats["tbt_mean"][number] = gaps.mean() if len(gaps) else 0.0
            floats["second_gap"][number] = gaps[0] if len(gaps) else np.nan

    # -- curves ----------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        sim, now = self.sim, self.sim.loop.now
        self._seconds.append(now)
        workers = [worker for worker in sim.workers.values() if worker.alive]
        slo = sim.spec.slo
        prefills = [worker.queue_seconds() for worker in workers if worker.role.prefills]
        decodes = [worker.gap() for worker in workers if worker.role.decodes]
        self._point("prefill load", _mean(prefills) / slo.ttft if slo.ttft else math.nan)
        self._point("decode load", _mean(decodes) / slo.tbt if slo.tbt else math.nan)
        self._point("running", sum(worker.batcher.running for worker in workers))
        self._point("queued", sum(worker.batcher.waiting for worker in workers))
        self._point("prefill workers", len(prefills))
        nodes = [node for node in sim.nodes.values() if node.up]
        for name, key in self._ranked.items():
            self._point(name, sum(node.leading(key)[0] for node in nodes))
        if sim.progress is not None:
            sim.progress(now, self._over, len(sim.requests))
        sim.loop.measure(now + EVERY, self._sample)

    def _point(self, name: str, value: float) -> None:
        self._curves.setdefault(name, []).append(float(value))

    # -- the end ---------------------------------------------------------------------------------------------------

    def report(self, description: str) -> Report:
        sim = self.sim
        records = self._records()
        seconds = np.array(self._seconds)
        series = {name: (seconds, np.array(values)) for name, values in self._curves.items()}
        totals = self._totals()
        return Report(
            records=records,
            workers=list(sim.workers),
            series=series,
            totals=totals,
            provenance=self._provenance(description),
            digest=self._digest(records, series, totals),
            complete=sim.complete,
            notes=[*sim.notes, *_failures(sim.failed_decisions)],
        )

    def _records(self) -> Records:
        requests = [model.request for model in self.sim.requests]
        return Records(
            arrival=np.array([request.arrival for request in requests], np.float64),
            prompt_tokens=np.array([request.prompt_tokens for request in requests], np.int64),
            output_tokens=np.array([request.output_tokens for request in requests], np.int64),
            prefill_seconds=self._prefill_seconds,
            tiers=self._tiers,
            wasted=self._wasted,
            **{**self._floats, **self._numbers},  # type: ignore[arg-type]
        )

    def _totals(self) -> dict[str, float]:
        sim = self.sim
        workers, nodes = sim.workers.values(), sim.nodes.values()
        failed = sim.failed_decisions.total()
        return {
            # Not there where policies do what they should: their digests stay what they were before there was this.
            **({FAILED: failed} if failed else {}),
            "seconds": sim.loop.now,
            "steps": sum(worker.steps for worker in workers),
            "evictions": sum(node.pool.evictions for node in nodes),
            "replicated blocks": sim.replicated,
            "sent bytes": sim.sent,
            "role switches": sim.switches,
            # Answers that filled all pages there are, or were as long as clients allow.
            "cut short": sum(m.outcome == DONE and m.held < m.output_tokens for m in sim.requests),
            "retries": sum(max(model.attempt, 0) for model in sim.requests),
        }

    def _provenance(self, description: str) -> dict[str, object]:
        sim = self.sim
        try:
            release = version("pyengine-llm")
        except PackageNotFoundError:
            release = "of a working tree"
        models = {worker.time.name: worker.time for worker in sim.workers.values()}
        return {
            "trace": description,
            "seed": sim.run_spec.seed,
            "version": release,
            "policy": sim.run_spec.policy,
            "admission": sim.run_spec.admission,
            "cluster": msgspec.to_builtins(sim.spec),
            "run": msgspec.to_builtins(sim.run_spec),
            "cost models": {name: {"about": m.about, "source": m.source} for name, m in models.items()},
            "fidelity": "simulated: production conductor, batcher and pools; steps, links and SSDs by models",
        }

    def _digest(self, records: Records, series: dict[str, tuple[F64, F64]], totals: dict[str, float]) -> str:
        """Of every request's times, every step's end, and every curve."""
        digest = hashlib.blake2b(digest_size=16)
        for name in records.__dataclass_fields__:
            column = getattr(records, name)
            for array in column.values() if isinstance(column, dict) else (column,):
                digest.update(np.ascontiguousarray(array).tobytes())
        for worker in self.sim.workers.values():
            digest.update(worker.ends.tobytes())
        for _, values in series.values():
            digest.update(values.tobytes())
        digest.update(np.array(list(totals.values())).tobytes())
        return digest.hexdigest()


def _failures(failed: Counter[str]) -> list[str]:
    """A sentence for each of the most frequent."""
    return [f"{count:,} requests were refused: {reason}" for reason, count in failed.most_common(5)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
