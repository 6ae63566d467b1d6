"""pyengine's TransferEngine. Options: the transport, `unchecked` (no checksums), `private` (memory not shared).

Over tcp its memory is that of all others, over shm its own kind, which other processes can map.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bench.peers.driver import POOL_BYTES, Child, Offsets, main, plain_memory
from pyengine.transfer import Copies, Peer, RemoteRegion, TransferEngine

#: Bytes of each engine in `with_peers`.
SHARE = POOL_BYTES // 64


class Ours:
    def __init__(self, role: str, options: list[str]) -> None:
        self.transport: Any = options[0]
        self.region: Any
        self.engine = self.start("unchecked" not in options)
        if self.transport == "tcp" or "private" in options:
            self.memory = plain_memory()
            self.region = self.engine.register(self.memory, name="bench")
        else:
            self.region = self.engine.allocate(POOL_BYTES, name="bench")
            self.memory = np.frombuffer(memoryview(self.region), np.uint8)
        self.more: list[TransferEngine] = []

    def start(self, checksums: bool) -> TransferEngine:
        return TransferEngine("127.0.0.1:0", transports=self.transport, checksums=checksums)

    def address(self) -> Any:
        return self.engine.address

    def connect(self, address: Any) -> None:
        self.peer = self.engine.connect(address, transport=self.transport)
        self.remote = self.peer.region("bench")

    def prepare(self, op: str, local: Offsets, remote: Offsets, block: int) -> Any:
        return op, self.engine.prepare([(self.region, local, self.remote, remote, block)])

    def run(self, batch: Any) -> None:
        op, copies = batch
        self.engine.run(self.peer, op, copies)

    # -- what only ours is asked for -----------------------------------------------------------------------------------

    def engines(self, count: int) -> list[str]:
        """Of a target: starts so many engines, each with memory of its own."""
        while len(self.more) < count:
            self.more.append(self.start(True))
            self.more[-1].allocate(SHARE, name="bench")
        return [engine.address for engine in self.more[:count]]

    def with_peers(self, target: Child, count: int, block: int, seconds: float) -> Any:
        """64 MiB at a time in blocks, in equal shares to so many engines at once."""
        batches: list[tuple[Peer, Copies]] = []
        share = min(SHARE, (64 << 20) // count)
        for index, address in enumerate(target.ask({"call": "engines", "count": count})):
            peer = self.engine.connect(address, transport=self.transport)
            offsets = np.arange(0, share, block, dtype=np.uint64)
            remote: RemoteRegion = peer.region("bench")
            local = offsets + np.uint64(index * share)
            repeats = (64 << 20) // count // share
            batches += [(peer, self.engine.prepare([(self.region, local, remote, offsets, block)]))] * repeats
        rounds = -1
        while True:
            for transfer in [self.engine.submit(peer, "write", copies, wait=10.0) for peer, copies in batches]:
                transfer.wait()
            # The first round makes the lanes.
            rounds += 1
            if rounds == 0:
                start = time.perf_counter()
            elif time.perf_counter() - start > seconds:
                return {"gbps": rounds * (64 << 20) / (time.perf_counter() - start) / 1e9}

    def cancel(self, target: Child, times: int) -> Any:
        """Microseconds from `cancel` of 64 MiB that are under way until no byte of them is touched any more."""
        offsets = np.arange(0, 64 << 20, 1 << 20, dtype=np.uint64)
        copies = self.engine.prepare([(self.region, offsets, self.remote, offsets, 1 << 20)])
        took: list[float] = []
        while len(took) < times:
            transfer = self.engine.submit(self.peer, "write", copies)
            while transfer.progress[0] == 0:
                pass
            start = time.perf_counter()
            transfer.cancel()
            while not transfer.done:
                pass
            if transfer.outcome == "cancelled":
                took.append((time.perf_counter() - start) * 1e6)
        took.sort()
        return {"p50_us": took[len(took) // 2], "max_us": took[-1]}


if __name__ == "__main__":
    main(Ours)
