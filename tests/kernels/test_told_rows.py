"""Goal: what is told of a row does not depend, to the last bit, on the rows beside it or on the number of threads.

Method: PyTorch's logprobs, which serve every device, of a row alone and among others, with one thread and with several;
vocabularies that are multiples of what is summed together, and that are not.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from pyengine.kernels.torch import eager  # noqa: E402


@pytest.mark.parametrize("vocab", [49_152, 32_003])
def test_a_row_is_told_alike_alone_and_among_others(vocab: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(vocab).normal(size=(64, vocab)).astype(np.float32) * 3)
    tokens = torch.arange(64) * 400
    logits[torch.arange(64), tokens] = 18.0  # likely tokens: their logarithms are small, and show what is rounded
    before = torch.get_num_threads()
    told = []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            for size in (64, 5, 1):
                parts = [
                    eager.logprobs(logits[at : at + size], tokens[at : at + size], 20) for at in range(0, 64, size)
                ]
                told.append([torch.cat(columns) for columns in zip(*parts, strict=True)])
    finally:
        torch.set_num_threads(before)
    for other in told[1:]:
        assert all(torch.equal(one, another) for one, another in zip(told[0], other, strict=True))
