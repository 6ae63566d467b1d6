"""Mooncake's Transfer Engine over tcp, as its Python wheel gives it. Options: none."""

from __future__ import annotations

import os
from typing import Any

from mooncake.engine import TransferEngine

from bench.peers.driver import Offsets, main, plain_memory


class Mooncake:
    def __init__(self, role: str, options: list[str]) -> None:
        self.memory = plain_memory()
        self.engine = TransferEngine()
        check(self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        check(self.engine.register_memory(self.memory.ctypes.data, self.memory.nbytes))
        self.base = self.memory.ctypes.data

    def address(self) -> Any:
        return [f"127.0.0.1:{self.engine.get_rpc_port()}", self.base]

    def connect(self, address: Any) -> None:
        self.target, self.remote = address

    def prepare(self, op: str, local: Offsets, remote: Offsets, block: int) -> Any:
        names = {"write": "batch_transfer_sync_write", "read": "batch_transfer_sync_read"}
        transfer = getattr(self.engine, names[op])
        mine, theirs = (local + self.base).tolist(), (remote + self.remote).tolist()
        return transfer, mine, theirs, [block] * len(mine)

    def run(self, batch: Any) -> None:
        transfer, mine, theirs, sizes = batch
        check(transfer(self.target, mine, theirs, sizes))


def check(status: int) -> None:
    if status != 0:
        raise SystemExit(f"mooncake: status {status}")


if __name__ == "__main__":
    main(Mooncake)
    # Its threads do not end by themselves.
    os._exit(0)
