"""Goal: all implementations of products with constant weights keep one contract, and ours its promise to the last bit.

Method: implementations times shapes against a float64 product, with a bound from the theory of rounding; and rows of
our product beside others, on other numbers of threads and at all levels of this processor, compared bit by bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pyengine import _native

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch", reason="needs the torch extra")

from pyengine.kernels.torch import linear

ROWS = (0, 1, 2, 3, 5, 6, 7, 12, 13, 16, 31, 33, 100)
#: [out, in] of each weight of a product: odd ones, and SmolLM2's in small.
SHAPES = (((7, 5),), ((33, 64), (1, 64), (40, 64)), ((96, 193),), ((130, 400), (62, 400)), ((320, 576),))
NAMES = [product.name for product in linear.PRODUCTS]
Make = Callable[..., "torch.Tensor"]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(values)


def product_of(name: str, weights: tuple[torch.Tensor, ...], packed: torch.dtype) -> linear.Product:
    chosen = next(product for product in linear.PRODUCTS if product.name == name)
    if not chosen.can(weights[0]):
        pytest.skip(f"{name} cannot do it on this machine")
    return chosen(weights, packed)


@pytest.mark.parametrize("packed", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_product_is_right(name: str, shapes: tuple[tuple[int, int], ...], packed: torch.dtype) -> None:
    weights = tuple(random(*shape, seed=index) for index, shape in enumerate(shapes))
    product = product_of(name, weights, packed)
    matrix = torch.cat(weights).to(packed).double()
    depth = matrix.shape[1]
    for rows in ROWS:
        x = random(rows, depth, seed=9)
        expected = x.double() @ matrix.T
        # Each product of two numbers goes through at most so many roundings, whatever the order of the sum.
        bound = (depth + 1) * torch.finfo(torch.float32).eps * (x.double().abs() @ matrix.T.abs())
        out = torch.full((rows, matrix.shape[0]), torch.nan)
        for result in (product(x, None), product(x, out)):
            assert result.shape == expected.shape
            assert bool(((result.double() - expected).abs() <= bound).all()), f"{rows} rows"
        assert rows == 0 or product(x, out).data_ptr() == out.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ours_is_chosen_where_it_can(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    if _native.LINEAR_LEVELS[-1] == "scalar":
        pytest.skip("this processor has no level that is fast")
    linear._log_once.cache_clear()
    weight = random(40, 24).to(dtype)
    with caplog.at_level("INFO"):
        product = linear.Linear(weight)
    x = random(3, 24)
    assert torch.equal(product(x), linear.Native((weight,), dtype)(x, None))
    assert f"native ({_native.LINEAR_LEVELS[-1]}), 2 threads" in caplog.text


@pytest.mark.parametrize("packed", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_row_does_not_depend_on_batch_threads_or_level(packed: torch.dtype) -> None:
    weights = (random(200, 400, seed=1), random(77, 400, seed=2))
    x = random(40, 400)
    torch.set_num_threads(1)
    alone = linear.Native(weights, packed, "scalar")
    expected = torch.cat([alone(row.unsqueeze(0), None) for row in x])
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        for level in _native.LINEAR_LEVELS:
            product = linear.Native(weights, packed, level)
            for first, last in ((0, 40), (0, 1), (3, 16), (7, 20), (39, 40)):
                assert torch.equal(product(x[first:last], None), expected[first:last]), (threads, level, first, last)


def test_rows_may_lie_apart() -> None:
    weight = random(50, 30)
    product = linear.Native((weight,), torch.float32)
    x = random(9, 30)
    wide = torch.full((9, 80), 7.0)
    wide[:, 20:50] = x
    out = torch.full((9, 60), 7.0)
    product(wide[:, 20:50], out[:, 5:55])
    assert torch.equal(out[:, 5:55], product(x, None))
    assert bool((out[:, :5] == 7.0).all()) and bool((out[:, 55:] == 7.0).all())
    assert torch.equal(product(x.T.contiguous().T, None), product(x, None)), "columns that are dense are copied"


def test_what_does_not_fit_is_refused() -> None:
    product = linear.Native((random(6, 4),), torch.float32)
    out = torch.zeros(2, 6)
    for x, wrong in (
        (random(2, 5), None),
        (random(2, 4), torch.zeros(3, 6)),
        (random(2, 4), torch.zeros(6, 2).T),
        (random(2, 4).double(), None),
        (random(2, 4), out.double()),
        (random(2, 4).to("meta"), None),
    ):
        with pytest.raises(ValueError, match=r"4|dense|float32"):
            product(x, wrong)
    threads = _native.LinearThreads(1)
    with pytest.raises(_native.BugError, match="120 bytes are no 6 x 4"):
        linear.Native((random(6, 4), random(6, 5)), torch.float32)
    for parts, dtype in (([(b"123", 1)], "float32"), ([(bytes(16), 1)], "float64")):
        with pytest.raises(_native.BugError):
            _native.LinearWeights(parts, 4, dtype, threads)  # type: ignore[arg-type]
    weights = _native.LinearWeights([(np.zeros((2, 4), np.float32), 2)], 4, "float32", threads)
    assert (weights.outputs, weights.inputs, weights.size) == (2, 4, 4 * 4 * 32)
    for addresses in ((1, 4, 8, 2, 1), (8, 3, 8, 2, 2)):
        with pytest.raises(_native.BugError):
            weights.multiply(*addresses, threads)
    with pytest.raises(_native.BugError, match="scalar"):
        weights.multiply(8, 4, 8, 2, 0, threads, "avx1024")


def test_several_python_threads_may_multiply() -> None:
    product = linear.Native((random(300, 200),), torch.float32)
    x = random(20, 200)
    expected = product(x, None)
    right: list[bool] = []

    def multiply() -> None:
        right.extend(torch.equal(product(x, None), expected) for _ in range(200))

    workers = [threading.Thread(target=multiply) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert right == [True] * 600
