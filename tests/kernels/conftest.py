"""Where each implementation is computed: here, or in a process of its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.kernels import calls
from tests.kernels.calls import JAX, Answer, Call
from tests.kernels.interpreter import interpret

Compute = Callable[[Call, str], Answer]


@pytest.fixture(scope="session")
def compute() -> Iterator[Compute]:
    """compute(call, implementation): on the GPU if there is one, but for what is written for CPUs; else Triton in its
    interpreter, in a child.
    """
    with contextlib.ExitStack() as children:

        @functools.cache
        def interpreting() -> ProcessPoolExecutor:
            return children.enter_context(ProcessPoolExecutor(1, get_context("spawn"), interpret))

        def compute(call: Call, implementation: str) -> Answer:
            if implementation in JAX:
                pytest.importorskip("jax", reason="needs the jax extra")
                return calls.compute(call, implementation, "")
            torch = pytest.importorskip("torch", reason="needs the torch extra")
            if implementation == "native":
                return calls.compute(call, implementation, "cpu")
            if torch.cuda.is_available():
                return calls.compute(call, implementation, "cuda")
            if implementation == "triton":
                return interpreting().submit(calls.compute, call, implementation, "cpu").result()
            return calls.compute(call, implementation, "cpu")

        yield compute
