"""Goal: a `Pool` with an SSD finds again what it had, never finds what was removed, and holds values larger than its
memory. Method: pools of this process and of others that are closed or killed, beside a dict; waits are for events."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine import AsyncPool, Pool
from pyengine._native import GiveUpError, RetryError
from pyengine.config import ConfigError
from pyengine.pool import Entry

MIB = 1 << 20


def opened(directory: Path, dram: str = "8MiB", ssd: str = "256MiB", **more: Any) -> Pool:
    return Pool.open(dram, ssd_dir=directory / "ssd", ssd_bytes=ssd, **more)


def value(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def got(pool: Pool, key: str) -> bytes | None:
    view: Any = pool.get(key)
    return None if view is None else bytes(view)


def test_a_pool_that_is_opened_again_has_its_objects(tmp_path: Path) -> None:
    values = {f"{size}": value(size, size) for size in (1, 5000, 70_000, MIB, 3 * MIB + 7)}
    with opened(tmp_path) as pool:
        assert all(pool.put(key, values[key]) for key in values)
        assert pool.put("gone", b"value") and pool.remove("gone")
        assert {pool.where(key) for key in values} == {"dram"} and pool.where("gone") is None
    with opened(tmp_path) as pool:
        stats = pool.stats()
        assert (stats.objects, stats.ssd_objects, stats.bytes) == (5, 5, 0) and stats.ssd_bytes > 4 * MIB
        assert stats.ssd_capacity == 256 * MIB
        assert {pool.where(key) for key in values} == {"ssd"} and not pool.exists("gone")
        assert all(not pool.put(key, b"other") for key in values), "they are there"
        names = sorted(Entry(key.encode(), len(values[key])) for key in values)
        assert sorted(pool.list()) == names and [entry.key for entry in pool.list("70")] == [b"70000"]
        for key in values:
            assert got(pool, key) == values[key] and pool.where(key) == "dram"
            buffer = bytearray(len(values[key]))
            assert pool.get_into(key, buffer) == len(buffer) and buffer == values[key]
        assert pool.stats().objects == 5 and pool.stats().bytes > 4 * MIB
        assert all(pool.remove(key) for key in values) and not list(pool.list())
        stats = pool.stats()
        assert stats.objects == stats.bytes == stats.ssd_objects == stats.ssd_bytes == 0
    with opened(tmp_path) as pool:
        assert not list(pool.list())


def test_a_value_larger_than_dram(tmp_path: Path) -> None:
    """By both roads, among others that must make room for it."""
    large = value(60 * MIB + 12_345, 1)
    socket = str(tmp_path / "node.sock")
    with opened(tmp_path, socket=socket) as home, Pool.connect(socket) as far:
        for number, pool in enumerate([home, far]):
            assert all(pool.put(f"{number} {other}", value(MIB, other)) for other in range(4))
            assert pool.put(f"large {number}", large)
        assert home.put("small", b"value")
        buffer = bytearray(len(large))
        for pool in (home, far):
            for number in range(2):
                assert pool.get_into(f"large {number}", buffer) == len(large) and buffer == large
                buffer[:] = bytes(len(large))
        assert got(home, "large 0") == large and got(far, "small") == b"value"
        assert far.remove("large 0") and far.get("large 0") is None
    with opened(tmp_path) as pool:
        assert pool.get_into("large 1", buffer) == len(large) and buffer == large
        assert pool.get("large 0") is None


def test_views_leave_less_room(tmp_path: Path) -> None:
    """What cannot be brought for want of room is no miss."""
    with opened(tmp_path) as pool:
        for number in range(20):
            assert pool.put(f"{number}", value(MIB, number))
    with opened(tmp_path) as pool:
        keys = [f"{number}" for number in range(20)]
        with pytest.raises(RetryError, match="close views"):
            pool.batch_get(keys)
        buffers = [bytearray(MIB) for _ in keys]
        assert pool.batch_get_into(keys, buffers) == [MIB] * 20
        assert all(buffer == value(MIB, number) for number, buffer in enumerate(buffers))


def test_a_value_larger_than_all(tmp_path: Path) -> None:
    with opened(tmp_path, ssd="16MiB") as pool:
        with pytest.raises(GiveUpError, match="ssd_bytes"):
            pool.put("huge", bytes(30 * MIB))
        with pytest.raises(RetryError, match=r"lost while it was put|no room"):
            pool.put("huge", bytes(23 * MIB))
        assert pool.get("huge") is None and not list(pool.list())
        assert pool.put("huge", value(10 * MIB, 1)) and got(pool, "huge") == value(10 * MIB, 1)


_CHILD = """
import random, sys
import numpy as np
from pyengine import Pool
directory, seed = sys.argv[1], int(sys.argv[2])
draw = random.Random(seed)
with Pool.open("8MiB", ssd_dir=directory, ssd_bytes="4GiB") as pool:
    version = 1000 * seed
    while True:
        version += 1
        key, size = f"{draw.randrange(12)}", draw.choice([10, 5000, 300_000, 2_500_000, 12_000_000])
        # What it may be found as is told before, and what it is behind.
        print("removing", key, flush=True)
        pool.remove(key)
        if draw.random() < 0.8:
            print("putting", key, version, size, flush=True)
            pool.put(key, np.random.default_rng(version).bytes(size))
        if draw.random() < 0.2:
            assert pool.flush()
            print("flushed", flush=True)
