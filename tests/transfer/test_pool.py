"""Goal: `Pool` does what its docstrings say, in the daemon's process and through its socket, and says clearly what it
cannot do. Method: pools of this process and of others beside a dict; every wait is for an event."""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyengine import AsyncPool, Pool
from pyengine._native import BugError, GiveUpError, RetryError
from pyengine.pool import Entry, View

MIB = 1 << 20
#: Generous: an event that takes longer never comes.
PATIENCE = 60.0


@pytest.fixture
def socket(tmp_path: Path) -> str:
    return str(tmp_path / "node.sock")


@pytest.fixture
def home(socket: str) -> Iterator[Pool]:
    with Pool.open(dram="32MiB", socket=socket) as pool:
        yield pool


@pytest.fixture(params=["inside", "socket"])
def pool(home: Pool, socket: str, request: pytest.FixtureRequest) -> Iterator[Pool]:
    """The same pool by both roads."""
    if request.param == "inside":
        yield home
    else:
        with Pool.connect(socket) as far:
            yield far


def found(view: View | None) -> Any:
    """The view. (numpy's stubs know no buffers but those they name.)"""
    assert view is not None
    return view


def address(buffer: Any) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


# -- what it does --------------------------------------------------------------------------------------------------


def test_put_get_exists_remove(pool: Pool) -> None:
    assert pool.get("name") is None and pool.get_into("name", bytearray(9)) is None
    assert not pool.exists("name") and not pool.remove("name")
    assert pool.put("name", b"value")
    assert not pool.put("name", b"other"), "it is immutable until it is removed"
    assert pool.exists("name") and pool.exists(b"name"), "text is UTF-8"
    with found(pool.get("name")) as view:
        assert (len(view), bytes(view), view.pinned, view.verify()) == (5, b"value", True, True)
    buffer = bytearray(9)
    assert pool.get_into("name", buffer) == 5 and buffer == b"value\0\0\0\0"
    assert list(pool.list()) == [Entry(b"name", 5)]
    assert pool.remove("name") and not pool.remove("name") and not pool.exists("name")
    assert pool.put("name", b"anew") and bytes(found(pool.get("name"))) == b"anew"


def test_batches_are_lists_in_the_order_of_their_keys(pool: Pool) -> None:
    keys = [f"key {number}" for number in range(100)]
    values = [bytes([number]) * number * 100 for number in range(100)]
    assert pool.batch_put(keys[::2], values[::2]) == [True] * 50
    assert pool.batch_put(keys, values) == [False, True] * 50
    assert [bytes(found(view)) for view in pool.batch_get(keys)] == values
    assert pool.batch_remove(keys[:10]) == [True] * 10
    assert pool.batch_exists(keys) == [False] * 10 + [True] * 90
    assert [view is None for view in pool.batch_get(keys)] == [True] * 10 + [False] * 90
    buffers = [bytearray(10_000) for _ in keys]
    lengths = pool.batch_get_into(keys, buffers)
    assert lengths == [None] * 10 + [len(value) for value in values[10:]]
    assert all(buffer.startswith(value) for buffer, value in zip(buffers[10:], values[10:], strict=True))
    assert not any((pool.batch_put([], []), pool.batch_get([]), pool.batch_exists([]), pool.batch_remove([])))
    assert pool.batch_put(["twice", "twice"], [b"first", b"second"]) == [True, False]


