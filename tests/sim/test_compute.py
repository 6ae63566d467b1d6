"""Goal: a modelled step takes as long as its source says. Method: the paper's times, closed forms, bad files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.scheduler.sim.compute import MODELS, Coefficients, ModelError, StepTime, names

SLICES = st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 16_384)), max_size=4)


@pytest.mark.parametrize("name", names())
def test_every_model_says_what_it_is(name: str) -> None:
    model = StepTime.load(name)
    assert model.name == name
    assert "LLaMA3-70B" in model.about and len(model.source) > 40
    assert 0.05 < model.seconds([(0, 8192)], 0, 0) < 2.0
    assert 0.005 < model.seconds([], 1, 8192) < 0.05


def test_prefill_is_the_papers() -> None:
    """Digitised times of LLaMA3-70B on eight A800; 95 % cached: reading it (140 GB/s) is not the model's."""
    model = StepTime.load("llama3-70b-a800")
    for thousands, whole, cached in (
        (8, 1.002, 0.135), (16, 2.056, 0.226), (32, 4.479, 0.407), (64, 10.588, 0.881), (128, 27.514, 2.329),
    ):  # fmt: skip
        tokens = thousands * 1024
        kept = round(0.95 * tokens)
        assert model.seconds([(0, tokens)], 0, 0) == pytest.approx(whole, rel=0.07)
        reading = kept * 327_680 / 140e9
        assert model.seconds([(kept, tokens - kept)], 0, 0) + reading == pytest.approx(cached, rel=0.2)


def test_decode_is_the_papers() -> None:
    calibrated, single = StepTime.load("llama3-70b-a800"), StepTime.load("llama3-70b-a800-single")
    assert calibrated.seconds([], 10, 100_000) == pytest.approx(24.5e-3 + 35e-3 + 3.47e-3)
    assert single.seconds([], 1, 8192) == pytest.approx(26.5e-3, rel=0.01)
    assert single.seconds([], 1, 131_072) == pytest.approx(30.8e-3, rel=0.01)


@pytest.mark.parametrize("name", names())
@given(slices=SLICES, sequences=st.integers(0, 256), context=st.integers(0, 10**7))
def test_formula(name: str, slices: list[tuple[int, int]], sequences: int, context: int) -> None:
    """Against the sum of its terms; a prompt in two steps costs one more fixed part and nothing else."""
    model = StepTime.load(name)
    own = model.coefficients
    expected = np.float64(0.0)
    if slices or sequences:
        expected += own.step
    if slices:
        expected += own.prefill
        expected += own.token * sum(count for _, count in slices)
        expected += own.pair * sum((start + count) ** 2 - start**2 for start, count in slices)
    if sequences:
        expected += own.decode + own.sequence * sequences + own.context * context
    assert model.seconds(slices, sequences, context if sequences else 0) == pytest.approx(float(expected), rel=1e-12)
    for start, count in slices[:1]:
        cut = count // 2
        if cut:
            halves = model.seconds([(start, cut)], 0, 0) + model.seconds([(start + cut, count - cut)], 0, 0)
            assert halves - model.seconds([(start, count)], 0, 0) == pytest.approx(own.prefill + own.step, rel=1e-6)


def test_decode_coefficients_give_the_same_floats() -> None:
    for name in names():
        model = StepTime.load(name)
        base, sequence, context = model.decode_coefficients
        for sequences, tokens in ((1, 17), (37, 123_457), (256, 1_333_333)):
            assert model.seconds([], sequences, tokens) == base + sequence * sequences + context * tokens


def test_a_fit_and_back(tmp_path: Path) -> None:
    """What a worker fits counts contexts, not pairs: both must give one time; a file changes no bit of it."""
    fit = [5e-3, 1e-3, 3e-8, 2e-3, 1e-6]
    model = StepTime.from_fit("mine", fit, about="a small model", source="measured here")
    for start, count, sequences, history in ((0, 1, 0, 0), (100, 33, 0, 0), (7, 512, 5, 900), (0, 0, 3, 77)):
        contexts = sum(position + 1 for position in range(start, start + count))
        expected = float(np.array([1, count, contexts, sequences, history]) @ np.array(fit))
        slices = [(start, count)] if count else []
        assert model.seconds(slices, sequences, history) == pytest.approx(expected, rel=1e-12)
    model.save(tmp_path / "mine.toml")
    again = StepTime.load(tmp_path / "mine.toml")
    assert (again.name, again.about, again.source) == ("mine", model.about, model.source)
    assert again.coefficients == model.coefficients


GOOD = (MODELS / "llama3-70b-a800.toml").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("token =", "# token ="), "token"),
        (GOOD.replace("1.106e-4", "-1.106e-4"), "token"),
        (GOOD.replace("1.106e-4", "nan"), r"seconds\.token|token must be numbers"),
        (GOOD.replace("1.106e-4", "inf"), r"seconds\.token|token must be numbers"),
        (GOOD.replace("1.106e-4", '"fast"'), "token"),
        (GOOD + "colour = 1\n", "colour"),
        (GOOD.replace("0.0245", "0.0"), "no time"),
        ("\x00\x01", "not what it should be"),
        ("", "about"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ModelError, match=message):
        StepTime.load(path)


def test_bad_names(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no cost model 'llama3-70b-a80'.*did you mean 'llama3-70b-a800'"):
        StepTime.load("llama3-70b-a80")
    with pytest.raises(ModelError, match=r"cannot read .*No such file"):
        StepTime.load(tmp_path / "none.toml")
    with pytest.raises(ModelError, match=r"cannot read .*directory"):
        StepTime.load(tmp_path)
    with pytest.raises(ModelError, match="not what it should be"):
        (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
        StepTime.load(tmp_path / "binary.toml")
    with pytest.raises(ModelError, match="5 coefficients"):
        StepTime.from_fit("x", [1.0], about="", source="")
    with pytest.raises(ModelError, match="token must be"):
        StepTime.from_fit("x", [1.0, -1.0, 0.0, 0.0, 0.0], about="", source="")
    assert Coefficients(token=1.0, pair=0.0, sequence=0.0, context=0.0).step == 0.0
