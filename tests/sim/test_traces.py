"""Goal: traces are read as they are written, changed as their description says, and what is wrong is named by file and
line. Method: a random trie of prompts as the oracle, files made here, every kind of bad line."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from pyengine.scheduler.sim.chains import Chains, NoTrie
from pyengine.scheduler.sim.trace import Request, Trace, TraceError
from pyengine.scheduler.sim.traces import read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,1100,109
2023-11-16 18:15:50.9951690,511,1
"""


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts over a random tree of blocks, some of which end in a partial block of their own."""
    draw = random.Random(seed)
    children: dict[int, list[int]] = {}
    made = 0
    found = []
    for index in range(count):
        ids: list[int] = []
        parent = -1
        for _ in range(draw.randint(0, 6)):
            known = children.setdefault(parent, [])
            if not known or draw.random() < 0.3:
                known.append(made)
                made += 1
            parent = draw.choice(known)
            ids.append(parent)
        length = 512 * len(ids)
        if not ids or draw.random() < 0.8:
            ids.append(made)
            made += 1
            length += draw.randint(1, 511)
        found.append(
            {"timestamp": 3000 * (index // 4), "input_length": length, "output_length": 1 + index % 7, "hash_ids": ids}
        )
    return found


def write(path: Path, found: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def shared(left: tuple[bytes, ...], right: tuple[bytes, ...]) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    assert not set(left[count:]) & set(right[count:]), "keys are equal behind different ones"
    return count


@pytest.mark.parametrize("block_tokens", [512, 128, 16])
@pytest.mark.parametrize("partial", [False, True])
def test_keys_share_what_prompts_share(tmp_path: Path, block_tokens: int, partial: bool) -> None:
    found = rows(40)
    trace = read_trace(write(tmp_path / "t.jsonl", found), block_tokens, partial=partial)
    requests = list(trace)
    assert requests == list(trace), "a second walk gives the same"
    for row, request in zip(found, requests, strict=True):
        length = row["input_length"]
        assert request.arrival == row["timestamp"] / 1000
        assert (request.prompt_tokens, request.output_tokens) == (length, row["output_length"])
        assert len(request.blocks) == (-(-length // block_tokens) if partial else length // block_tokens)
        assert all(len(key) == 16 for key in request.blocks)
    for row, request in zip(found, requests, strict=True):
        for other_row, other in zip(found, requests, strict=True):
            same = 0
            while same < min(len(row["hash_ids"]), len(other_row["hash_ids"])) and (
                row["hash_ids"][same] == other_row["hash_ids"][same]
            ):
                same += 1
            # In keys, as far as both prompts have them; the whole 512 tokens of an id, or the partial block it names.
            expected = min(same * 512 // block_tokens, len(request.blocks), len(other.blocks))
            assert shared(request.blocks, other.blocks) == expected


def test_gzip_and_blank_lines(tmp_path: Path) -> None:
    found = rows(10)
    plain = write(tmp_path / "t.jsonl", found)
    zipped = tmp_path / "t.jsonl.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes() + b"\n  \n"))
    assert list(read_trace(zipped)) == list(read_trace(plain))
    zipped.write_bytes(zipped.read_bytes()[:60])
    with pytest.raises(TraceError, match=r"cannot read the trace .*t\.jsonl\.gz"):
        list(read_trace(zipped))
    zipped.write_bytes(b"\x1f\x8b\x08" + bytes(range(200)))
    with pytest.raises(TraceError, match="cannot read"):
        read_trace(zipped)


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    trace = read_trace(path, 256)
    requests = list(trace)
    assert [(row.prompt_tokens, row.output_tokens) for row in requests] == [(374, 44), (1100, 109), (511, 1)]
    assert [row.arrival for row in requests] == pytest.approx([0.0, 4.314579, 4.314579])
    assert [len(row.blocks) for row in requests] == [1, 4, 1]
    assert len({key for row in requests for key in row.blocks}) == 6, "nothing is shared"
    assert [len(row.blocks) for row in read_trace(path, 256, partial=True)] == [2, 5, 2]


def test_a_file_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    ids = list(range(1000))
    write(
        path,
        [
            {"timestamp": 5 * index, "input_length": 512_000, "output_length": 1, "hash_ids": ids}
            for index in range(400)
        ],
    )
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_trace(path).speed(2).jitter(0, 1.0).limit(20)) == 20
        assert sum(len(row.blocks) for row in read_trace(path)) == 400_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 3 << 19 and peak < 3 << 18


GOOD = {"timestamp": 10, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
AFTER = {"timestamp": 20, "input_length": 1100, "output_length": 5, "hash_ids": [0, 2, 3]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hash_ids": None}, "hash_ids"),
        ({"input_length": None}, "input_length"),
        ({"timestamp": None}, "timestamp"),
        ({"input_length": 0}, "input_length must be 1 to"),
        ({"input_length": -600}, "input_length must be 1 to"),
        ({"output_length": 0}, "output_length must be 1 to"),
        ({"input_length": 600.5}, "input_length: Expected int, got float"),
        ({"input_length": "600"}, "input_length: Expected int, got str"),
        ({"hash_ids": [0, 2]}, r"there are 2 hash_ids, and should be 3 for 1100 tokens"),
        ({"hash_ids": [0, 2, 3, 4]}, r"there are 4 hash_ids, and should be 3"),
        ({"hash_ids": [0, 2, -3]}, "hash_ids must be 0 to"),
        ({"hash_ids": [0, 2, 2**64]}, "hash_ids must be 0 to|hash_ids"),
        ({"hash_ids": [1, 2, 3]}, "block 1 follows another block than before: a hash id must name a whole prefix"),
        ({"hash_ids": [0, 0, 3]}, "block 0 follows another block"),
        ({"timestamp": 5}, r"comes 0\.005 s before the line above: sort the file, or have it sorted"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    second = {**AFTER, **change}
    bad = {key: value for key, value in second.items() if value is not None}
    path = write(tmp_path / "bad.jsonl", [GOOD, GOOD, bad, AFTER])
    if set(change) == {"hash_ids"} and change["hash_ids"] == [1, 2, 3]:
        path = write(tmp_path / "bad.jsonl", [{**GOOD, "input_length": 1024}, GOOD, bad])
    for block_tokens in (512, 64):
        with pytest.raises(TraceError, match=rf"bad\.jsonl, line 3: .*({message})"):
            list(read_trace(path, block_tokens))


def test_unsorted_times_can_be_sorted(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [AFTER, GOOD, {**AFTER, "timestamp": 15}])
    trace = read_trace(path, sort=True)
    assert [row.arrival for row in trace] == pytest.approx([0.0, 0.005, 0.01])
    assert [row.prompt_tokens for row in trace] == [600, 1100, 1100]
    assert "sorted by time" in trace.description


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"\x00\xff\x13garbage" * 50, "line 1: neither JSON"),
        (b"{\xff\xfe\n", "line 1: "),
        (b"[1, 2]\n", "line 1: neither JSON"),
        (b"{" + b"1" * (17 << 20), "line 1: is longer than 16 MiB"),
        (b"TIMESTAMP,ContextTokens\n", "line 1: neither JSON"),
        (AZURE.splitlines()[0].encode() + b"\n", "no request below"),
        (AZURE.encode() + b"yesterday,1,1\n", "line 5: TIMESTAMP 'yesterday' is no date"),
        (AZURE.encode() + b"2023-11-16 18:15:51,1.5,1\n", r"line 5: ContextTokens '1\.5'"),
        (AZURE.encode() + b"2023-11-16 18:15:51,1\n", "line 5: there are 2 fields"),
        (AZURE.encode() + b"2023-11-16 18:15:51,-4,1\n", "line 5: ContextTokens must be 1 to"),
        (AZURE.encode() + b"2023-11-16 18:15:51,4,0\n", "line 5: GeneratedTokens must be 1 to"),
        (AZURE.encode() + b"2023-11-16 18:15:01,4,1\n", "line 5: comes .* before the line above"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=f"bad.*{message}"):
        list(read_trace(path))


def test_bad_places(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is a directory: name a file"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match=r"cannot read the trace .*No such file"):
        read_trace(tmp_path / "none")
    path = write(tmp_path / "t.jsonl", [GOOD])
    with pytest.raises(TraceError, match="100 must be a divisor"):
        read_trace(path, 100)
    with pytest.raises(TraceError, match="1 token or more"):
        read_trace(path, 0)


# -- what may be done to a trace ---------------------------------------------------------------------------------------


def made(arrivals: list[float]) -> Trace:
    found = [Request(at, 10 + index, 1, ()) for index, at in enumerate(arrivals)]
    return Trace("made", 16, lambda: found)


def arrivals(trace: Trace) -> list[float]:
    return [row.arrival for row in trace]


def test_every_change_is_named() -> None:
    trace = made([0.0, 0.0, 3.0, 6.0, 9.0])
    assert trace.description == "made (as it is)"
    changed = trace.speed(2).limit(4).duration(4.0).jitter(7)
    assert changed.description == "made (2 x speed, first 4 requests, first 4 s, jittered within 1.5 s, seed 7)"
    assert arrivals(trace.speed(2)) == [0.0, 0.0, 1.5, 3.0, 4.5]
    assert arrivals(trace.limit(2)) == [0.0, 0.0]
    assert arrivals(trace.duration(6.0)) == [0.0, 0.0, 3.0]
    assert arrivals(trace.rate(4.0)) == pytest.approx([0.0, 0.0, 1 / 3, 2 / 3, 1.0])
    assert "4 requests/s" in trace.rate(4.0).description
    first, second = trace.halves()
    assert arrivals(first) == [0.0, 0.0] and arrivals(second) == [0.0, 3.0, 6.0]
    assert "first half: 2 requests" in first.description and "second half: 3 requests" in second.description
    assert arrivals(changed.cached()) == arrivals(changed) and changed.cached().description == changed.description


def test_jitter_stays_on_the_grid() -> None:
    times = [3.0 * step for step in range(200) for _ in range(20)] + [700.0] * 20 + [1000.0] * 20
    trace = made(times)
    moved = trace.jitter(3)
    assert arrivals(moved) == arrivals(trace.jitter(3)) != arrivals(trace.jitter(4))
    assert arrivals(moved) == sorted(arrivals(moved))
    assert [row.prompt_tokens for row in moved] == [row.prompt_tokens for row in trace]
    offsets = [after - before for before, after in zip(times, arrivals(moved), strict=True)]
    assert min(offsets) >= 0.0 and max(offsets) <= 3.0
    # Uniform: mean half, variance a twelfth, of 4,040 draws.
    mean = sum(offsets) / len(offsets)
    assert mean == pytest.approx(1.5, abs=0.07)
    assert sum((offset - mean) ** 2 for offset in offsets) / len(offsets) == pytest.approx(9 / 12, rel=0.1)


@pytest.mark.parametrize(
    "change",
    [
        lambda trace: trace.speed(0.0),
        lambda trace: trace.speed(float("nan")),
        lambda trace: trace.rate(-1.0),
        lambda trace: trace.limit(0),
        lambda trace: trace.duration(0.0),
        lambda trace: trace.jitter(0, -1.0),
        lambda trace: trace.limit(1).halves(),
        lambda trace: trace.limit(2).rate(1.0),
    ],
)
def test_impossible_changes(change: Any) -> None:
    with pytest.raises(TraceError):
        change(made([0.0, 0.0, 1.0]))


def test_forgotten_keys_are_made_again() -> None:
    endless, short = Chains(), Chains(cached=3)
    for ids in ([1, 2, 3], [1, 2, 4, 5, 6], [9], [1, 2, 3]):
        assert endless.keys(ids) == short.keys(ids)
    assert endless.keys([1, 2])[1] != endless.keys([3, 2])[1], "a key names the whole prefix"
    with pytest.raises(NoTrie, match="block 2 follows"):
        Chains(trie=True).keys([1, 2, 2])
