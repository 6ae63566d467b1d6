"""What a step costs beside the model, and how much of that is hidden where the model computes beside the host.

Prints one JSON object a line. `decode batch N`: microseconds of a round of `Worker.step` in which N sequences decode
and the model computes nothing, with a pool attached in which each block is cached as it fills; nobody takes the
messages but this script. `decode batch 64, steps of M ms`: a device that needs so long for a step, with each step
planned while the one before runs, against the same without; ratio to `limit`: of the tokens/s that there would be if
steps followed each other at once.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import time

import numpy as np

from bench.common import line
from pyengine import _native
from pyengine.backend import Backend, Deferred, Pending, Readable, Slice, Written
from pyengine.backends.fake import FakeBackend, sleep_until
from pyengine.scheduler.messages import Tokens, Work
from pyengine.scheduler.types import Node, SamplingParams
from pyengine.worker.core import Worker

HASH_KEY = bytes(32)
#: Tokens of each prompt; answers are as long as is measured.
PROMPT = 100


class Nothing(FakeBackend):
    """A model that answers the same whatever it is asked, at once."""

    def execute(self, slices: list[Slice]) -> list[int]:
        return [-1 if slice_.sampling is None else 65 for slice_ in slices]


class Device(Nothing):
    """One that needs `seconds` for a step, and nothing of the host. overlaps: or it begins when it is waited for."""

    def __init__(self, seconds: float, overlaps: bool) -> None:
        super().__init__()
        self.overlaps = overlaps
        self._seconds = seconds
        self._free = 0.0

    def submit(self, slices: list[Slice], written: Written | None = None, readable: Readable | None = None) -> Pending:
        def tokens() -> list[int]:
            sleep_until(end if self.overlaps else time.perf_counter() + self._seconds)
            return self.execute(slices)

        end = self._free = max(self._free, time.perf_counter()) + self._seconds
        return Deferred(tokens)


class Loop:
    """A worker whose batch decodes, and its daemon. sampling: of each answer; pooled: whether it has a pool at all."""

    def __init__(self, backend: Backend, batch: int, sampling: SamplingParams, *, pooled: bool) -> None:
        spec = backend.namespace.kv
        pages = batch * (-(-(PROMPT + sampling.max_tokens) // spec.block_tokens) + 1)
        backend.allocate(pages)
        self.backend = backend
        self.daemon = _native.Daemon(node="a", dram_bytes=64 << 20, session_key=bytes(32), listen="127.0.0.1:0")
        self.worker = Worker(
            "w",
            backend,
            pages=pages,
            max_tokens=8192,
            max_sequences=batch,
            max_queue=1000,
            hash_key=HASH_KEY,
            incarnation=secrets.randbits(63),
        )
        if pooled:
            pool = self.daemon.attach(self.worker.mover.incarnation, spec.strips, spec.strip_bytes, 1)
            self.worker.attach(pool)
        self.batch, self.tokens = batch, 0
        for number in range(batch):
            self.worker.accept(self._work(number, sampling))
        while self.tokens < batch:
            self.round()

    def _work(self, number: int, sampling: SamplingParams) -> Work:
        worker = self.worker
        tokens = np.random.default_rng(number).integers(0, 256, PROMPT).astype(np.uint32)
        root = _native.root_key(worker.namespace, b"", b"", HASH_KEY)
        return Work(
            request=number,
            attempt=1,
            part="both",
            token_ids=tokens.tobytes(),
            generated=0,
            root=root,
            keys=_native.block_keys(tokens, worker.block_tokens, root, HASH_KEY),
            sampling=sampling,
            namespace=worker.namespace,
            decode_node=Node("a", "", 1),
            decode_incarnation=0,
            deadline=3600.0,
        )

    def round(self) -> None:
        for message in self.worker.step():
            if isinstance(message, Tokens):
                self.tokens += len(message.tokens)
        self.worker.take_ended()

    def close(self) -> None:
        self.worker.mover.close()
        self.backend.close()
        self.daemon.stop()


def answers(tokens: int) -> SamplingParams:
    """So long, whatever comes in them."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def overhead(batch: int, steps: int, *, pooled: bool) -> float:
    """Seconds of a step of a model that takes none: the median of runs of 16 steps, in which each fills one block."""
    loop = Loop(Nothing(), batch, answers(steps + 200), pooled=pooled)
    runs = []
    for _ in range(steps // 16):
        began = time.perf_counter()
        for _ in range(16):
            loop.round()
        runs.append((time.perf_counter() - began) / 16)
    loop.close()
    return statistics.median(runs)


def speed(milliseconds: float, steps: int, *, overlaps: bool) -> float:
    """Tokens/s of 64 sequences that decode."""
    loop = Loop(Device(milliseconds * 1e-3, overlaps), 64, answers(steps + 200), pooled=True)
    began = time.perf_counter()
    for _ in range(steps):
        loop.round()
    seconds = time.perf_counter() - began
    loop.close()
    return 64 * steps / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps: some ten seconds")
    arguments = parser.parse_args()
    steps = 320 if arguments.quick else 1600
    for batch in (1, 16, 64):
        for pooled in (True, False):
            seconds = overhead(batch, steps, pooled=pooled)
            line("loop", f"decode batch {batch}{'' if pooled else ' without pool'}", seconds * 1e6, "us a step")
    for milliseconds in (1.0, 5.0):
        # In turns, as what else the machine does comes and goes.
        turns = [[speed(milliseconds, steps // 2, overlaps=overlaps) for overlaps in (True, False)] for _ in range(3)]
        ahead, waiting = (statistics.median(turn) for turn in zip(*turns, strict=True))
        limit = 64 / (milliseconds * 1e-3)
        case = f"decode batch 64, steps of {milliseconds:.0f} ms"
        line("loop", case, ahead, "tokens/s", against="not planned ahead", ratio=ahead / waiting)
        line("loop", case, ahead, "tokens/s", against="limit", ratio=ahead / limit)
        line("loop", f"{case}, not planned ahead", waiting, "tokens/s", against="limit", ratio=waiting / limit)


if __name__ == "__main__":
    main()