def test_values_of_every_kind_and_size(pool: Pool) -> None:
    array = np.arange(1000, dtype=np.float64).reshape(10, 100)
    tensor = torch.arange(5000, dtype=torch.float32)
    values = {"bytearray": bytearray(b"abc"), "memoryview": memoryview(b"abcd")[1:], "array": array, "tensor": tensor}
    for name, value in values.items():
        assert pool.put(name, value)
    assert bytes(found(pool.get("memoryview"))) == b"bcd"
    assert (np.frombuffer(found(pool.get("array"))).reshape(10, 100) == array).all()
    into = torch.zeros(5000)
    assert pool.get_into("tensor", into) == 20_000 and torch.equal(into, tensor)
    big = np.random.default_rng(0).integers(0, 256, 9 * MIB + 5, dtype=np.uint8)
    assert pool.put("big", big) and not pool.put("big", big)
    view = found(pool.get("big"))
    assert not view.pinned and view.verify() and (np.frombuffer(view, np.uint8) == big).all()
    copy = np.zeros(10 * MIB, np.uint8)
    assert pool.get_into("big", copy) == big.nbytes and (copy[: big.nbytes] == big).all()
    assert pool.put("empty", b"") and bytes(found(pool.get("empty"))) == b""
    sizes = {entry.key.decode(): entry.size for entry in pool.list()}
    assert sizes == {"bytearray": 3, "memoryview": 3, "array": 8000, "tensor": 20_000, "big": big.nbytes, "empty": 0}
    assert pool.stats().objects == 6
    assert pool.remove("big") and pool.stats().bytes < MIB


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_views_copy_nothing(pool: Pool) -> None:
    """Two views of an object lie at one address, and numpy's and torch's arrays over them too."""
    pool.put("name", np.arange(1000, dtype=np.float32))
    view = found(pool.get("name"))
    array = np.frombuffer(view, np.float32)
    tensor = torch.frombuffer(view, dtype=torch.float32)
    assert array.ctypes.data == tensor.data_ptr() == address(memoryview(view)) == address(found(pool.get("name")))
    assert array.ctypes.data % 4096 == 0, "values begin at a page"
    assert array.sum() == tensor.sum() == 499_500
    assert memoryview(view).readonly and not array.flags.writeable
    with pytest.raises(TypeError):
        memoryview(view)[0] = 1


def test_views_are_closed_once_nobody_looks(pool: Pool) -> None:
    pool.put("name", b"value")
    view = found(pool.get("name"))
    looker = memoryview(view)
    with pytest.raises(BufferError, match="let go of them first"):
        view.close()
    assert bytes(looker) == b"value" and not view.closed
    looker.release()
    view.close()
    view.close()
    assert view.closed and "closed" in repr(view)
    for use in (lambda: bytes(view), lambda: memoryview(view)):
        with pytest.raises(BufferError, match="closed"):
            use()
    for check in (lambda: len(view), view.verify, lambda: view.pinned):
        with pytest.raises(BugError, match="closed"):
            check()


def test_what_is_viewed_stays(pool: Pool) -> None:
    """Four views among puts of five times the pool; when they are gone their memory is used again."""
    values = {f"kept {number}": random.Random(number).randbytes(MIB) for number in range(4)}
    assert pool.batch_put(list(values), list(values.values())) == [True] * 4
    arrays = {name: np.frombuffer(found(pool.get(name)), np.uint8) for name in values}
    for number in range(160):
        assert pool.put(f"other {number}", bytes([number]) * MIB)
    assert all(array.tobytes() == values[name] for name, array in arrays.items())
    assert pool.batch_exists(list(values)) == [True] * 4 and not pool.exists("other 0")
    removed = arrays.pop("kept 0")
    assert pool.remove("kept 0") and removed.tobytes() == values["kept 0"], "removed, and read on"
    del removed, arrays
    gc.collect()
    for number in range(160):
        assert pool.put(f"yet another {number}", bytes([number]) * MIB)
    assert pool.batch_exists(list(values)) == [False] * 4


def test_views_outlive_the_pool(socket: str) -> None:
    home = Pool.open(dram="8MiB", socket=socket)
    far = Pool.connect(socket)
    far.put("name", b"value")
    views = [found(far.get("name")), found(home.get("name"))]
    arrays = [np.frombuffer(view, np.uint8) for view in views]
    far.close()
    assert home.remove("name")
    for number in range(20):
        assert home.put(f"{number}", b"other")
    assert [bytes(view) for view in views] == [b"value"] * 2
    home.close()
    home.close()
    assert [bytes(array) for array in arrays] == [b"value"] * 2
    for use in (lambda: home.put("x", b""), lambda: far.exists("x"), lambda: far.stats()):
        with pytest.raises(BugError, match="closed"):
            use()


