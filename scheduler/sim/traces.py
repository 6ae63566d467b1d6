"""Readers of published traces: Mooncake's JSON lines and Azure's CSV, streamed, plain or gzipped.

Mooncake  {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [of 512-token blocks]}
          on each line; an id names a whole prefix
Azure     TIMESTAMP,ContextTokens,GeneratedTokens below a header that says so; nothing is shared

Only a prompt's full blocks have keys: a partial one cannot be reused. Where only hits are counted, as the paper's
tables do, `partial` gives the last one a key as well.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from datetime import datetime
from io import BufferedIOBase
from pathlib import Path
from typing import NoReturn

import msgspec

from .chains import Chains, NoTrie
from .trace import Request, Trace, TraceError

#: Tokens of a block that Mooncake's traces give an id to.
HASHED_TOKENS = 512
#: A prompt of a million tokens takes 40 KB.
MAX_LINE = 16 << 20
MAX_TOKENS = 100_000_000
#: Requests that are sorted in memory: about 1 KB each.
MAX_SORTED = 10_000_000

AZURE_HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(
    path: str | Path, block_tokens: int = HASHED_TOKENS, *, partial: bool = False, sort: bool = False
) -> Trace:
    """A trace in whichever of the formats the file has. Lines are read, and found wanting, as they are walked over; the
    first one at once.

    block_tokens: of the keys; for Mooncake's format a divisor of 512. partial: see above. sort: by time, in memory.
    Raises TraceError, also while it is walked over.
    """
    path = Path(path)
    if block_tokens < 1:
        raise TraceError(f"a block has 1 token or more, not {block_tokens}")
    number, first = next(_lines(path), (0, b""))
    if not number:
        raise TraceError(f"{path} is empty: there is no request in it")
    if first.startswith(b"{"):
        if HASHED_TOKENS % block_tokens:
            raise TraceError(
                f"{path} tells blocks of {HASHED_TOKENS} tokens apart: {block_tokens} must be a divisor of that"
            )
        parse = _mooncake
    elif first == AZURE_HEADER:
        parse = _azure
    else:
        raise TraceError(
            f"{path}, line {number}: neither JSON with timestamp, input_length, output_length and hash_ids (Mooncake), "
            f"nor the header {AZURE_HEADER.decode()} (Azure)"
        )
    changes = [f"blocks of {block_tokens} tokens"] if parse is _mooncake and block_tokens != HASHED_TOKENS else []
    changes += ["partial blocks have keys"] if partial else []
    changes += ["sorted by time"] if sort else []

    def rows() -> Iterator[Request]:
        found = parse(path, block_tokens, partial)
        return _sorted(path, found) if sort else _in_order(path, found)

    if not any(True for _ in parse(path, block_tokens, partial)):
        raise TraceError(f"{path} has a header, and no request below it")
    return Trace(path.name, block_tokens, rows, tuple(changes))


# -- lines -----------------------------------------------------------------------------------------------------------


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbers and texts of the lines that are not blank."""
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            file: BufferedIOBase = gzip.GzipFile(fileobj=raw) if zipped else raw
            number = 0
            while line := file.readline(MAX_LINE):
                number += 1
                if len(line) == MAX_LINE:
                    _wrong(path, number, f"is longer than {MAX_LINE >> 20} MiB: is this a trace?")
                if line := line.strip():
                    yield number, line
    except IsADirectoryError:
        raise TraceError(f"{path} is a directory: name a file in it") from None
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"cannot read the trace {path}: {getattr(error, 'strerror', None) or error}") from None


def _wrong(path: Path, number: int, what: str) -> NoReturn:
    raise TraceError(f"{path}, line {number}: {what}")


def _lengths(path: Path, number: int, prompt: int, output: int, names: tuple[str, str]) -> None:
    for name, value in zip(names, (prompt, output), strict=True):
        if not 0 < value <= MAX_TOKENS:
            _wrong(path, number, f"{name} must be 1 to {MAX_TOKENS} tokens, not {value}")


# -- formats: each gives seconds since an epoch of its own as arrival, and the line it is from ------------------------


