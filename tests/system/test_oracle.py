"""Goal: greedy answers of the real model equal transformers' on the same GGUF, in every shape of the system.

Method: 20 prompts x 48 tokens against tests/oracle.py. Each case also asserts from counters that the decode worker
computed exactly its own tokens, that nothing was recomputed, and that the KV crossed where it had to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.server import START_TIMEOUT, Server
from pyengine import LLM, SamplingParams
from tests import oracle
from tests.system.conftest import SLOWNESS, complete, crossed, expect_no_other, needs_rdma, until

BLOCK = 16

# The first of them has the oracle computed, which takes minutes.
pytestmark = pytest.mark.timeout(900 * SLOWNESS)


@pytest.fixture(scope="module")
def cases() -> list[oracle.Case]:
    return oracle.load()


@pytest.fixture(scope="module")
def model_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory that shares the oracle's converted model."""
    state = tmp_path_factory.mktemp("model-state")
    oracle.MODELS.mkdir(parents=True, exist_ok=True)
    (state / "models").symlink_to(oracle.MODELS)
    return state


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def test_llm(cases: list[oracle.Case], model_state: Path) -> None:
    """In process, all twenty in one batch."""
    comparisons = [oracle.Comparison(case) for case in cases]
    with LLM(state_dir=model_state) as llm:
        while open_ones := [(c, wanted) for c in comparisons if (wanted := c.wanted()) is not None]:
            answers = llm.generate([ids for _, (ids, _) in open_ones], [greedy(n) for _, (_, n) in open_ones])
            for (comparison, _), answer in zip(open_ones, answers, strict=True):
                comparison.feed(answer.token_ids)
        assert llm.counters()["recomputed"] == 0
    oracle.assert_few_ties(comparisons)


class Tally:
    """What all requests of a run add up to."""

    def __init__(self) -> None:
        self.requests = 0
        self.prompt_blocks = 0
        self.distinct_blocks: set[tuple[int, ...]] = set()
        self.decoded = 0

    def add(self, ids: list[int], tokens: int) -> None:
        full = len(ids) // BLOCK
        partial = len(ids) % BLOCK != 0
        self.requests += 1
        self.prompt_blocks += full + partial
        self.distinct_blocks.update(tuple(ids[: (i + 1) * BLOCK]) for i in range(full))
        if partial:
            self.distinct_blocks.add((*ids, -self.requests))
        self.decoded += tokens - 1


def compare(server: Server, cases: list[oracle.Case], at_once: int) -> Tally:
    """Runs all cases through the HTTP API, `at_once` at a time."""
    tally = Tally()

    def one(case: oracle.Case) -> oracle.Comparison:
        comparison = oracle.Comparison(case)
        while (wanted := comparison.wanted()) is not None:
            ids, tokens = wanted
            answer = complete(server, ids, tokens, model="smollm2", return_token_ids=True)
            comparison.feed(answer["choices"][0]["token_ids"])
            tally.add(ids, tokens)
        return comparison

    with ThreadPoolExecutor(at_once) as threads:
        oracle.assert_few_ties(list(threads.map(one, cases)))
    return tally


def expect_counters(server: Server, tally: Tally, decode: str) -> None:
    until(
        lambda: server.metric("pyengine_worker_tokens_total", worker=decode, phase="decode") == tally.decoded,
        f"{decode} has computed exactly its own {tally.decoded} tokens",
    )
    assert server.metric("pyengine_recomputed_tokens_total") == 0


def settled(read: Callable[[], float]) -> float:
    """A counter's value once two seconds of heartbeats have not changed it."""
    now, before = read(), -1.0
    while now != before:
        time.sleep(2)
        now, before = read(), now
    return now


def test_both(cases: list[oracle.Case], model_state: Path) -> None:
    with Server("--both", "1", state_dir=model_state) as server:
        tally = compare(server, cases, 4)
        expect_counters(server, tally, "both-0")
        assert server.metric("pyengine_transfer_blocks_total") == 0


def test_apart_on_one_node(cases: list[oracle.Case], model_state: Path) -> None:
    with Server("--prefill", "1", "--decode", "1", state_dir=model_state) as server:
        tally = compare(server, cases, 4)
        expect_counters(server, tally, "decode-0")
        assert server.metric("pyengine_worker_tokens_total", worker="decode-0", phase="prefill") == 0
        blocks = settled(lambda: server.metric("pyengine_transfer_blocks_total", transport="arena", direction="in"))
        assert len(tally.distinct_blocks) <= blocks <= tally.prompt_blocks
        assert server.metric("pyengine_transfer_bytes_total") == 0


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_apart_on_two_nodes_and_eight_at_once(cases: list[oracle.Case], model_state: Path, transport: str) -> None:
    """Four at a time; then, over tcp, once more: eight at a time and with prefixes cached."""
    flags = ("--prefill", "1", "--decode", "1", "--nodes", "2", "--transport", transport)
    with Server(*flags, state_dir=model_state) as server:
        tally = compare(server, cases, 4)
        expect_counters(server, tally, "decode-0")
        assert server.metric("pyengine_worker_tokens_total", worker="decode-0", phase="prefill") == 0
        blocks = settled(lambda: crossed(server, transport)[1])
        assert len(tally.distinct_blocks) <= blocks <= tally.prompt_blocks
        if transport == "shm":
            return
        again = compare(server, cases, 8)
        again.decoded += tally.decoded
        expect_counters(server, again, "decode-0")
        assert server.metric("pyengine_worker_tokens_total", worker="decode-0", phase="prefill") == 0


@needs_rdma
def test_a_small_prompt_over_rdma(cases: list[oracle.Case], model_state: Path) -> None:
    """A short one, a few tokens: the VM that has the devices emulates its processors."""
    case = next(case for case in cases if case.name == "one token")
    tokens = 4
    flags = ("--prefill", "1", "--decode", "1", "--nodes", "2", "--transport", "rdma", "--pages", "64")
    with Server(*flags, state_dir=model_state, start_timeout=START_TIMEOUT * SLOWNESS) as server:
        comparison = oracle.Comparison(case, tokens)
        while (wanted := comparison.wanted()) is not None:
            answer = complete(server, *wanted, model="smollm2", return_token_ids=True)
            comparison.feed(answer["choices"][0]["token_ids"])
        until(lambda: min(crossed(server, "rdma")) > 0, "its blocks have crossed")
        expect_no_other(server, "rdma")
        assert server.metric("pyengine_worker_tokens_total", worker="decode-0", phase="prefill") == 0
        assert server.metric("pyengine_recomputed_tokens_total") == 0
