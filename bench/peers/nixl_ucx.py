"""NIXL with its UCX backend. UCX_TLS=tcp in the environment makes it use sockets, else it chooses by itself."""

from __future__ import annotations

import base64
from typing import Any

from nixl_cu12._api import nixl_agent, nixl_agent_config

from bench.peers.driver import Offsets, main, plain_memory


class Nixl:
    def __init__(self, role: str, options: list[str]) -> None:
        self.memory = plain_memory()
        self.agent = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
        self.base = self.memory.ctypes.data
        self.registered = self.agent.register_memory([(self.base, self.memory.nbytes, 0, "")], "DRAM")

    def address(self) -> Any:
        return [base64.b64encode(self.agent.get_agent_metadata()).decode(), self.base]

    def connect(self, address: Any) -> None:
        metadata, self.remote = address
        peer = self.agent.add_remote_agent(base64.b64decode(metadata))
        self.peer = peer.decode() if isinstance(peer, bytes) else peer

    def prepare(self, op: str, local: Offsets, remote: Offsets, block: int) -> Any:
        mine, theirs = (
            self.agent.get_xfer_descs([(address, block, 0) for address in (offsets + base).tolist()], "DRAM")
            for base, offsets in ((self.base, local), (self.remote, remote))
        )
        return self.agent.initialize_xfer(op.upper(), mine, theirs, self.peer, b"")

    def run(self, batch: Any) -> None:
        state = self.agent.transfer(batch)
        while state != "DONE":
            if state == "ERR":
                raise SystemExit("nixl: the transfer failed")
            state = self.agent.check_xfer_state(batch)


if __name__ == "__main__":
    main(Nixl)
