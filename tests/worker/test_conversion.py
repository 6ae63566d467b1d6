"""Goal: KV that crosses between dtypes is rounded to nearest, once, and never taken for exact.
Method: conversion against PyTorch's on all kinds of bit patterns; a worker's backend through `Converted`, page by page;
and a prefill worker in float32 with a decode worker in bfloat16, through real daemons.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pyengine.backend import U32, Backend, Slice
from pyengine.backends import lacking, load_backend
from pyengine.conversion import Converted, convert
from pyengine.scheduler.types import SamplingParams
from tests.model.checkpoints import write_tiny
from tests.worker.harness import Cluster

torch = pytest.importorskip("torch", reason="PyTorch's own conversion is the oracle")


def to_bfloat16(bits: U32) -> npt.NDArray[np.uint16]:
    out = np.empty(bits.size * 2, np.uint8)
    convert(bits.astype("<u4").view(np.uint8), "float32", out, "bfloat16")
    return out.view("<u2")


def test_float32_is_rounded_as_pytorch_rounds() -> None:
    """Random bits of all exponents; every neighbour of a tie; infinities, zeros, subnormal numbers."""
    generator = np.random.default_rng(7)
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    ties = np.concatenate([upper + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    bits = np.concatenate([generator.integers(0, 1 << 32, 300_000, dtype=np.uint32), ties])
    values = bits.view(np.float32)
    got = to_bfloat16(bits)
    wanted = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    numbers = ~np.isnan(values)
    assert (got == wanted)[numbers].all()
    assert np.isnan((got[~numbers].astype(np.uint32) << 16).view(np.float32)).all(), "NaN is NaN afterwards"
    assert (~numbers).sum() > 1000 and numbers.sum() > 300_000


def test_bfloat16_to_float32_is_exact_and_comes_back() -> None:
    bits = np.arange(1 << 16, dtype="<u2")
    wide = np.empty(bits.size * 4, np.uint8)
    convert(bits.view(np.uint8), "bfloat16", wide, "float32")
    assert (wide.view("<u4") == bits.astype(np.uint32) << 16).all()
    quiet = np.isnan(wide.view("<f4")) & (bits & 0x40 == 0)
    assert (to_bfloat16(wide.view("<u4")) == bits)[~quiet].all()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make(tiny: Path, tmp_path: Path) -> Callable[[str], Backend]:
    def make(dtype: str) -> Backend:
        return load_backend("torch", str(tiny), cache=tmp_path, threads=1, dtype=dtype)

    return make


@pytest.mark.parametrize("own", ["float32", "bfloat16"])
@pytest.mark.parametrize("decode", ["float32", "bfloat16"])
def test_pages_go_out_and_come_back(make: Callable[[str], Backend], own: str, decode: str) -> None:
    prefill = "bfloat16" if decode == "float32" else "float32"
    converted = Converted(make(own), prefill, decode)
    converted.allocate(8)
    spec, inner = converted.namespace.kv, converted._backend.namespace.kv
    values = np.random.default_rng(3).standard_normal((3, inner.strips, inner.strip_bytes // 4), np.float32)
    given = np.empty((3, inner.strips, inner.strip_bytes), np.uint8)
    if own == "float32":
        given[:] = values.view(np.uint8).reshape(given.shape)
    else:
        values = np.tile(values, (1, 1, 2))
        convert(values.view(np.uint8), "float32", given, "bfloat16")
    converted._backend.write_pages([5, 0, 2], given)
    out = np.zeros((3, spec.strips, spec.strip_bytes), np.uint8)
    converted.read_pages([5, 0, 2], out)
    numbers = out.view("<f4") if decode == "float32" else (out.view("<u2").astype(np.uint32) << 16).view(np.float32)
    assert np.abs(numbers - values).max() <= 2**-8 * np.abs(values).max()
    if own == decode:
        assert (out == given).all()
    # What went out comes back the same, whatever was rounded on the way.
    converted.write_pages([1, 3, 4], out)
    again = np.zeros_like(out)
    converted.read_pages([1, 3, 4], again)
    assert (again == out).all()


def test_a_converted_namespace_is_of_both_and_of_nobody_else(make: Callable[[str], Backend]) -> None:
    single, half = make("float32"), make("bfloat16")
    down = [Converted(each, "float32", "bfloat16").namespace for each in (single, half)]
    up = [Converted(each, "bfloat16", "float32").namespace for each in (single, half)]
    assert down[0] == down[1] and up[0] == up[1]
    assert len({space.digest() for space in (*down, *up, single.namespace, half.namespace)}) == 4
    assert all(dtype in down[0].compute_dtype for dtype in ("float32", "bfloat16"))
    assert down[0].kv.groups[0].dtype == "bfloat16"
    with pytest.raises(ValueError, match="float16"):
        Converted(single, "float32", "float16")
    with pytest.raises(ValueError, match="keeps KV in float32"):
        Converted(single, "bfloat16", "bfloat16")


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = [int(token) for token in np.random.default_rng(11).integers(0, 256, 75)]


def prefilled(backend: Backend, ids: list[int], pages: list[int], start: int = 0) -> int:
    piece = Slice(np.array(ids[start:], np.uint32), start, np.array(pages, np.int32), GREEDY)
    return backend.execute([piece])[0]


def expected(make: Callable[[str], Backend], prefill: str, decode: str) -> list[int]:
    """What the two backends say with no worker between them, KV being converted by PyTorch."""
    first, second = make(prefill), make(decode)
    pages = [3, 1, 4, 0, 5]
    for backend in (first, second):
        backend.allocate(8)
    tokens = [prefilled(first, PROMPT, pages)]
    spare = [*pages, 7]
    spec = first.namespace.kv
    strips = np.empty((len(pages), spec.strips, spec.strip_bytes), np.uint8)
    first.read_pages(pages, strips)
    numbers = torch.from_numpy(strips).view(getattr(torch, prefill)).to(getattr(torch, decode))
    second.write_pages(pages, numbers.view(torch.uint8).numpy())
    while len(tokens) < GREEDY.max_tokens:
        tokens.append(prefilled(second, [*PROMPT, *tokens], spare, len(PROMPT) + len(tokens) - 1))
    return tokens


@pytest.mark.parametrize(("prefill", "decode"), [("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_hand_off_between_dtypes(make: Callable[[str], Backend], prefill: str, decode: str, nodes: int) -> None:
    """Then the same prompt again, its prefix from the pool: loaded at the prefill worker, converted back."""
    with Cluster() as cluster:
        there = Converted(make(decode), prefill, decode)
        names = ["p", "d"][:nodes]
        for name in names:
            cluster.add_node(name, 64, there)
        cluster.add_worker("decode", names[-1], there)
        cluster.add_worker("prefill", "p", Converted(make(prefill), prefill, decode), pages=16)
        request = cluster.submit(PROMPT, "prefill", "decode", sampling=GREEDY)
        cluster.run(request)
        assert request.failed is None
        assert request.ids == expected(make, prefill, decode)
        cluster.settle()
        # Others fill the prefill worker's pages meanwhile.
        crowd = [cluster.submit([seed] * 120, "prefill", "decode", sampling=GREEDY) for seed in (1, 2)]
        cluster.run(*crowd)
        again = cluster.submit(PROMPT, "prefill", "decode", sampling=GREEDY)
        cluster.run(again)
        assert again.failed is None and len(again.ids) == GREEDY.max_tokens
        assert again.tiers == {"dram": 64}
        if prefill == "bfloat16":
            # What was widened comes back exactly as it was.
            assert again.ids == request.ids
        cluster.settle()


def test_jax_hands_on_to_a_narrower_torch(make: Callable[[str], Backend], tiny: Path, tmp_path: Path) -> None:
    """In float32 both frameworks compute the same bits, so the tokens are those of PyTorch alone."""
    if reason := lacking("jax"):
        pytest.skip(reason)
    with Cluster() as cluster:
        jax = load_backend("jax", str(tiny), cache=tmp_path, threads=1, dtype="float32")
        there, here = (Converted(each, "float32", "bfloat16") for each in (make("bfloat16"), jax))
        cluster.add_node("n", 64, there)
        cluster.add_worker("decode", "n", there)
        cluster.add_worker("prefill", "n", here, pages=16, max_sequences=2)
        here.warm_up(64, 2)  # to compile takes longer than an event may
        request = cluster.submit(PROMPT, "prefill", "decode", sampling=GREEDY)
        cluster.run(request)
        assert request.failed is None
        assert request.ids == expected(make, "float32", "bfloat16")
        cluster.settle()


def test_workers_of_another_dtype_are_not_taken_for_converted_ones(make: Callable[[str], Backend]) -> None:
    """Same keys, same layout: a worker that computes in bfloat16 throughout refuses what was converted."""
    exact, rounded = make("bfloat16"), Converted(make("bfloat16"), "float32", "bfloat16")
    assert (exact.namespace.kv.strips, exact.namespace.kv.strip_bytes) == (
        rounded.namespace.kv.strips,
        rounded.namespace.kv.strip_bytes,
    )
    with Cluster() as cluster:
        cluster.add_node("n", 64, exact)
        cluster.add_worker("exact", "n", exact)
        cluster.add_worker("rounded", "n", rounded)
        first = cluster.submit(PROMPT, "rounded", "rounded", sampling=GREEDY)
        cluster.run(first)
        cluster.settle()
        second = cluster.submit(PROMPT, "exact", "exact", sampling=GREEDY)
        cluster.run(second)
        assert second.cached == 0, "the same tokens have other keys here"
        third = cluster.submit(PROMPT, "rounded", "exact", sampling=GREEDY)
        cluster.run(third)
        assert third.failed is not None and "another model or KV layout" in third.failed.reason
