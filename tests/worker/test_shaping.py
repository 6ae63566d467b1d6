"""Goal: penalties, biases, min_tokens and logprobs are those of the request's whole history, wherever it is computed:
apart, in one worker, in this process, behind a failure, beside others, with steps that overlap or without.

Method: real worker loops over the fake backend (harness.py) against an oracle that computes the rule anew for each
token (shaped.py); random histories for the class that follows a sequence; torch in three places, to the last bit.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.backend import Slice
from pyengine.backends import lacking, load_backend
from pyengine.backends.fake import EOS, VOCAB, FakeBackend
from pyengine.kernels import reference
from pyengine.kernels.inputs import Shapes
from pyengine.llm import LLM
from pyengine.scheduler.sequence import Sequence
from pyengine.scheduler.types import FinishReason, Logprobs, SamplingParams
from pyengine.worker.shaping import Shaper
from tests.model.checkpoints import write_tiny
from tests.worker.harness import Cluster, Request
from tests.worker.shaped import alike, fake_answer, shaped
from tests.worker.test_worker import backend, one_node, prompt, two_nodes

LONG: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
#: What changes the fake's answers: its likeliest token is 4 above the next one.
PARAMS = {
    "presence": SamplingParams(presence_penalty=2.0, logit_bias=((40, 9.0), (41, 8.0)), **LONG),
    "frequency": SamplingParams(frequency_penalty=2.0, logit_bias=((40, 9.0), (41, 8.0)), logprobs=3, **LONG),
    "negative": SamplingParams(frequency_penalty=-2.0, presence_penalty=-1.5, logprobs=0, **LONG),
    "repetition": SamplingParams(repetition_penalty=2.5, logprobs=5, **LONG),
    "repetition below 1": SamplingParams(repetition_penalty=0.5, **LONG),
    "bias": SamplingParams(logit_bias=((90, 100.0), (91, 100.0), (92, -100.0)), logprobs=20, **LONG),
    "all": SamplingParams(
        presence_penalty=1.0,
        frequency_penalty=0.5,
        repetition_penalty=1.5,
        logit_bias=((EOS, 30.0), (65, 5.0)),
        min_tokens=12,
        logprobs=2,
        temperature=0.8,
        seed=3,
        max_tokens=24,
    ),
    "told only": SamplingParams(logprobs=1, **LONG),
}


def answers(request: Request, params: SamplingParams, ids: list[int]) -> None:
    """The request has been answered as the oracle says."""
    tokens, logprobs = fake_answer(ids, params)
    assert request.failed is None
    assert request.ids == tokens
    if params.logprobs is None:
        assert not request.told
    else:
        assert sorted(request.told) == list(range(len(tokens)))
        assert all(alike(request.told[index], one) for index, one in enumerate(logprobs))


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("overlaps", [False, True])
def test_apart_and_in_one_worker_equal_the_oracle(name: str, overlaps: bool) -> None:
    ids, params = prompt(40), PARAMS[name]
    with Cluster() as cluster:
        for worker in ("prefill", "decode"):
            cluster.add_node(worker, 64, backend())
            cluster.add_worker(worker, worker, FakeBackend(overlaps=overlaps))
        apart = cluster.submit(ids, "prefill", "decode", sampling=params)
        both = cluster.submit(ids, "decode", "decode", sampling=params)
        cluster.run(apart, both)
        answers(apart, params, ids)
        answers(both, params, ids)
        assert apart.told == both.told, "to the last bit"
        cluster.settle()
        assert not any(worker._shapers for worker in cluster.workers.values()), "kept for nobody"


def test_the_answers_are_other_ones() -> None:
    """Or the tests here would say nothing."""
    plain = SamplingParams(**LONG)
    for name, params in PARAMS.items():
        same = fake_answer(prompt(40), params)[0] == fake_answer(prompt(40), plain)[0]
        assert same == (name == "told only"), name


@pytest.mark.parametrize("overlaps", [False, True])
def test_many_beside_each_other_with_few_pages(overlaps: bool) -> None:
    """Preempted and resumed, shaped and not: each is what it is alone."""
    kinds = [*PARAMS.values(), SamplingParams(**LONG)]
    with Cluster() as cluster:
        cluster.add_node("a", 64, backend())
        worker = cluster.add_worker("both", "a", FakeBackend(overlaps=overlaps), pages=7)
        requests = cluster.together(
            "both", lambda: [cluster.submit(prompt(40, i), "both", "both", sampling=p) for i, p in enumerate(kinds)]
        )
        cluster.run(*requests)
        for index, (request, params) in enumerate(zip(requests, kinds, strict=True)):
            answers(request, params, prompt(40, index))
        assert worker.counters["preempted"] > 0
        cluster.settle()


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("held", [1, 9])
def test_who_takes_over_goes_on_alike(name: str, held: int) -> None:
    """A worker is gone: the next attempt has the prompt and the tokens that the gateway holds, and only these."""
    ids, params = prompt(40), PARAMS[name]
    with two_nodes() as cluster:
        whole = cluster.submit(ids, "prefill", "decode", sampling=params)
        cluster.until(lambda: len(whole.tokens) >= held)
        first = [whole.tokens[index] for index in range(held)]
        cluster.abort(whole)
        del cluster.workers["decode"], cluster._pools["decode"]
        cluster.add_node("c", 64, backend())
        cluster.add_worker("next", "c", backend())
        again = cluster.submit(
            ids + first, "prefill", "next", sampling=params, attempt=2, number=whole.number, generated=held
        )
        cluster.run(again)
        tokens, logprobs = fake_answer(ids, params)
        assert first + [again.tokens[index] for index in range(held, len(tokens))] == tokens
        if params.logprobs is not None:
            both = whole.told | again.told
            assert all(alike(both[index], one) for index, one in enumerate(logprobs))


def test_min_tokens_holds_back_what_would_end_the_answer() -> None:
    """The end token, ids the client named (one of which no vocabulary has), and from then on nothing."""
    wants = SamplingParams(
        temperature=0.0, max_tokens=12, min_tokens=5, logit_bias=((EOS, 40.0), (70, 39.0)), stop_token_ids=(70, 10**6)
    )
    now = SamplingParams(temperature=0.0, max_tokens=12, logit_bias=((EOS, 40.0),))
    ignores = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=5, ignore_eos=True, logit_bias=((EOS, 40.0),))
    with one_node() as cluster:
        for params, length, finish in (
            (wants, 6, FinishReason.STOP),
            (now, 1, FinishReason.STOP),
            (ignores, 12, FinishReason.LENGTH),
        ):
            request = cluster.submit(prompt(20), "prefill", "decode", sampling=params)
            cluster.run(request)
            answers(request, params, prompt(20))
            assert (len(request.ids), request.finish) == (length, finish)
            assert (EOS in request.ids[:5]) == (params is not wants)


def test_min_tokens_holds_back_stop_strings_too() -> None:
    """In the text that `LLM` makes of the tokens, which are those without."""
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    with LLM("fake", backend="fake", dram_bytes=1 << 20, pages=64) as llm:
        (whole,) = llm.generate(prompt(20), params)
        letter = next(letter for letter in whole.text[:60] if letter in whole.text[60:])
        wanted = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True, stop=(letter,), min_tokens=60)
        (completion,) = llm.generate(prompt(20), wanted)
    at = whole.text.index(letter, 60)
    assert completion.text == whole.text[:at]
    assert completion.token_ids == whole.token_ids[: at + 1]


@pytest.mark.parametrize("overlaps", [False, True])
def test_who_leaves_itself_no_token_falls_alone(overlaps: bool) -> None:
    """However often in a row, and aborted meanwhile: nobody else notices, and the worker lives."""
    nothing = SamplingParams(
        temperature=0.0, max_tokens=8, min_tokens=8, stop_token_ids=tuple(range(VOCAB)), ignore_eos=True
    )
    other = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with Cluster() as cluster:
        cluster.add_node("a", 64, backend())
        worker = cluster.add_worker("both", "a", FakeBackend(overlaps=overlaps))
        steady = cluster.submit(prompt(20), "both", "both", sampling=other)
        for seed in range(5):
            stuck = cluster.submit(prompt(10, seed), "both", "both", sampling=nothing)
            gone = cluster.submit(prompt(10, seed + 50), "both", "both", sampling=nothing)
            cluster.until(lambda gone=gone: bool(cluster.workers["both"]._flights) or gone.over)  # type: ignore[misc]
            cluster.abort(gone)
            cluster.run(stuck)
            assert stuck.failed is not None and stuck.failed.kind == "impossible"
            assert "no token is left" in stuck.failed.reason
        for seed in range(5):  # alone, each time
            stuck = cluster.submit(prompt(10, seed), "both", "both", sampling=nothing)
            cluster.run(stuck)
            assert stuck.failed is not None and "no token is left" in stuck.failed.reason
        cluster.run(steady)
        answers(steady, other, prompt(20))
        assert worker._hopeless == 0
        cluster.settle()


def test_a_bias_on_what_no_vocabulary_has_is_refused_alone() -> None:
    with one_node() as cluster:
        params = SamplingParams(logit_bias=((VOCAB, 1.0),), **LONG)
        refused = cluster.submit(prompt(20), "decode", "decode", sampling=params)
        request = cluster.submit(prompt(20), "decode", "decode")
        cluster.run(refused, request)
        assert refused.failed is not None and "size of the vocabulary" in refused.failed.reason
        answers(request, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), prompt(20))


def test_a_step_that_fails_is_shaped_and_told_alike_when_each_is_tried_alone() -> None:
    class Fails(FakeBackend):
        steps = 0

        def execute(self, slices: list[Slice]) -> list[int]:
            Fails.steps += len(slices) > 1
            if len(slices) > 1 and Fails.steps % 3 == 0:
                raise RuntimeError("as a test")
            return super().execute(slices)

    names = ["frequency", "all", "told only"]
    with Cluster() as cluster:
        cluster.add_node("a", 64, backend())
        cluster.add_worker("both", "a", Fails())
        requests = cluster.together(
            "both",
            lambda: [cluster.submit(prompt(20), "both", "both", sampling=PARAMS[name]) for name in names],
        )
        cluster.run(*requests)
        for name, request in zip(names, requests, strict=True):
            answers(request, PARAMS[name], prompt(20))
        assert Fails.steps > 3


# -- the class that follows a sequence ---------------------------------------------------------------------------------

token = st.integers(0, 19)
values = st.floats(-2.0, 2.0)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_history_is_shaped_as_the_whole_rule_says(data: st.DataObject) -> None:
    """Whenever it is asked, once or again, for the next token or for the one behind it."""
    ids = data.draw(st.lists(token, min_size=1, max_size=12), "prompt")
    before = data.draw(st.integers(0, len(ids) - 1), "of which are generated")
    params = SamplingParams(
        presence_penalty=data.draw(st.sampled_from([0.0]) | values),
        frequency_penalty=data.draw(st.sampled_from([0.0]) | values),
        repetition_penalty=data.draw(st.sampled_from([1.0, 0.5, 1.3])),
        logit_bias=tuple(data.draw(st.dictionaries(token, st.floats(-100, 100), max_size=5)).items()),
        min_tokens=data.draw(st.integers(0, 20)),
        stop_token_ids=tuple(data.draw(st.lists(token, max_size=3))),
        logprobs=data.draw(st.none() | st.integers(0, 20)),
    )
    eos = frozenset({3})
    sequence = Sequence(
        id=(1, 1),
        tokens=list(ids),
        prompt_tokens=len(ids),
        keys=[],
        root=b"",
        sampling=params,
        generated_before=before,
        stops=eos | frozenset(params.stop_token_ids),
    )
    shaper = Shaper(sequence, 20)
    logits = np.random.default_rng(len(ids)).normal(size=20).astype(np.float32) * 3
    for fresh in data.draw(st.lists(st.lists(token, max_size=4), max_size=6), "comes"):
        sequence.tokens += fresh
        # What follows from the last token is asked for when it is there; else for a token that is under way, too.
        ahead = 0 if params.follows_itself else data.draw(st.integers(0, 1))
        answer = sequence.tokens[len(ids) - before :] + [0] * ahead
        shaping = shaper.shaping(len(sequence.tokens) + ahead)
        row = logits[None].copy()
        reference.shape_logits(row, Shapes.of([shaping], 20))
        expected = shaped(logits, ids[: len(ids) - before], answer, params, eos)
        np.testing.assert_allclose(row[0], expected, rtol=1e-5, atol=1e-5)
        assert shaping.logprobs == params.logprobs


def test_only_what_asks_is_followed() -> None:
    def asks(**params: Any) -> bool:
        sequence = Sequence(
            id=(1, 1), tokens=[1], prompt_tokens=1, keys=[], root=b"", sampling=SamplingParams(**params)
        )
        return Shaper.of(sequence, VOCAB) is not None

    assert not asks() and not asks(temperature=0.3, min_p=0.1, top_k=3, top_p=0.4, stop_token_ids=(3,))
    for one in (
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((1, 0.0),)},
        {"min_tokens": 1},
        {"logprobs": 0},
    ):
        assert asks(**one), one


def test_what_was_given_out_stays_as_it_was() -> None:
    """Of steps that overlap the first may be computed when the second has been asked for."""
    params = SamplingParams(min_tokens=1, logit_bias=((5, 1.0),), stop_token_ids=(5,))
    sequence = Sequence(
        id=(1, 1), tokens=[1], prompt_tokens=1, keys=[], root=b"", sampling=params, stops=frozenset({5})
    )
    shaper = Shaper(sequence, VOCAB)
    first = shaper.shaping(1)
    before = first.add.tolist()
    second = shaper.shaping(2)
    assert first.add.tolist() == before == [-np.inf]
    assert second.add.tolist() == [1.0]


def test_steps_that_follow_from_a_token_wait_for_it_and_others_do_not() -> None:
    """With a backend that overlaps: a sequence with penalties is in no step behind one that computes it."""

    class Watched(FakeBackend):
        def __init__(self) -> None:
            super().__init__(overlaps=1)
            self.followed: list[tuple[bool, bool]] = []

        def submit(self, slices: list[Slice], *layers: Any) -> Any:
            self.followed += [
                (s.sampling is not None and s.sampling.follows_itself, s.after is not None) for s in slices
            ]
            return super().submit(slices, *layers)

    watched = Watched()
    with Cluster() as cluster:
        cluster.add_node("a", 64, backend())
        cluster.add_worker("both", "a", watched)
        requests = cluster.together(
            "both",
            lambda: [cluster.submit(prompt(20), "both", "both", sampling=PARAMS[name]) for name in ("all", "bias")],
        )
        cluster.run(*requests)
    assert (True, True) not in watched.followed
    assert (False, True) in watched.followed


# -- frameworks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_framework_says_the_same_apart_in_one_worker_and_in_this_process(name: str, tmp_path: Path) -> None:
    if reason := lacking(name):
        pytest.skip(reason)
    folder = write_tiny(tmp_path / "tiny")
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=12, frequency_penalty=1.0, logprobs=3),
        SamplingParams(temperature=0.9, seed=5, max_tokens=12, repetition_penalty=1.3, min_p=0.05, logprobs=20),
        SamplingParams(temperature=0.0, max_tokens=12, logit_bias=((7, 3.0), (9, -5.0)), min_tokens=4, logprobs=0),
        SamplingParams(temperature=0.0, max_tokens=12),
    ]
    prompts = [prompt(30, seed) for seed in range(len(kinds))]
    with Cluster() as cluster:
        for worker in ("prefill", "decode"):
            made = load_backend(name, str(folder), cache=tmp_path, threads=1)
            cluster.add_node(worker, 64, made)
            cluster.add_worker(worker, worker, made, pages=64)
        asked = list(zip(prompts, kinds, strict=True))
        apart = [cluster.submit(ids, "prefill", "decode", sampling=params) for ids, params in asked]
        both = [cluster.submit(ids, "decode", "decode", sampling=params) for ids, params in asked]
        cluster.run(*apart, *both)
        for one, other in itertools.zip_longest(apart, both):
            assert one.ids == other.ids
    with LLM(str(folder), backend=name, dram_bytes=1 << 22, pages=64, state_dir=tmp_path, threads=1) as llm:
        completions = llm.generate(prompts, kinds)
    for completion, request, params in zip(completions, apart, kinds, strict=True):
        assert completion.token_ids == request.ids
        if params.logprobs is None:
            assert completion.logprobs is None
            continue
        assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
        told = [request.told[index] for index in range(len(request.ids))]
        assert told == completion.logprobs if name == "torch" else all(map(alike, told, completion.logprobs))
        _are_logprobs(completion.token_ids, completion.logprobs, params.logprobs)


def _are_logprobs(ids: list[int], told: list[Logprobs], count: int) -> None:
    for chosen, one in zip(ids, told, strict=True):
        assert len(one.top) == count
        assert [value for _, value in one.top] == sorted((value for _, value in one.top), reverse=True)
        if one.rank <= count:
            assert one.top[one.rank - 1] == (chosen, one.chosen)
