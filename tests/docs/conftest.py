"""One server of the fake backend, for all commands and programs of the pages that ask one."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from bench.server import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--nodes", "2", "--dram-bytes", "32MiB")
    with Server(
        *flags, model="fake:max_positions=256", backend="fake", state_dir=tmp_path_factory.mktemp("state")
    ) as server:
        # What the pages look at in /metrics: a request has crossed from node to node.
        httpx2.post(f"{server.base}/v1/completions", json={"model": "fake", "prompt": "x" * 64, "max_tokens": 4})
        seen = ("pyengine_transfer_bytes_total", "pyengine_transfer_blocks_total", "pyengine_worker_tokens_total")
        server.wait_until(lambda: all(server.metric(name) > 0 for name in seen), 60.0, "told of a transfer")
        yield server


def for_server(text: str, server: Server) -> str:
    """What a page asks `pyengine serve` with its default model and port, as this server is asked."""
    return text.replace(":8000", f":{server.port}").replace('"smollm2"', '"fake"')
