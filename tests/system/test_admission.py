"""Goal: what admission and deadlines mean to clients of real processes, and that neither leaves anything behind.
Method: the fake backend, slow enough that queues build up; what is held is read from the counters.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from bench.server import Server
from pyengine.backends.fake import fake_tokens

from .conftest import PATIENCE, StreamFailed, body, complete, fake_server, prompt, stream, text, until

#: A prompt of 400 tokens takes 0.4 s.
SLOW = "fake:seconds_per_token=0.001"


def post(server: Server, ids: list[int], tokens: int, **fields: object) -> httpx2.Response:
    return httpx2.post(f"{server.base}/v1/completions", json=body(ids, tokens, **fields), timeout=600)


def nothing_runs(server: Server) -> bool:
    """No request at the gateway, none foreseen by the conductor, none waiting for or holding a grant or slots."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "pyengine_conductor_foreseen_requests")
    slots = sum(server.metric("pyengine_pool_blocks", state=state) for state in ("reserved", "pinned", "quarantine"))
    grants = sum(server.metric("pyengine_pool_grants", state=state) for state in ("held", "waiting"))
    return not (slots or grants or any(server.metric(name) for name in names))


@pytest.mark.parametrize("admission", ["at-arrival", "predictive"])
def test_who_would_wait_too_long_gets_429_with_the_predicted_wait(state_dir: Path, admission: str) -> None:
    flags = ("--prefill", "1", "--decode", "1", "--admission", admission, "--slo-ttft", "1.5")
    with fake_server(state_dir, *flags, model=SLOW) as server:
        # The model of the worker's speed is fitted to what it has computed.
        for number in range(3):
            complete(server, prompt(400, number), 4)
        with ThreadPoolExecutor(24) as threads:
            answers = [threads.submit(post, server, prompt(400, 100 + number), 4) for number in range(24)]
            responses = [answer.result(PATIENCE) for answer in answers]
        statuses = [response.status_code for response in responses]
        assert set(statuses) == {200, 429}, statuses
        for number, response in enumerate(responses):
            if response.status_code == 200:
                expected = text(fake_tokens(prompt(400, 100 + number), 4))
                assert response.json()["choices"][0]["text"] == expected
                continue
            error = response.json()["error"]
            assert (error["code"], error["type"]) == ("slo_ttft", "rate_limit_error")
            assert "the objective is 1.5 s" in error["message"]
            # 24 prompts of 0.4 s: nobody is told to wait longer than all of them take, or not at all.
            assert 1 <= int(response.headers["Retry-After"]) <= 24
        refused = server.metric("pyengine_conductor_rejections_total", reason="slo_ttft")
        until(
            lambda: server.metric("pyengine_conductor_rejections_total", reason="slo_ttft") == statuses.count(429),
            f"all refusals are counted ({refused})",
        )
        until(lambda: nothing_runs(server), "nothing is held")
        # An idle cluster refuses nobody, also who cannot be served in time.
        assert post(server, prompt(3000), 4).status_code == 200


def test_a_deadline_drops_work_everywhere(state_dir: Path, tmp_path: Path) -> None:
    """Before the first token, and while tokens come; then the workers take the next."""
    hold = tmp_path / "hold"
    flags = ("--prefill", "1", "--decode", "1", "--nodes", "2", "--transport", "shm")
    model = f"fake:seconds_per_token=0.01,seconds_per_step=0.01,hold={hold}"
    with fake_server(state_dir, *flags, model=model) as server:
        complete(server, prompt(50), 4)
        # The conductor believes that this is a matter of a second.
        hold.touch()
        early = post(server, prompt(100), 8, timeout=3.0)
        hold.unlink()
        assert early.status_code == 504, early.text
        assert early.json()["error"]["code"] == "timeout"
        until(lambda: nothing_runs(server), "nothing is held")
        # Tokens for as long as nobody stops them. Enough time to be taken in: the step that was held up counts, too, in
        # what the worker believes to be able to do.
        pieces: list[str] = []
        with pytest.raises(StreamFailed, match="deadline"):
            pieces.extend(stream(server, prompt(50), 3000, timeout=4.0))
        assert pieces
        assert "".join(pieces) == text(fake_tokens(prompt(50), len("".join(pieces))))
        until(lambda: nothing_runs(server), "nothing is held")
        # What could only be late, by twenty seconds, is not begun: that is said long before it is late.
        late = post(server, prompt(3000), 8, timeout=10.0)
        assert (late.status_code, late.json()["error"]["code"]) == (429, "slo_deadline"), late.text
        answer = complete(server, prompt(60, 1), 6, timeout=60.0)
        assert answer["choices"][0]["text"] == text(fake_tokens(prompt(60, 1), 6))