def test_list_has_each_name_once(pool: Pool) -> None:
    names = {f"{kind}/{number}" for kind in "ab" for number in range(1500)}
    assert all(pool.batch_put(list(names), [b"x"] * len(names)))
    assert sorted(entry.key.decode() for entry in pool.list()) == sorted(names)
    assert sorted(entry.key for entry in pool.list("b/")) == sorted(name.encode() for name in names if name[0] == "b")
    assert len(list(pool.list(limit=7))) == 7 and len(list(pool.list("a/", limit=1200))) == 1200
    assert list(pool.list("c")) == list(pool.list("x" * 2000)) == list(pool.list(limit=0)) == []


# -- what it refuses -----------------------------------------------------------------------------------------------


def test_bad_input_says_what_to_do(pool: Pool) -> None:
    for key in ("", b"", "x" * 1025, "ä" * 513):
        with pytest.raises(BugError, match="1 to 1024"):
            pool.put(key, b"")
    for name in ("x" * 1024, "ä" * 512, b"\0", b"\xff\xfe", "\0"):
        assert pool.put(name, b"1") is (name != "\0") and pool.exists(name)
    with pytest.raises(BugError, match="str or bytes, not int"):
        pool.get(7)  # type: ignore[arg-type]
    with pytest.raises(UnicodeEncodeError):
        pool.get("\ud800")
    with pytest.raises(TypeError):
        pool.put("name", "text")
    with pytest.raises(BugError, match="not contiguous"):
        pool.put("name", np.zeros((4, 4))[:, 1])
    for copies in (-1, 1 << 40):
        with pytest.raises(BugError, match=f"{copies} copies"):
            pool.replicate(["a"], copies)
        with pytest.raises(BugError, match=f"{copies} copies"):
            pool.put("copied", b"value", copies=copies)
    with pytest.raises(BugError, match="2 keys and 1 values"):
        pool.batch_put(["a", "b"], [b""])
    assert not pool.exists("name") and not pool.exists("a")
    pool.put("name", b"value")
    with pytest.raises(BugError, match=r"5 bytes.*only 4"):
        pool.get_into("name", bytearray(4))
    with pytest.raises(BugError, match="read-only"):
        pool.get_into("name", b"     ")
    buffer = bytearray(10)
    with pytest.raises(BugError, match="share memory"):
        pool.batch_get_into(["name", "name"], [memoryview(buffer)[:6], memoryview(buffer)[5:]])
    with pytest.raises(GiveUpError, match="never fits"):
        pool.put("huge", np.zeros(33 * MIB, np.uint8))
    assert not pool.exists("huge")


def test_a_full_pool_says_so(pool: Pool) -> None:
    views = []
    with pytest.raises(RetryError, match="close views"):
        for number in range(100):
            pool.put(f"{number}", bytes(MIB))
            views.append(found(pool.get(f"{number}")))
    assert 20 < len(views) < 33
    # Those that fit are stored, the error is told, and the same call later stores the rest.
    views.pop().close()
    keys, values = [f"more {number}" for number in range(4)], [bytes([number]) * MIB for number in range(4)]
    with pytest.raises(RetryError):
        pool.batch_put([*keys, "large"], [*values, bytes(20 * MIB)])
    views.clear()
    assert any(pool.batch_exists(keys)) and not pool.exists("large")
    pool.batch_put([*keys, "large"], [*values, bytes(8 * MIB)])
    assert pool.exists("large") and len(found(pool.get("large"))) == 8 * MIB


