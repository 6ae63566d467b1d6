"""Goal: `LLM` answers as its worker does, and stays usable whatever a call is broken off by.

Method: the fake backend (its oracle is `fake_tokens`) with a model that raises at a chosen step; a tiny Llama with a
NaN among its weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine.backend import Slice
from pyengine.backends.fake import FakeBackend, fake_tokens
from pyengine.llm import LLM
from pyengine.scheduler.types import SamplingParams
from tests.model.checkpoints import write_tiny
from tests.worker.test_worker import prompt

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
PAGES = 12


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with LLM("fake", backend="fake", dram_bytes=1 << 20, pages=PAGES, state_dir=tmp_path, max_sequences=4) as made:
        yield made


def works(llm: LLM) -> None:
    prompts = [prompt(30 + i, i) for i in range(6)]
    for ids, completion in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        assert completion.token_ids == fake_tokens(ids, 10)
        assert completion.finish_reason == "length"


def test_prompts_as_ids_or_text(llm: LLM) -> None:
    works(llm)
    text = "What is it?"
    (one,) = llm.generate(text, GREEDY)
    assert one.token_ids == fake_tokens(llm.tokenizer.encode(text), 10)
    (array,) = llm.generate(np.asarray(prompt(20)), GREEDY)  # type: ignore[arg-type]
    assert array.token_ids == fake_tokens(prompt(20), 10)
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ("", "empty"),
        ([[]], "empty"),
        ([1, "two"], "mixed"),
        ([1, 258], "between"),
        ([-1], "between"),
        ([prompt(20), prompt(PAGES * 16)], "KV space"),
    ],
)
def test_bad_prompts_are_refused_and_cost_nothing(llm: LLM, prompts: list[object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sampling parameters"):
        llm.generate([[1], [2]], [GREEDY])
    works(llm)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ArithmeticError])
@pytest.mark.parametrize("at", [0, 1, 4, 9])
def test_a_call_that_is_broken_off_leaves_it_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], at: int
) -> None:
    steps = 0
    execute = FakeBackend.execute

    def breaks(self: FakeBackend, slices: list[Slice]) -> list[int]:
        nonlocal steps
        steps += 1
        if steps > at:
            raise error
        return execute(self, slices)

    with monkeypatch.context() as patch:
        patch.setattr(FakeBackend, "execute", breaks)
        with pytest.raises(RuntimeError):
            llm.generate([prompt(40, i) for i in range(8)], GREEDY)
    counted = llm.counters()
    works(llm)
    assert all(value >= counted[name] for name, value in llm.counters().items()), "counters only grow"


def test_interrupted_anywhere(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What breaks the loop may come between any two lines: here inside the batcher, with a sequence half admitted."""
    batcher = llm._engine.worker.batcher

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(batcher, "_start", interrupted)
        with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
            llm.generate(prompt(40), GREEDY)
    works(llm)


def test_closed_is_closed(llm: LLM) -> None:
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("hello")


def test_an_ssd_directory_in_use_is_said_to_be(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"dram_bytes": 1 << 20, "ssd_dir": tmp_path / "kv", "ssd_bytes": "64MiB", "pages": PAGES}
    with LLM("fake", backend="fake", state_dir=tmp_path, **kept) as first:
        with pytest.raises(ValueError, match="is used by another"):
            LLM("fake", backend="fake", state_dir=tmp_path, **kept)
        works(first)


def test_what_is_wrong_with_an_ssd_directory_is_said_in_words_of_python(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    bad: list[dict[str, Any]] = [{"ssd_dir": file}, {"ssd_bytes": "1GiB"}, {"ssd_dir": file, "ssd_bytes": "1GiB"}]
    for arguments in bad:
        with pytest.raises(ValueError, match=r"\bssd_(dir|bytes)="):
            LLM("fake", backend="fake", state_dir=tmp_path, **arguments)


def test_logits_that_are_no_numbers_fail_their_request_alone(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    folder = write_tiny(tmp_path / "tiny")
    with LLM(str(folder), dram_bytes=1 << 22, pages=64, state_dir=tmp_path, threads=1) as llm:
        (good,) = llm.generate([1, 2, 3], GREEDY)
        # Memory that rots: a checkpoint with such a weight is refused when it is loaded.
        with torch.inference_mode():
            llm._backend._model.embedding[7] = np.nan  # type: ignore[attr-defined]
        for sampling in (GREEDY, SamplingParams(temperature=1.0, top_p=0.9, max_tokens=4)):
            with pytest.raises(RuntimeError, match="not finite"):
                llm.generate([[1, 2, 7], [1, 2, 3]], sampling)
        assert llm.generate([1, 2, 3], GREEDY)[0].token_ids == good.token_ids
