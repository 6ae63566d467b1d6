"""Goal: no body holds up others, by its size, by what is in it, or by how slowly it comes.
Method: what the parser would have to make is counted before it makes anything, and the count compared with a plain one;
a server whose budget is held by some, and asked by others.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.gateway import bodies, budget
from pyengine.gateway.bodies import _bound
from pyengine.gateway.errors import ApiError
from pyengine.scheduler.types import Role
from tests.gateway.cluster import cluster

VALUES = st.recursive(
    st.one_of(st.integers(0, 9), st.text(alphabet='",[]{}\\\\ab\U0001f600', max_size=8), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=6), st.dictionaries(st.text(max_size=3), inner, max_size=6)),
    max_leaves=40,
)


def count(value: Any) -> tuple[int, int]:
    """Commas between values, and lists and objects."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    found = [count(each) for each in inner]
    commas = max(len(inner) - 1, 0) + sum(commas for commas, _ in found)
    return commas, isinstance(value, dict | list) + sum(lists for _, lists in found)


@given(value=VALUES, values=st.integers(0, 30), containers=st.integers(0, 8))
@settings(max_examples=200, deadline=None)
def test_values_are_counted_and_strings_are_not_looked_into(value: Any, values: int, containers: int) -> None:
    body = json.dumps(value).encode()
    commas, lists = count(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "MAX_VALUES", values)
        patch.setattr(bodies, "MAX_CONTAINERS", containers)
        if commas > values or lists > containers:
            with pytest.raises(ApiError, match="send fewer"):
                _bound(body)
        else:
            _bound(body)


@pytest.mark.parametrize("piece", [b"[]", b"{}", b"1", b'""', b'"\\\\"', b'"\\""'])
def test_a_whole_body_of_little_things_is_never_parsed(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(json, "loads", never)
    body = b'{"prompt": [' + b",".join([piece] * ((12 << 20) // (len(piece) + 1))) + b"]}"
    with pytest.raises(ApiError, match="send fewer"):
        bodies._json(body)


def test_what_anybody_sends_is_parsed() -> None:
    """A prompt of a million ids, one of many brackets and commas, and a string that does not end."""
    ids = {"prompt": list(range(1_000_000))}
    assert bodies._json(json.dumps(ids).encode()) == ids
    text = {"prompt": "[],{}," * 500_000}
    assert bodies._json(json.dumps(text).encode()) == text
    with pytest.raises(ApiError, match="not valid JSON"):
        bodies._json(b'"' + b"[," * 1_200_000)


# -- bytes under way ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: the name of a unix socket must be short.
    with tempfile.TemporaryDirectory(prefix="pyb") as name:
        yield Path(name)


async def test_bodies_have_a_budget_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who would go beyond it is told to come again; small bodies need none; all is given back, also by who leaves."""
    monkeypatch.setattr(budget, "FREE", 1000)
    async with cluster(folder, Role.BOTH, max_body_bytes=10_000) as at, aiohttp.ClientSession() as http:
        bodies_ = at.service.bodies
        assert bodies_.size == 40_000

        async def post(size: int) -> tuple[int, Any, str | None]:
            body = json.dumps({"model": "fake", "prompt": "x" * size, "max_tokens": 1}).encode()
            async with http.post(f"{at.url}/tokenize", data=body) as response:
                return response.status, await response.json(), response.headers.get("Retry-After")

        held = []
        for _ in range(4):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(at.url.rpartition(":")[2]))
            head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n"
            writer.write(head + b"x" * 9900)
            held.append((reader, writer))
        while bodies_.taken < 4 * 8900:
            await asyncio.sleep(0)
        status, answer, again = await post(9000)
        assert (status, answer["error"]["code"], again) == (503, "service_unavailable", "1")
        assert (await post(500))[0] == 200
        for _, writer in held[:2]:
            writer.transport.abort()
        while bodies_.taken > 2 * 8900:
            await asyncio.sleep(0)
        assert (await post(9000))[0] == 200
        # One that is refused gives back what it had, and so does one that is answered.
        for reader, writer in held[2:]:
            writer.write(b"x" * 99)
            assert b"400 Bad Request" in await reader.readline()
            writer.transport.abort()
        assert bodies_.taken == 0
