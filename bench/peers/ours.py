"""pyengine's TransferEngine. Options: the transport, `unchecked` (no checksums), `private` (memory not shared).

Over tcp its memory is that of all others, over shm its own kind, which other processes can map.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bench.peers.driver import POOL_BYTES, Child, Offsets, main, plain_memory
from pyengine.transfer import Copies, Peer, Region, RemoteRegion, TransferEngine

#: Bytes of a round of `with_peers`, all peers together; half of the pool, and still far more than a core's caches.
ROUND_BYTES = POOL_BYTES // 2


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
        self.shares: dict[int, list[Region]] = {}

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
        """Of a target: so many engines, with ROUND_BYTES of memory in equal shares that are called `count`."""
        while len(self.more) < count:
            self.more.append(self.start(True))
        if count not in self.shares:
            self.shares[count] = [
                engine.allocate(ROUND_BYTES // count, name=str(count)) for engine in self.more[:count]
            ]
        return [engine.address for engine in self.more[:count]]

    def with_peers(self, target: Child, count: int, block: int, seconds: float) -> Any:
        """ROUND_BYTES at a time in blocks, in equal shares to so many engines at once."""
        batches: list[tuple[Peer, Copies]] = []
        share = ROUND_BYTES // count
        for index, address in enumerate(target.ask({"call": "engines", "count": count})):
            peer = self.engine.connect(address, transport=self.transport)
            offsets = np.arange(0, share, block, dtype=np.uint64)
            remote: RemoteRegion = peer.region(str(count))
            local = offsets + np.uint64(index * share)
            batches.append((peer, self.engine.prepare([(self.region, local, remote, offsets, block)])))
        rounds = -1
        while True:
            for transfer in [self.engine.submit(peer, "write", copies, wait=10.0) for peer, copies in batches]:
                transfer.wait()
            # The first round makes the lanes.
            rounds += 1
            if rounds == 0:
                start = time.perf_counter()
            elif time.perf_counter() - start > seconds:
                return {"gbps": rounds * ROUND_BYTES / (time.perf_counter() - start) / 1e9}

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
