"""Goal: whoever asks an `LLM`, from any number of threads and tasks, gets the right answer; who stops leaves nothing.

Method: the fake backend, whose answers `fake_tokens` foretells; it goes on at the caller's word (`held`), so that what
runs when is no accident. What is left behind is asked of the worker's own books.
"""

from __future__ import annotations

import _thread
import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from pyengine.backend import Slice
from pyengine.backends.fake import FakeBackend, fake_tokens
from pyengine.llm import LLM, AsyncLLM, Piece
from pyengine.scheduler.types import SamplingParams
from tests.worker.test_worker import prompt

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with LLM("fake", backend="fake", dram_bytes=1 << 20, pages=64, state_dir=tmp_path, max_sequences=8) as made:
        yield made


class Held:
    """Steps run only while `go` is set; `began` is set by each; `most`: sequences in one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go, self.began, self.most = threading.Event(), threading.Event(), 0
        execute = FakeBackend.execute

        def held(backend: FakeBackend, slices: list[Slice]) -> list[int]:
            self.began.set()
            self.most = max(self.most, len(slices))
            assert self.go.wait(30), "nobody lets it go on"
            return execute(backend, slices)

        patch.setattr(FakeBackend, "execute", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def nothing_is_left(llm: LLM) -> None:
    llm._engine.settle()
    worker = llm._engine.worker
    assert not worker.work and not llm._engine._running
    worker.check()
    worker.batcher.check()


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_a_stream_says_what_generate_says(llm: LLM) -> None:
    (whole,) = llm.generate("Once upon", GREEDY)
    stream = llm.stream("Once upon", GREEDY)
    pieces = list(stream)
    assert text_of(pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert msgspec.structs.replace(stream.completion(), cached_tokens=0, cached_by_tier={}) == whole


def test_stop_strings_are_in_no_piece(llm: LLM) -> None:
    (whole,) = llm.generate("Once upon", GREEDY)
    stop = whole.text[4:7]
    with llm.stream("Once upon", msgspec.structs.replace(LONG, stop=(stop,))) as stream:
        pieces = list(stream)
    assert text_of(pieces) == whole.text[: whole.text.index(stop)]
    assert pieces[-1].finish_reason == "stop"
    nothing_is_left(llm)


def test_threads_share_batches_and_get_their_own_answers(llm: LLM, held: Held) -> None:
    prompts = [prompt(20 + i, i) for i in range(8)]
    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(llm.generate, prompts[0], GREEDY)
        assert held.began.wait(30)
        others = [threads.submit(llm.generate, each, GREEDY) for each in prompts[1:]]
        while len(llm._engine._inbox) < 7:
            threading.Event().wait(0.001)
        held.go.set()
        for ids, answer in zip(prompts, [first, *others], strict=True):
            assert answer.result()[0].token_ids == fake_tokens(ids, 12)
    assert held.most == 8, "they ran together"


def test_a_stream_that_nobody_reads_holds_up_nobody(llm: LLM) -> None:
    with llm.stream("a", LONG) as unread:
        assert llm.generate(prompt(20), GREEDY)[0].token_ids == fake_tokens(prompt(20), 12)
        next(unread)
    nothing_is_left(llm)


@pytest.mark.parametrize("how", ["close", "with", "forgotten"])
def test_a_stream_that_ends_early_leaves_nothing(llm: LLM, how: str) -> None:
    stream = llm.stream("abc", LONG)
    next(stream)
    if how == "close":
        stream.close()
        stream.close()
        with pytest.raises(RuntimeError, match="before it was complete"):
            stream.completion()
    elif how == "with":
        with pytest.raises(ArithmeticError), stream:
            raise ArithmeticError
    del stream
    nothing_is_left(llm)
    assert llm.counters()["decode"] < 400


def test_ctrl_c_ends_the_call_and_leaves_nothing(llm: LLM, held: Held) -> None:
    def interrupt() -> None:
        held.began.wait(30)
        _thread.interrupt_main()
        held.go.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt(20, i) for i in range(8)], LONG)
    thread.join()
    nothing_is_left(llm)
    assert llm.generate(prompt(20), GREEDY)[0].token_ids == fake_tokens(prompt(20), 12)


def test_close_ends_what_runs(llm: LLM, held: Held) -> None:
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(llm.generate, prompt(20), LONG)
        assert held.began.wait(30)
        closing = threads.submit(llm.close)
        while not llm._engine._closing:
            threading.Event().wait(0.001)
        held.go.set()
        with pytest.raises(RuntimeError, match="closed"):
            running.result()
        closing.result()
    with pytest.raises(RuntimeError, match="closed"):
        llm.stream("hello")


def test_an_engine_that_cannot_go_on_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(llm._engine, "_new_worker", breaks)
    monkeypatch.setattr(llm._engine.worker.batcher, "plan", breaks)
    with pytest.raises(RuntimeError, match="no memory"):
        llm.generate("hello", GREEDY)
    llm._engine._thread.join()
    with pytest.raises(RuntimeError, match="make a new one"):
        llm.generate("hello", GREEDY)


def test_one_that_nobody_has_closed_ends_with_its_last_user(tmp_path: Path) -> None:
    llm = LLM("fake", backend="fake", dram_bytes=1 << 20, pages=64, state_dir=tmp_path)
    stream, thread = llm.stream("abc", GREEDY), llm._engine._thread
    del llm
    gc.collect()
    assert len(list(stream)) == 12, "its stream uses it"
    del stream
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


# -- asyncio -----------------------------------------------------------------------------------------------------------


def test_tasks_get_what_threads_get(llm: LLM) -> None:
    async def ask() -> None:
        own = AsyncLLM(llm)
        prompts = [prompt(20 + i, i) for i in range(6)]
        answers = await asyncio.gather(*(own.generate(ids, GREEDY) for ids in prompts))
        for ids, (answer,) in zip(prompts, answers, strict=True):
            assert answer.token_ids == fake_tokens(ids, 12)
        stream = own.stream(prompts[0], GREEDY)
        pieces = [piece async for piece in stream]
        assert text_of(pieces) == answers[0][0].text == (await stream.completion()).text
        with pytest.raises(ValueError, match="empty"):
            await anext(own.stream("", GREEDY))

    asyncio.run(ask())
    nothing_is_left(llm)


@pytest.mark.parametrize("what", ["generate", "chat", "stream"])
def test_a_cancelled_task_leaves_nothing(llm: LLM, held: Held, what: str) -> None:
    async def one(own: AsyncLLM) -> None:
        if what == "generate":
            await own.generate(prompt(20), LONG)
        elif what == "chat":
            await own.chat([{"role": "user", "content": "Hi"}], LONG)
        else:
            async for _ in own.stream(prompt(20), LONG):
                pass

    async def ask() -> None:
        task = asyncio.create_task(one(AsyncLLM(llm)))
        assert await asyncio.to_thread(held.began.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        held.go.set()

    asyncio.run(ask())
    nothing_is_left(llm)
    assert llm.counters()["decode"] < 400


def test_one_that_is_cancelled_before_it_has_begun_never_begins(llm: LLM) -> None:
    (asked,) = llm._asker.prompts(["hello"], LONG, output=None, structured=None)
    request = asked.request(lambda: None)
    llm._engine.cancel([request])
    llm._engine.submit([request])
    nothing_is_left(llm)
    assert llm.counters()["prompt"] == 0


def test_prompts_are_told_of_and_reuse_nothing(llm: LLM) -> None:
    asks = msgspec.structs.replace(GREEDY, prompt_logprobs=2)
    ids = prompt(100)
    plain, first, second = (llm.generate([ids], sampling)[0] for sampling in (GREEDY, asks, asks))
    assert plain.prompt_logprobs is None and first.token_ids == second.token_ids == plain.token_ids
    assert first.prompt_logprobs == second.prompt_logprobs and first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == 99 and all(len(one.top) == 2 for one in first.prompt_logprobs)
    assert first.cached_tokens == second.cached_tokens == 0
    nothing_is_left(llm)