def test_what_is_pinned_outlives_who_needs_room(home: Pool, pool: Pool) -> None:
    big = os.urandom(3 * MIB)
    assert pool.batch_put(["a", "big"], [b"x" * 1000, big]) == [True, True]
    assert pool.pin(["a", "none", "big"], 3600.0) == [True, False, True]
    assert home.pin(["a"], 3600.0, by="somebody else") == [True]
    for number in range(64):
        home.put(f"filler {number}", bytes(MIB))
    assert bytes(found(pool.get("big"))) == big and pool.exists("a")
    for number in range(14):
        home.put(f"more {number}", bytes(MIB))
    with pytest.raises(RetryError, match="at most half"):
        pool.pin([f"more {number}" for number in range(14)], 1.0)
    assert pool.unpin(["big", "a", "none"]) == [True, True, False]
    pool.unpin([f"more {number}" for number in range(14)])
    # It was used, so it is worth more than what comes once; but not for ever.
    again = itertools.count()
    while pool.exists("big"):
        home.put(f"again {next(again)}", bytes(MIB))
    assert next(again) < 2000 and pool.exists("a"), "somebody else pins that one"
    assert home.remove("a") and pool.unpin(["a"], by="somebody else") == [False]
    for ttl, by in ((0.0, None), (-1.0, None), (86401.0, None), (float("nan"), None), (1.0, "x" * 65)):
        with pytest.raises((GiveUpError, BugError)):
            pool.pin(["a"], ttl, by)


def test_a_daemon_that_cannot_be_reached(tmp_path: Path) -> None:
    with pytest.raises(RetryError, match="no daemon answers"):
        Pool.connect(tmp_path / "nowhere.sock", timeout=0.0)
    secret, other = tmp_path / "secret", tmp_path / "other"
    for path, digit in ((secret, "a"), (other, "b")):
        path.touch(0o600)
        path.write_text(digit * 64)
    with Pool.open("8MiB", socket=tmp_path / "s.sock", secret_file=secret) as home:
        home.put("name", b"value")
        for wrong in (None, other):
            with pytest.raises(GiveUpError, match="secret"):
                Pool.connect(tmp_path / "s.sock", secret_file=wrong)
        with Pool.connect(tmp_path / "s.sock", secret_file=secret) as far:
            assert bytes(found(far.get("name"))) == b"value", "names are one key by one secret"
    with pytest.raises(GiveUpError, match=r"dram|--dram-bytes|memory"):
        Pool.open(1 << 60)


def test_a_daemon_that_goes(socket: str) -> None:
    home = Pool.open("8MiB", socket=socket)
    far = Pool.connect(socket)
    far.put("name", b"value")
    view = found(far.get("name"))
    home.close()
    for use in (lambda: far.get("name"), lambda: far.put("other", b""), lambda: far.exists("name")):
        with pytest.raises(RetryError, match=r"gone.*connect again"):
            use()
    assert bytes(view) == b"value"
    with Pool.open("8MiB", socket=socket), Pool.connect(socket) as anew:
        assert not anew.exists("name") and anew.put("name", b"other")
        assert bytes(view) == b"value"
    far.close()


# -- who uses it ---------------------------------------------------------------------------------------------------


