"""Goal: clients that hold connections and say nothing cost the gateway a bounded amount of memory, and nobody else
anything. (Those that take nothing: tests/gateway/test_api.py.)
Method: a real gateway, whose memory the kernel tells.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

from bench.server import Server
from tests.system.conftest import PATIENCE, complete, fake_server, prompt

#: Connections without a word, and what each may take: bytes, as much as is promised for one with a stream on it.
IDLE, EACH = 1000, 100_000


def memory(server: Server) -> int:
    """Bytes of the gateway that are in memory."""
    status = Path(f"/proc/{server.children()['gateway']}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) << 10


def test_a_thousand_idle_connections_are_cheap(state_dir: Path) -> None:
    with fake_server(state_dir) as server, ExitStack() as held:
        complete(server, prompt(60), 5)
        before = memory(server)
        port = int(server.base.rpartition(":")[2])
        for _ in range(IDLE):
            held.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE))
        # Behind all of them in the queue of those that come.
        complete(server, prompt(60), 5)
        assert memory(server) - before < IDLE * EACH
