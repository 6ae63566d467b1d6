"""Goal: what a cluster has computed survives its restart, and answers stay the same.

Method: a server over the fake backend, whose answer depends on every byte of KV; all of it is stopped, another is
started over the same SSD directory and asked the same.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.server import Server, free_port
from pyengine.backends.fake import fake_tokens
from pyengine.kv_mover import TIERS
from pyengine.llm import LLM
from pyengine.scheduler.types import SamplingParams
from tests.system.conftest import PATIENCE, complete, fake_server, prompt, text, until

BLOCK = 16
LONG = prompt(1000)
BLOCKS = (len(LONG) - 1) // BLOCK


def kept(state_dir: Path, directory: Path, *flags: str) -> Server:
    return fake_server(state_dir, "--ssd-dir", str(directory), "--ssd-bytes", "64MiB", *flags)


def ask(server: Server, tokens: int = 20) -> dict[str, Any]:
    """Asks LONG and checks the answer; where its cached tokens were found."""
    answer = complete(server, LONG, tokens)
    assert answer["choices"][0]["text"] == text(fake_tokens(LONG, tokens))
    details: dict[str, Any] = answer["usage"]["prompt_tokens_details"]
    return details


def ask_until_kept(server: Server, *nodes: str) -> None:
    """Asks once more until these nodes have all of LONG on SSD, which is where a node writes what it finds again. So
    nothing hangs on how much a node can write in the seconds that it has at its end.
    """

    def kept_by(node: str) -> bool:
        return server.metric("pyengine_pool_blocks", node=node, tier="ssd", state="stored") >= BLOCKS

    until(lambda: bool(ask(server)) and all(map(kept_by, nodes)), f"{nodes} have written it to SSD")


SHAPES = {
    "apart": ("--nodes", "2", "--prefill", "1", "--decode", "1"),
    "one node": ("--prefill", "1", "--decode", "1"),
    "both": ("--both", "1"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_after_a_restart_the_prefix_comes_from_ssd(shape: str, state_dir: Path, tmp_path: Path) -> None:
    """Twice: what has come from SSD once is still there for the next life."""
    cached = BLOCKS * BLOCK
    with kept(state_dir, tmp_path / "kv", *SHAPES[shape]) as server:
        assert ask(server) == {"cached_tokens": 0}
        ask_until_kept(server, "node-0")
        server.stop(number=signal.SIGTERM)
    for _ in range(2):
        with kept(state_dir, tmp_path / "kv", *SHAPES[shape]) as server:
            knows(server, "node-0")
            assert ask(server) == {"cached_tokens": cached, "cached_tokens_by_tier": {"ssd": cached}}
            counted(server, {"ssd": cached})
            # Now it is in the worker's pages, or in DRAM.
            assert "ssd" not in ask(server)["cached_tokens_by_tier"]
            # A heartbeat that counts these blocks has come: both sides digest blocks on two media alike.
            until(
                lambda: server.metric("pyengine_pool_blocks", node="node-0", tier="dram", state="cached") >= BLOCKS,
                "the daemon counts what it has in DRAM again",
            )
            assert server.metric("pyengine_conductor_dumps_total", cause="drift") == 0
            server.stop(number=signal.SIGTERM)
    folders = [tmp_path / "kv", *(path for path in (tmp_path / "kv").rglob("*") if path.is_dir())]
    assert not [folder for folder in folders if folder.stat().st_mode & 0o077], "others may enter"


def knows(server: Server, node: str) -> None:
    """Waits until the conductor has been told what the node kept."""
    until(lambda: server.metric("pyengine_index_blocks", node=node) >= BLOCKS, f"{node} has told what it has on SSD")


def counted(server: Server, expected: dict[str, int]) -> None:
    """Waits until these cached tokens are counted, and no others."""

    def tiers() -> dict[str, float]:
        name = "pyengine_cached_tokens_total"
        found = {tier: server.metric(name, tier=tier) for tier in TIERS}
        return {tier: tokens for tier, tokens in found.items() if tokens}

    until(lambda: tiers() == expected, f"the counters say {expected}")


def test_a_node_reads_from_the_ssd_of_another(state_dir: Path, tmp_path: Path) -> None:
    """Node 0, where the prefill worker sits, has lost its disk; node 1, to which the KV was handed off, has not."""
    with kept(state_dir, tmp_path / "kv", *SHAPES["apart"]) as server:
        ask_until_kept(server, "node-1")
    (tmp_path / "kv" / "node-0").rename(tmp_path / "lost")
    with kept(state_dir, tmp_path / "kv", *SHAPES["apart"]) as server:
        knows(server, "node-1")
        cached = BLOCKS * BLOCK
        assert ask(server) == {"cached_tokens": cached, "cached_tokens_by_tier": {"peer_ssd": cached}}


def test_killed_daemons_find_again_what_was_written(state_dir: Path, tmp_path: Path) -> None:
    """Whatever had reached the disk is found, and the rest is computed."""
    with kept(state_dir, tmp_path / "kv", *SHAPES["apart"]) as server:
        ask(server)
        for part in ("transferd-0", "transferd-1", "prefill-0", "decode-0"):
            server.wait_replaced(part, server.kill(part), PATIENCE)
        # A gateway waits a few seconds only for workers that are still starting.
        server.wait_workers(2, PATIENCE)
        ask(server)


def test_an_llm_finds_what_the_last_one_kept(tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for cached in ({}, {"ssd": BLOCKS * BLOCK}):
        with LLM(
            "fake", backend="fake", dram_bytes=32 << 20, ssd_dir=tmp_path / "kv", ssd_bytes="64MiB", state_dir=tmp_path
        ) as llm:
            (answer,) = llm.generate(LONG, sampling)
            assert answer.token_ids == fake_tokens(LONG, 20)
            assert answer.cached_by_tier == cached
            # What is found again is written, however little time there is for it at the end.
            until(lambda: bool(llm.generate(LONG, sampling)) and on_ssd(llm) >= BLOCKS, "all of it is on SSD")


def on_ssd(llm: LLM) -> int:
    """Blocks that it has there."""
    return llm._daemon.counters()['pyengine_pool_blocks{node="llm",tier="ssd",state="stored"}']


def test_prompts_beyond_what_dram_holds_are_answered_right_from_both(tmp_path: Path) -> None:
    """Forty prompts of 37 blocks, a pool of a thousand, a restart; then one by one, and all at once."""
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompts = [prompt(600, i) for i in range(40)]
    answers = [fake_tokens(ids, 4) for ids in prompts]
    sizes: dict[str, Any] = {"dram_bytes": 8 << 20, "pages": 80, "ssd_dir": tmp_path / "kv", "ssd_bytes": "64MiB"}
    with LLM("fake", backend="fake", state_dir=tmp_path, **sizes) as llm:
        assert [llm.generate(ids, sampling)[0].token_ids for ids in prompts] == answers
        # A prompt that had to make room comes back from SSD.
        until(
            lambda: any("ssd" in llm.generate(ids, sampling)[0].cached_by_tier for ids in prompts),
            "what made room was written",
        )
        written = on_ssd(llm)
    with LLM("fake", backend="fake", state_dir=tmp_path, **sizes) as llm:
        # And at the end what was in DRAM only, as far as there was time.
        assert on_ssd(llm) >= written
        completions = [llm.generate(ids, sampling)[0] for ids in prompts]
        assert [completion.token_ids for completion in completions] == answers
        assert sum(completion.cached_by_tier.get("ssd", 0) for completion in completions) > 0
        together = llm.generate(prompts * 2, sampling)
        assert [completion.token_ids for completion in together] == answers * 2


def test_the_demonstration(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.restart", "--fake", "--state-dir", str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["case"], second["case"]) == ("first ttft", "second ttft")
    assert first["cached_tokens"] == 0
    assert second["cached_ssd"] == second["cached_tokens"] == (second["prompt_tokens"] - 1) // BLOCK * BLOCK
    assert second["same_answer"]


def test_a_directory_of_another_secret_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """It would never be found again, and fill the disk beside what is."""
    command = [sys.executable, "-m", "pyengine", "serve", "--backend", "fake", "--model", "fake"]
    (tmp_path / "kv").mkdir(mode=0o700)
    (tmp_path / "kv" / "secret-mark").write_text("of another\n")
    command += ["--ssd-dir", str(tmp_path / "kv"), "--ssd-bytes", "64MiB", "--state-dir", str(tmp_path / "state")]
    command += ["--port", str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2
    assert "another secret" in done.stderr
    assert "Traceback" not in done.stderr
