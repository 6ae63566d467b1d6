"""A prefill worker's KV in the dtype of the decode workers.

Where prefill and decode workers keep KV in different dtypes, pools and everything on the way hold that of the decode
workers: so only prefill workers convert, beside other work, and a step that decodes never waits for it. What a decode
worker computes itself is kept as it is. `Converted` stands between a backend and its worker; all that the worker does
with pages goes through it, in the converted namespace, so nothing there is ever taken for exact KV.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from pyengine.backend import U8, U32, Backend, Pending, Readable, Slice, Written
from pyengine.backends import DTYPES
from pyengine.ranks import Ranked
from pyengine.scheduler.types import DTYPE_BYTES, KvSpec, Namespace

#: Bytes of float32 converted at once. Passes over so much stay in a core's cache, and their results are small enough
#: for the allocator to keep: from 256 KiB on it maps each anew, at a fifth of the speed (6.2 GB/s here, 1.2 there).
PIECE = 128 << 10


def converted_namespace(own: Namespace, prefill: str, decode: str) -> Namespace:
    """The namespace of KV computed by workers of both dtypes, kept in `decode`. own: of one of them.

    Raises ValueError if `own` keeps KV in neither.
    """
    if {group.dtype for group in own.kv.groups} - {prefill, decode}:
        kept = ", ".join(sorted({group.dtype for group in own.kv.groups}))
        raise ValueError(f"this worker keeps KV in {kept}, and KV is converted from {prefill} to {decode}")
    groups = tuple(msgspec.structs.replace(group, dtype=decode) for group in own.kv.groups)
    kv = KvSpec(groups=groups, block_tokens=own.kv.block_tokens)
    return msgspec.structs.replace(own, compute_dtype=f"{prefill} to {decode}", kv=kv)


class Converted:
    """Implements `pyengine.backend.Backend` over another one, whose KV may be of another dtype than the pools'."""

    def __init__(self, backend: Backend, prefill: str, decode: str) -> None:
        """Takes the backend over. prefill, decode: dtypes of KV at the workers of either role; raises ValueError unless
        they are known and the backend's is one of them.
        """
        for dtype in (prefill, decode):
            if dtype not in DTYPES:
                raise ValueError(f"KV cannot be converted from or to {dtype!r}; known: {', '.join(DTYPES)}")
        if isinstance(backend, Ranked):
            # Each of its processes moves the KV of its own heads, past whatever stands before this one.
            raise ValueError("KV of a worker of several processes cannot be converted: leave out tp, or the conversion")
        self._backend = backend
        self._own = backend.namespace.kv
        self.namespace = converted_namespace(backend.namespace, prefill, decode)
        self.model = backend.model
        self.tokenizer = backend.tokenizer
        self.vocab_size = backend.vocab_size
        self.max_positions = backend.max_positions
        self.eos_token_ids = backend.eos_token_ids
        self.overlaps = backend.overlaps
        self.layerwise = backend.layerwise
        (self._from,) = {group.dtype for group in self._own.groups}
        self._to = decode

    def allocate(self, pages: int) -> None:
        self._backend.allocate(pages)

    def warm_up(self, max_tokens: int, max_sequences: int) -> None:
        self._backend.warm_up(max_tokens, max_sequences)

    def execute(self, slices: list[Slice]) -> list[int]:
        return self._backend.execute(slices)

    def submit(self, slices: list[Slice], written: Written | None = None, readable: Readable | None = None) -> Pending:
        return self._backend.submit(slices, written, readable)

    def read_pages(self, pages: list[int], out: U8, layers: range | None = None) -> None:
        if self._from == self._to:
            self._backend.read_pages(pages, out, layers)
            return
        strips = np.empty((len(pages), out.shape[1], self._own.strip_bytes), np.uint8)
        self._backend.read_pages(pages, strips, layers)
        convert(strips, self._from, out, self._to)

    def write_pages(self, pages: list[int], strips: U8, layers: range | None = None) -> None:
        if self._from != self._to:
            own = np.empty((len(pages), strips.shape[1], self._own.strip_bytes), np.uint8)
            convert(strips, self._to, own, self._from)
            strips = own
        self._backend.write_pages(pages, strips, layers)

    def close(self) -> None:
        self._backend.close()


def convert(source: U8, dtype: str, out: U8, out_dtype: str) -> None:
    """Converts numbers, little-endian, between float32 and bfloat16: to bfloat16 to nearest, ties to even; NaN stays.

    source, out: uint8, contiguous, of any shapes with the same number of numbers in the same order.
    """
    assert {dtype, out_dtype} == set(DTYPES), "only between these two"
    assert source.size * DTYPE_BYTES[out_dtype] == out.size * DTYPE_BYTES[dtype], "as many numbers"
    assert out.flags.c_contiguous, "else reshaping would copy"
    step = PIECE // 4
    if out_dtype == "float32":
        upper, whole = source.reshape(-1).view("<u2"), out.reshape(-1).view("<u4")
        for begin in range(0, len(whole), step):
            # bfloat16 is the upper half of float32.
            np.left_shift(upper[begin : begin + step], 16, out=whole[begin : begin + step], dtype=np.uint32)
    else:
        whole, upper = source.reshape(-1).view("<u4"), out.reshape(-1).view("<u2")
        for begin in range(0, len(whole), step):
            upper[begin : begin + step] = _upper_half(whole[begin : begin + step])


def _upper_half(numbers: U32) -> U32:
    """float32 as uint32 -> the nearest bfloat16, in the lower 16 bits."""
    # Half of the last place, less one where the upper half is even: then a tie is not carried.
    rounded: U32 = np.right_shift(numbers, 16, dtype=np.uint32)
    rounded &= 1
    rounded += 0x7FFF
    rounded += numbers
    rounded >>= 16
    nan: npt.NDArray[np.bool_] = (numbers & 0x7FFFFFFF) > 0x7F800000
    if nan.any():
        # The carry may have made infinity or zero of it; the quiet bit keeps it NaN when its low bits are cut off.
        rounded[nan] = (numbers[nan] >> 16) | 0x40
    return rounded