def _mooncake(path: Path, block_tokens: int, partial: bool) -> Iterator[tuple[int, Request]]:
    decode = msgspec.json.Decoder(_Mooncake).decode
    chains = Chains(trie=True)
    parts = HASHED_TOKENS // block_tokens
    most = 2**64 // parts
    for number, line in _lines(path):
        try:
            row = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _wrong(path, number, _say(error))
        prompt, ids = row.input_length, row.hash_ids
        _lengths(path, number, prompt, row.output_length, ("input_length", "output_length"))
        if len(ids) != -(-prompt // HASHED_TOKENS):
            wanted = f"{-(-prompt // HASHED_TOKENS)} for {prompt} tokens in blocks of {HASHED_TOKENS}"
            _wrong(path, number, f"there are {len(ids)} hash_ids, and should be {wanted}")
        if ids and not 0 <= min(ids) <= max(ids) < most:
            _wrong(path, number, f"hash_ids must be 0 to {most - 1}")
        full = -(-prompt // block_tokens) if partial else prompt // block_tokens
        if parts > 1:
            ids = [id * parts + part for id in ids for part in range(parts)]
        try:
            keys = chains.keys(ids[:full])
        except NoTrie as error:
            id = error.id // parts
            _wrong(path, number, f"block {id} follows another block than before: a hash id must name a whole prefix")
        yield number, Request(row.timestamp / 1000.0, prompt, row.output_length, tuple(keys))


def _azure(path: Path, block_tokens: int, partial: bool) -> Iterator[tuple[int, Request]]:
    chains = Chains(cached=0)
    lines = _lines(path)
    next(lines)
    epoch = None
    for number, line in lines:
        cells = line.split(b",")
        if len(cells) != 3:
            _wrong(path, number, f"there are {len(cells)} fields, and should be {AZURE_HEADER.decode()}")
        try:
            # Ten millionths of a second are beyond what a datetime holds.
            at = datetime.fromisoformat(cells[0].decode()).replace(tzinfo=None)
        except ValueError:
            _wrong(path, number, f"TIMESTAMP {_show(cells[0])} is no date and time: use 2023-11-16 18:15:46.680590")
        try:
            prompt, output = int(cells[1]), int(cells[2])
        except ValueError:
            _wrong(path, number, f"ContextTokens {_show(cells[1])}, GeneratedTokens {_show(cells[2])}: use integers")
        _lengths(path, number, prompt, output, ("ContextTokens", "GeneratedTokens"))
        full = -(-prompt // block_tokens) if partial else prompt // block_tokens
        epoch = epoch or at
        yield (
            number,
            Request(
                (at - epoch).total_seconds(),
                prompt,
                output,
                tuple(chains.keys(range(number << 32, (number << 32) + full))),
            ),
        )


def _say(error: Exception) -> str:
    what, _, where = str(error).replace("`", "").partition(" - at $.")
    return f"{where}: {what}" if where else what


def _show(cell: bytes) -> str:
    return repr(cell[:40].decode(errors="replace"))


# -- order -----------------------------------------------------------------------------------------------------------


def _in_order(path: Path, rows: Iterator[tuple[int, Request]]) -> Iterator[Request]:
    start = before = None
    for number, row in rows:
        if start is None or before is None:
            start = before = row.arrival
        if row.arrival < before:
            _wrong(
                path,
                number,
                f"comes {before - row.arrival:g} s before the line above: sort the file, or have it sorted (--sort)",
            )
        before = row.arrival
        yield _from(row, start)


def _sorted(path: Path, rows: Iterator[tuple[int, Request]]) -> Iterator[Request]:
    held: list[Request] = []
    for number, row in rows:
        if len(held) == MAX_SORTED:
            _wrong(path, number, f"only {MAX_SORTED} requests can be sorted in memory: sort the file before")
        held.append(row)
    held.sort(key=lambda row: row.arrival)
    return (_from(row, held[0].arrival) for row in held)


def _from(row: Request, start: float) -> Request:
    return Request(row.arrival - start, row.prompt_tokens, row.output_tokens, row.blocks)