def test_threads(pool: Pool) -> None:
    failures: list[str] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(200):
            number = chance.randrange(30)
            value = bytes([number]) * (number * 50_000)
            match chance.randrange(4):
                case 0 | 1:
                    pool.put(f"{number}", value)
                case 2:
                    view = pool.get(f"{number}")
                    if view is not None and bytes(found(view)) != value:
                        failures.append(f"{number} is another's")
                case _:
                    pool.remove(f"{number}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_asyncio(home: Pool, socket: str) -> None:
    async def use() -> None:
        async with await AsyncPool.connect(socket) as pool:
            assert await pool.put("name", b"value") and not await pool.put("name", b"")
            keys = [f"{number}" for number in range(20)]
            assert all(await asyncio.gather(*(pool.put(key, key.encode()) for key in keys)))
            views = await asyncio.gather(*(pool.get(key) for key in keys))
            assert [bytes(found(view)) for view in views] == [key.encode() for key in keys]
            assert await pool.batch_put(["x"], [b"1"]) == [True] and await pool.batch_remove(["x"]) == [True]
            assert await pool.batch_exists(keys) == [True] * 20 and await pool.exists("x") is False
            assert [bytes(found(view)) for view in await pool.batch_get(["name"])] == [b"value"]
            buffer = bytearray(5)
            assert await pool.get_into("name", buffer) == 5 and buffer == b"value"
            assert await pool.batch_get_into(["nobody"], [buffer]) == [None]
            assert len([entry async for entry in pool.list()]) == 21 == (await pool.stats()).objects
            assert await pool.remove("name") and await pool.get("name") is None
        async with await AsyncPool.open("8MiB") as own:
            assert not await own.exists("0")

    asyncio.run(use())


_CHILD = """
import sys
from pyengine import Pool
pool = Pool.connect(sys.argv[1])
view = pool.get("kept")
print("ready", flush=True)
number = 0
while True:
    number += 1
    name = f"{number % 7}"
    pool.put(name, bytes([number % 256]) * (number % 5 * 700_000))
    pool.remove(name)
    if number < 20:
        print(number, flush=True)
"""


def test_another_process_and_its_death(home: Pool, socket: str) -> None:
    """A child is killed at whatever step of its puts; its views and half values are gone, and all room is to be had."""
    for lines in (1, 2, 5, 9, 14):
        home.put("kept", b"value")
        with subprocess.Popen([sys.executable, "-c", _CHILD, socket], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            for _ in range(lines):
                assert child.stdout.readline()
            child.send_signal(signal.SIGKILL)
        keys = [entry.key for entry in home.list()]
        home.batch_remove(keys)
        # Large values need all room there is: nothing may be held for the dead. The daemon hears of it in a moment.
        until = time.monotonic() + PATIENCE
        while True:
            try:
                assert home.put("all", np.ones(28 * MIB, np.uint8))
                break
            except RetryError:
                assert time.monotonic() < until, "room is held for the dead"
        assert home.remove("all")
        assert home.stats().objects == home.stats().bytes == 0


def _in_a_fork(pool: Pool, view: View, answers: Any) -> None:
    try:
        pool.exists("name")
    except BugError as error:
        answers.put(("refused", str(error), bytes(found(view))))
    view.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_refused_and_harms_nobody(pool: Pool) -> None:
    pool.put("name", b"value")
    view = found(pool.get("name"))
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_in_a_fork, args=(pool, view, answers))
    child.start()
    refused, why, value = answers.get()
    child.join()
    assert (refused, value, child.exitcode) == ("refused", b"value", 0) and "fork" in why
    assert pool.exists("name") and bytes(found(pool.get("name"))) == b"value", "the session is as it was"
    for number in range(70):
        pool.put(f"{number}", bytes(MIB))
    assert bytes(view) == b"value" and pool.exists("name")


def test_importing_it_loads_no_framework() -> None:
    code = "import pyengine, sys; pyengine.Pool; assert not {'torch', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})


def test_random_operations_beside_a_dict(pool: Pool) -> None:
    """One user: what is got is what was put last, or nothing, if it has made room."""
    chance = random.Random(11)
    there: dict[str, bytes] = {}
    views: list[tuple[View, bytes]] = []
    for _ in range(600):
        name = f"{chance.randrange(40)}"
        match chance.randrange(10):
            case 0 | 1 | 2 | 3:
                value = chance.randbytes(chance.choice([10, 5000, 100_000, MIB, 3 * MIB]))
                was = pool.exists(name)
                assert pool.put(name, value) is not was
                if not was:
                    there[name] = value
            case 4 | 5 | 6:
                view = pool.get(name)
                if view is None:
                    there.pop(name, None)
                else:
                    assert bytes(found(view)) == there[name]
                    views.append((view, there[name]))
            case 7:
                removed = pool.remove(name)
                assert not removed or name in there
                there.pop(name, None)
            case 8:
                names = {entry.key.decode(): entry.size for entry in pool.list()}
                assert all(len(there[name]) == size for name, size in names.items())
            case _:
                views = [kept for kept in views if chance.random() < 0.3]
        while sum(len(value) for _, value in views) > 8 * MIB:
            views.pop(0)
        assert all(bytes(found(view)) == value for view, value in views[-3:])
