"""The seam's null twin: a cluster that answers everything at once. And one that fails, in every way a plugin can."""

from __future__ import annotations

import hashlib

import numpy as np

from pyengine.scheduler.backends import Found, Progress, Task
from pyengine.scheduler.explanation import Explanation
from pyengine.scheduler.sim.report import Records, Report


class NullBackend:
    """seconds: that each request takes. What has been asked before is reused, whatever the cluster's size."""

    name = "null"
    fidelity = "none: nothing is computed"
    deterministic = True

    def __init__(self, *, seconds: str = "0.5") -> None:
        self._seconds = float(seconds)

    def run(self, task: Task, progress: Progress | None = None) -> Report:
        known: set[bytes] = set()
        rows: list[tuple[float, int, int, int]] = []
        complete = True
        try:
            for request in task.requests:
                cached = sum(key in known for key in request.blocks) * task.cluster.block_tokens
                known.update(request.blocks)
                reused = min(cached, request.prompt_tokens - 1)
                rows.append((request.arrival, request.prompt_tokens, request.output_tokens, reused))
                if progress is not None:
                    progress(len(rows), None, request.arrival)
        except KeyboardInterrupt:
            complete = False
        arrival, prompt, output, cached_tokens = np.array(rows, dtype=np.float64).reshape(-1, 4).T
        same = np.full(len(rows), self._seconds)
        workers = np.zeros(len(rows), dtype=np.int64)
        made = Records(
            arrival=arrival,
            prompt_tokens=prompt.astype(np.int64),
            output_tokens=output.astype(np.int64),
            outcome=workers,
            ttft=same,
            second_gap=same * 0,
            tbt=same * 0,
            tbt_mean=same * 0,
            finished=arrival + same,
            prefill_seconds=same,
            cached=cached_tokens.astype(np.int64),
            tiers={"dram": cached_tokens.astype(np.int64)},
            prefill_worker=workers,
            decode_worker=workers,
            predicted_ttft=same,
            held=same * 0,
            wasted=np.zeros(len(rows), dtype=np.bool_),
        )
        facts = {"trace": task.description, "backend": self.name, "fidelity": self.fidelity, "version": "0"}
        return Report(
            records=made,
            workers=["null"],
            series={},
            totals={"requests": float(len(rows))},
            provenance={**facts, "policy": task.run.policy, "seed": task.run.seed},
            digest=hashlib.blake2b(repr(rows).encode(), digest_size=8).hexdigest(),
            complete=complete,
        )

    def cluster(self) -> Found | None:
        return None

    def explain(self, task: Task, number: int) -> Explanation:
        request = list(task.requests)[number]
        return Explanation(
            gateway="null", request=number, attempt=0, at=request.arrival, policy=task.run.policy,
            prompt_tokens=request.prompt_tokens, blocks=len(request.blocks), best=0,
        )  # fmt: skip


class Broken(NullBackend):
    """where: "make", "run", "cluster", or "answer", which is none."""

    def __init__(self, *, where: str) -> None:
        super().__init__()
        self._where = where
        self._fail("make")

    def run(self, task: Task, progress: Progress | None = None) -> Report:
        self._fail("run")
        if self._where == "answer":
            return 5  # type: ignore[return-value]
        return super().run(task, progress)

    def cluster(self) -> Found | None:
        self._fail("cluster")
        return super().cluster()

    def _fail(self, where: str) -> None:
        if self._where == where:
            raise ZeroDivisionError(f"no {where}")
