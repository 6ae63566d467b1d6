"""Where each implementation is computed: here, or in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.kernels import calls
from tests.kernels.calls import Answer, Call
from tests.kernels.interpreter import interpret

Compute = Callable[[Call, str], Answer]


@pytest.fixture(scope="session")
def compute() -> Iterator[Compute]:
    """compute(call, implementation): on the GPU if there is one; else Triton in its interpreter, in a child. What is
    written for CPUs stays there, and refuses what they do not compute in.
    """
    torch = pytest.importorskip("torch", reason="needs the torch extra")

    def native(call: Call) -> Answer:
        if call.dtype == "float16" and call.contract not in ("gather", "scatter", "sample"):
            with pytest.raises(ValueError, match="float32 and bfloat16"):
                calls.compute(call, "native", "cpu")
            pytest.skip("native kernels refuse float16: no CPU model is computed in it")
        return calls.compute(call, "native", "cpu")

    if torch.cuda.is_available():
        yield lambda call, name: native(call) if name == "native" else calls.compute(call, name, "cuda")
        return
    with ProcessPoolExecutor(1, get_context("spawn"), interpret) as child:

        def compute(call: Call, implementation: str) -> Answer:
            if implementation == "triton":
                return child.submit(calls.compute, call, implementation, "cpu").result()
            return native(call) if implementation == "native" else calls.compute(call, implementation, "cpu")

        yield compute
