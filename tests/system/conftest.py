"""What the system tests share: servers, clients, and a look at what a server leaves behind."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bench.server import START_TIMEOUT, Server

from .. import waiting

#: The VM of `make test-rdma` emulates its processors: all takes so many times longer there.
SLOWNESS = 10 if "PYENGINE_TEST_RDMA" in os.environ else 1
#: Seconds. Generous: an event that takes longer never comes.
PATIENCE = 60.0 * SLOWNESS
FAKE_SLOW = "fake:seconds_per_step=0.02"
#: For tests over rdma: elsewhere `make test-rdma` runs them in its VM, where devices that are missing are a failure.
needs_rdma = pytest.mark.skipif(
    not Path("/sys/class/infiniband").is_dir() and SLOWNESS == 1,
    reason="no RDMA devices here: make test-rdma runs this in a VM",
)


until = partial(waiting.until, patience=PATIENCE)


@pytest.fixture(scope="session")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One state directory for the session: the secret, and the model converted once."""
    return tmp_path_factory.mktemp("state")


def fake_server(state_dir: Path, *flags: str, model: str = "fake", environment: dict[str, str] | None = None) -> Server:
    return Server(
        *flags,
        "--dram-bytes",
        "32MiB",
        backend="fake",
        model=model,
        state_dir=state_dir,
        environment=environment,
        start_timeout=START_TIMEOUT * SLOWNESS,
    )


def crossed(server: Server, transport: str, what: str = "blocks") -> tuple[float, float]:
    """What has left node-0 and what has come to node-1 by this transport: blocks or bytes, as each node counts them."""
    name = f"pyengine_transfer_{what}_total"
    return (
        server.metric(name, transport=transport, direction="out", node="node-0"),
        server.metric(name, transport=transport, direction="in", node="node-1"),
    )


def expect_no_other(server: Server, transport: str) -> None:
    """All that has crossed went by this transport, from node-0 to node-1."""
    assert server.metric("pyengine_transfer_bytes_total") == sum(crossed(server, transport, "bytes")) > 0
    assert server.metric("pyengine_transfer_blocks_total") == sum(crossed(server, transport))


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(f"{length}/{seed}")
    return [generator.randrange(256) for _ in range(length)]


def text(ids: list[int]) -> str:
    """The fake backend answers in printable ASCII."""
    return bytes(ids).decode()


def complete(server: Server, ids: list[int], tokens: int, **fields: Any) -> dict[str, Any]:
    """One completion, not streamed; the test fails on any status but 200."""
    response = httpx2.post(f"{server.base}/v1/completions", json=body(ids, tokens, **fields), timeout=600)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def body(ids: list[int], tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": fields.pop("model", "fake"),
        "prompt": ids,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def stream(server: Server, ids: list[int], tokens: int, **fields: Any) -> Iterator[str]:
    """Pieces of text of a streamed completion, as they come; raises StreamFailed on an error event."""
    payload = body(ids, tokens, stream=True, **fields)
    with httpx2.stream("POST", f"{server.base}/v1/completions", json=payload, timeout=600) as response:
        if response.status_code != 200:
            response.read()
            raise StreamFailed(response.text)
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise StreamFailed(event["error"])
            for choice in event["choices"]:
                yield choice["text"]


class StreamFailed(Exception):
    """The server ended a stream with a typed error."""
