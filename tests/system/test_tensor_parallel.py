"""Goal: a worker spread over two processes serves as any other, and dies as one.

Method: a decode worker of two ranks behind a prefill worker of one, on a random model with eight KV heads; its rank is
killed while nothing happens.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from bench.server import Server, is_alive
from pyengine.backend import Slice
from pyengine.checkpoint import resolve
from pyengine.scheduler.types import SamplingParams
from tests.model.checkpoints import write_tiny
from tests.system.conftest import complete, prompt, stream, until

pytest.importorskip("torch", reason="needs the torch extra")

TOKENS = 20


def alone(folder: Path, cache: Path, ids: list[int]) -> list[int]:
    """What the model says, in one process and with no pool."""
    from pyengine.backends.torch import TorchBackend

    backend = TorchBackend(resolve(str(folder), cache), threads=1)
    backend.allocate(16)
    greedy, pages = SamplingParams(temperature=0.0), np.arange(16, dtype=np.int32)
    said: list[int] = []
    while len(said) < TOKENS:
        new = ids if not said else said[-1:]
        start = len(ids) + len(said) - len(new)
        said += backend.execute([Slice(np.array(new, np.uint32), start, pages, greedy)])
    return said


def ranks_of(server: Server) -> list[int]:
    """Processes that the decode worker has started."""
    worker = server.children().get("decode-0")
    if worker is None:
        return []
    tasks = Path(f"/proc/{worker}/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


def test_a_worker_of_two_ranks_serves(tmp_path: Path, state_dir: Path) -> None:
    folder = write_tiny(tmp_path / "model", num_attention_heads=8, num_key_value_heads=8)
    ids = prompt(100)
    expected = alone(folder, tmp_path, ids)

    def ask() -> None:
        answer = complete(server, ids, TOKENS, model="model", return_token_ids=True)
        assert answer["choices"][0]["token_ids"] == expected

    flags = ("--prefill", "1", "--decode", "1", "--decode-tp", "2", "--dram-bytes", "32MiB", "--pages", "64")
    with Server(*flags, model=str(folder), state_dir=state_dir) as server:
        ask()
        assert server.metric("pyengine_recomputed_tokens_total") == 0, "what one rank has written two can read"
        ask()  # and what two have cached
        for piece in stream(server, prompt(60), 300, model="model"):
            assert piece is not None
            break  # the client goes
        until(lambda: server.metric("pyengine_worker_requests") == 0, "the request is aborted")
        until(lambda: server.metric("pyengine_worker_pages", state="referenced") == 0, "pages are released")
        until(lambda: server.metric("pyengine_pool_grants") == 0, "grants are dropped")

        (rank,) = ranks_of(server)
        os.kill(rank, signal.SIGKILL)
        until(lambda: ranks_of(server) not in ([], [rank]), "the worker is started again, with a rank")
        until(lambda: "ready again" in server.log and server.get("/health")[0] == 200, "the server is well again")
        ask()
        assert "the model is spread over 2 processes, and rank 1 was killed by SIGKILL" in server.log
        (rank,) = ranks_of(server)
    assert not is_alive(rank)
