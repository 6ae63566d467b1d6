"""Goal: a client's penalties, biases and logprobs are what they would be if nothing had happened, whatever happens.

Method: real processes over the fake backend, prefill and decode apart; the worker that computes is killed while clients
stream; the oracle computes the whole rule anew (tests/worker/shaped.py).
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bench.server import Server
from pyengine.scheduler.types import SamplingParams
from tests.system.conftest import PATIENCE, body, fake_server, prompt, text, until
from tests.worker.shaped import fake_answer

LENGTH = 120
CLIENTS = 6
#: Held by the one client that makes the workers stand still.
LOCK = threading.Lock()
FIELDS: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.2,
    "logit_bias": {"65": 3.0, "66": 2.0},
    "logprobs": 2,
}
PARAMS = SamplingParams(
    temperature=0.0,
    max_tokens=LENGTH,
    ignore_eos=True,
    presence_penalty=0.5,
    frequency_penalty=0.4,
    repetition_penalty=1.2,
    logit_bias=((65, 3.0), (66, 2.0)),
    logprobs=2,
)


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_a_killed_worker_changes_no_shaped_answer(part: str, state_dir: Path, tmp_path: Path) -> None:
    """Each client has its text and a logprob for each token, once, in order. A prefill worker has nothing to do any
    more by then; what it has done is done again.
    """
    hold = tmp_path / "hold"
    flags = ("--prefill", "2", "--decode", "2", "--nodes", "2")
    with fake_server(state_dir, *flags, model=f"fake:seconds_per_step=0.01,hold={hold}") as server:

        def busy() -> list[int]:
            return [k for k in range(2) if server.metric("pyengine_worker_requests", worker=f"decode-{k}") > 0]

        flowing = threading.Event()
        with ThreadPoolExecutor(CLIENTS) as threads:
            answers = [threads.submit(client, server, number, hold, flowing) for number in range(CLIENTS)]
            assert flowing.wait(PATIENCE)
            try:
                until(lambda: bool(busy()), "a decode worker is in the middle of its work")
                server.kill(f"{part}-{busy()[0]}")
            finally:
                hold.unlink()
            for number, answer in enumerate(answers):
                said, values = answer.result(PATIENCE)
                tokens, told = fake_answer(prompt(60, number), PARAMS)
                assert said == text(tokens)
                assert values == pytest.approx([one.chosen for one in told], abs=1e-4)
        if part == "decode":
            assert server.metric("pyengine_request_retries_total") > 0


def client(server: Server, number: int, hold: Path, flowing: threading.Event) -> tuple[str, list[float]]:
    """Text, and the logprob of each token. The first to have some makes the workers stand still."""
    payload = body(prompt(60, number), LENGTH, stream=True, **FIELDS)
    said, values = "", []
    with httpx2.stream("POST", f"{server.base}/v1/completions", json=payload, timeout=600) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            event = json.loads(data)
            assert "error" not in event, event
            for choice in event["choices"]:
                said += choice["text"]
                values += (choice["logprobs"] or {}).get("token_logprobs", [])
            with LOCK:
                if len(said) >= 5 and not flowing.is_set():
                    hold.touch()
                    flowing.set()
    return said, values


def test_who_leaves_itself_no_token_is_told_so(state_dir: Path) -> None:
    """As often as it likes: a clear 400, and others are served."""
    with fake_server(state_dir) as server:
        everything = list(range(258))
        nothing = body(prompt(20), 8, min_tokens=8, stop_token_ids=everything)
        for _ in range(4):
            response = httpx2.post(f"{server.base}/v1/completions", json=nothing, timeout=600)
            assert response.status_code == 400, response.text
            assert "no token is left" in response.json()["error"]["message"]
        answer = httpx2.post(f"{server.base}/v1/completions", json=body(prompt(20), 8), timeout=600).json()
        plain = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        assert answer["choices"][0]["text"] == text(fake_answer(prompt(20), plain)[0])
