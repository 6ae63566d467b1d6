"""Goal: what a request with several choices is billed is what it got, to the token, also when a worker dies meanwhile.

Method: real processes over the fake backend, whose answers are known; usage of every answer, streamed or not, and the
gateway's own counters are compared with the tokens that came.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from pyengine.backends.fake import fake_tokens
from tests.system.conftest import FAKE_SLOW, PATIENCE, body, fake_server, prompt, text, until

#: Choices of each prompt, tokens of each choice.
CHOICES, TOKENS = 3, 100
#: Two a request; of two lengths, so that nothing adds up by chance.
LENGTHS = (60, 150)


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_usage_of_choices_is_exact_when_a_worker_dies(part: str, state_dir: Path, tmp_path: Path) -> None:
    """Steps do not end from before the death until behind it, so that there is work to lose."""
    hold = tmp_path / "hold"
    flags = ("--prefill", "2", "--decode", "2", "--nodes", "2", "--policy", "round-robin")
    with fake_server(state_dir, *flags, model=f"{FAKE_SLOW},hold={hold}") as server:
        requests = 4
        first = threading.Semaphore(0)

        def client(i: int) -> tuple[list[str], dict[str, Any]]:
            """Texts by choice, and usage. Every other one is not streamed."""
            prompts = [prompt(length, i) for length in LENGTHS]
            asked = body(prompts, TOKENS, n=CHOICES)  # type: ignore[arg-type]
            if i % 2:
                response = httpx2.post(f"{server.base}/v1/completions", json=asked, timeout=600)
                assert response.status_code == 200, response.text
                answer = response.json()
                return [choice["text"] for choice in answer["choices"]], answer["usage"]
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
            texts, usage = [""] * (CHOICES * len(LENGTHS)), None
            with httpx2.stream("POST", f"{server.base}/v1/completions", json=asked, timeout=600) as response:
                for line in response.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    if not any(texts):
                        first.release()
                    for choice in event["choices"]:
                        texts[choice["index"]] += choice["text"]
                    usage = event["usage"] or usage
            assert usage is not None
            return texts, usage

        def held() -> list[float]:
            return [server.metric("pyengine_worker_requests", worker=f"{part}-{k}") for k in range(2)]

        with ThreadPoolExecutor(requests) as threads:
            if part == "prefill":
                hold.touch()
            answers = [threads.submit(client, i) for i in range(requests)]
            try:
                if part == "decode":
                    # Each stream has its first token.
                    assert all([first.acquire(timeout=PATIENCE) for _ in range(0, requests, 2)])
                    hold.touch()
                until(lambda: any(held()), "workers tell of their requests")
                told = held()
                server.kill(f"{part}-{told.index(max(told))}")
            finally:
                hold.unlink(missing_ok=True)
            results = [answer.result(PATIENCE) for answer in answers]

        for i, (texts, usage) in enumerate(results):
            known = [text(fake_tokens(prompt(length, i), TOKENS)) for length in LENGTHS for _ in range(CHOICES)]
            assert texts == known
            # A prompt is counted once, however many answers it has and however often it was computed.
            assert usage["prompt_tokens"] == sum(LENGTHS)
            assert usage["completion_tokens"] == CHOICES * len(LENGTHS) * TOKENS
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            details = usage["prompt_tokens_details"]
            assert 0 <= details["cached_tokens"] <= usage["prompt_tokens"]
            assert sum(details.get("cached_tokens_by_tier", {}).values()) == details["cached_tokens"]
        completion = requests * CHOICES * len(LENGTHS) * TOKENS
        assert gateway(server.metrics(), "vllm:generation_tokens_total") == completion
        assert gateway(server.metrics(), "vllm:prompt_tokens_total") == requests * sum(LENGTHS)
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for _, usage in results)
        assert gateway(server.metrics(), "vllm:prompt_tokens_cached_total") == cached
        assert server.metric("pyengine_request_retries_total") > 0


def gateway(samples: dict[str, float], name: str) -> float:
    """The gateway's sample: workers' have their names."""
    (only,) = [value for sample, value in samples.items() if sample.startswith(name + "{") and "worker=" not in sample]
    return only