"""


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """A child puts, removes and flushes, and is killed; what was flushed and not touched since is there, and whatever
    is there is a value of its name, as a whole, not older than the flush."""
    directory = tmp_path / "ssd"
    draw = random.Random(1)
    #: What a key may be found as: (version, size), None: not at all.
    states: dict[str, list[tuple[int, int] | None]] = {f"{key}": [None] for key in range(12)}
    survived = 0
    for life in range(1, 6):
        with subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(directory), f"{life}"], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            for _ in range(draw.randrange(20, 60)):
                line = child.stdout.readline().split()
                _note(states, line)
            child.send_signal(signal.SIGKILL)
            # What it said before it died counts too.
            for rest in child.stdout.read().splitlines(keepends=True):
                if rest.endswith("\n"):
                    _note(states, rest.split())
        with Pool.open("8MiB", ssd_dir=directory, ssd_bytes="4GiB") as pool:
            for key, may in states.items():
                found = got(pool, key)
                allowed = [None if state is None else value(state[1], state[0]) for state in may]
                assert found in allowed, f"{key} in life {life} is none of {may}"
                assert found is not None or None in may, f"{key} in life {life} was flushed and is lost"
                survived += found is not None
                states[key] = [may[allowed.index(found)]]
            names = {entry.key.decode() for entry in pool.list()}
            assert names == {key for key, may in states.items() if may != [None]}
    assert survived > 5


def _note(states: dict[str, list[tuple[int, int] | None]], line: list[str]) -> None:
    match line:
        case ["removing", key]:
            states[key].append(None)
        case ["putting", key, version, size]:
            # Until it is flushed it may be gone, too.
            states[key] += [None, (int(version), int(size))]
        case ["flushed"]:
            for key, may in states.items():
                states[key] = may[-1:]
        case other:
            raise AssertionError(other)


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    with opened(tmp_path) as pool:
        assert pool.put("name", b"value")
        with pytest.raises(GiveUpError, match="used by another"):
            opened(tmp_path)
        with pytest.raises(ConfigError, match="ssd_bytes"):
            Pool.open(ssd_dir=tmp_path / "other")
        with pytest.raises(ConfigError, match="ssd_dir"):
            Pool.open(ssd_bytes="1GiB")
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    with pytest.raises(ConfigError, match="another secret"):
        opened(tmp_path, secret_file=secret)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="name a directory"):
        Pool.open(ssd_dir=tmp_path / "file" / "below", ssd_bytes="1GiB")
    os.chmod(tmp_path / "ssd", 0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        opened(tmp_path)


def test_without_an_ssd_nothing_is_durable() -> None:
    with Pool.open("8MiB") as pool:
        assert pool.put("name", b"value") and not pool.flush()
        assert pool.stats().ssd_capacity == 0
        with pytest.raises(GiveUpError, match="larger"):
            pool.put("large", bytes(9 * MIB))


def test_asyncio(tmp_path: Path) -> None:
    async def use() -> None:
        async with await AsyncPool.open("8MiB", ssd_dir=tmp_path / "ssd", ssd_bytes="64MiB") as pool:
            assert await pool.put("name", value(20 * MIB, 1)) and await pool.flush()
        async with await AsyncPool.open("8MiB", ssd_dir=tmp_path / "ssd", ssd_bytes="64MiB") as pool:
            assert await pool.where("name") == "ssd" and (await pool.stats()).ssd_objects == 1
            assert [entry async for entry in pool.list()] == [Entry(b"name", 20 * MIB)]
            view: Any = await pool.get("name")
            assert bytes(view) == value(20 * MIB, 1)

    asyncio.run(use())
