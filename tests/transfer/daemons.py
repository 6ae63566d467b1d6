"""The real `transferd` in processes of its own, and clients that know what every block must hold: for the tests that
kill one and wear out the other."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import TypeVar

from pyengine._native import (
    Counters,
    Disconnected,
    Fetched,
    Flushed,
    Granted,
    Located,
    NodeAddress,
    PoolClient,
    PoolEvent,
    Refused,
    RetryError,
    Slot,
    Tag,
    derive_key,
)

SECRET = bytes(range(32))
KEY = derive_key(SECRET, "session")
HEAD = bytes(16)
#: Generous: an event that takes longer never comes.
PATIENCE = 120.0
#: Blocks of one prefix.
LENGTH = 4

Event = TypeVar("Event", bound=PoolEvent)


class Gone(Exception):
    """The daemon is: expected when it was killed."""


class Transferd:
    """One life of a daemon."""

    def __init__(self, place: Path, node: str, dram: int, *flags: str, ssd: int = 0) -> None:
        self.node, self.place = node, place
        self.socket = str(place / f"{node}.run" / "d.sock")
        self.ssd = place / f"{node}.ssd" if ssd else None
        secret = place / "secret"
        if not secret.exists():
            secret.touch(0o600)
            secret.write_text(SECRET.hex())
        disk = ("--ssd-dir", str(self.ssd), "--ssd-bytes", str(ssd)) if self.ssd else ()
        if self.ssd:
            self.ssd.mkdir(0o700, exist_ok=True)
        # Not a pipe, which would be full some time. Appended to, because the daemon has the same position in it.
        self._log = (place / f"{node}.log").open("a+b")
        ready, ready_in = os.pipe()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pyengine._transferd", "--node", node, "--dram-bytes", str(dram)),
                *("--socket", self.socket, "--secret-file", str(secret), *disk, *flags),
                *("--ready-fd", str(ready_in), "--die-with-parent"),
            ],
            pass_fds=[ready_in],
            stderr=self._log,
        )
        os.close(ready_in)
        with os.fdopen(ready) as pipe:
            readable, _, _ = select.select([pipe], [], [], PATIENCE)
            line = pipe.readline() if readable else ""
        if not line:
            self.process.kill()
            raise AssertionError(f"{node} does not start: {self.log()}")
        told = json.loads(line)
        self.address = NodeAddress(node, told["address"], told["incarnation"])

    def log(self) -> str:
        """What it has said."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def ended(self) -> int:
        """Waits for its end; its exit status."""
        return self.process.wait(PATIENCE)

    def stop(self) -> None:
        """SIGTERM, after which it must end well."""
        self.process.send_signal(signal.SIGTERM)
        assert self.ended() == 0, self.log()

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`transferd WORDS` of whoever runs it."""
        secret = str(self.place / "secret")
        way = ["--socket", self.socket, "--secret-file", secret]
        return subprocess.run(
            [sys.executable, "-m", "pyengine._transferd", *words, *way],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def disk_bytes(self) -> int:
        """What its files take; those that vanish meanwhile take nothing."""
        total = 0
        for file in self.ssd.rglob("*") if self.ssd else ():
            try:
                total += 0 if file.is_dir() else file.stat().st_size
            except FileNotFoundError:
                continue
        return total


class Shape:
    """How blocks are cut, and what each must hold: its bytes follow from its number."""

    def __init__(self, strips: int, strip_bytes: int) -> None:
        self.strips, self.strip_bytes = strips, strip_bytes
        self.bytes = strips * strip_bytes

    def key(self, number: int) -> bytes:
        return hashlib.shake_128(b"key %d" % number).digest(16)

    def keys(self, prefix: int, count: int = LENGTH) -> bytes:
        return b"".join(self.key(prefix * LENGTH + i) for i in range(count))

    def content(self, number: int) -> bytes:
        return hashlib.shake_128(b"block %d" % number).digest(self.bytes)


class Client:
    """A worker that takes prefixes, as workers do, and verifies every byte that it is given."""

    def __init__(self, daemon: Transferd, shape: Shape, incarnation: int, seed: str) -> None:
        self.daemon, self.shape, self.incarnation = daemon, shape, incarnation
        self.random = Random(seed)
        self.seen: Counter[str] = Counter()
        self._events: list[PoolEvent] = []
        self._request = 0
        self._connect()

    def _connect(self) -> None:
        shape = self.shape
        until = time.monotonic() + PATIENCE
        while True:
            try:
                self.pool = PoolClient.connect(
                    self.daemon.socket, KEY, self.incarnation, shape.strips, shape.strip_bytes, timeout=1.0
                )
                return
            except RetryError as error:
                # A daemon that is dead answers nobody, however long one waits.
                if self.daemon.process.poll() is not None or time.monotonic() > until:
                    raise Gone(str(error)) from error

    def come_back(self) -> None:
        """Dies with all that it holds, and is another one then."""
        self.pool.close()
        self._events.clear()
        self.incarnation += 1
        self._connect()

    def tag(self) -> Tag:
        self._request += 1
        return Tag(self._request, 0, self.incarnation)

    def expect(self, *kinds: type[Event], tag: Tag | None = None) -> Event:
        """The first event of these kinds, and for this tag. Others wait."""
        until = time.monotonic() + PATIENCE
        while True:
            for event in self._events:
                if isinstance(event, Disconnected):
                    raise Gone(event.reason)
                if isinstance(event, kinds) and tag in (None, getattr(event, "tag", None)):
                    self._events.remove(event)
                    return event
            assert time.monotonic() < until, f"no {kinds}; waiting: {self._events}"
            self.pool.wait(0.5)
            self._events += self.pool.events()

    def verify(self, slot: Slot, number: int) -> None:
        into = bytearray(self.shape.bytes)
        good = self.pool.load(slot.slot, slot.generation, into)
        assert good, f"block {number} does not fit its checksums, or its slot was given away, while it was held"
        assert into == self.shape.content(number), f"block {number} has another one's bytes"
        self.seen["verified"] += 1

    def take(
        self,
        prefix: int,
        *,
        sources: Sequence[NodeAddress] = (),
        compute: bool = True,
        die_after: str | None = None,
        durable: bool = False,
    ) -> set[int]:
        """A prefix is granted, verified or fetched, or else computed and published, and let go. Returns the numbers of
        the blocks that are there; with `durable`, of those that are durable. die_after: "grant", "store" or "commit".
        """
        first, tag = prefix * LENGTH, self.tag()
        self.seen["grants"] += 1
        self.pool.grant(tag, self.shape.keys(prefix), False, HEAD, 0, "wait")
        granted = self.expect(Granted, Refused, tag=tag)
        assert isinstance(granted, Granted), granted
        slots = dict(enumerate(granted.slots))
        there = {i for i, slot in slots.items() if slot.committed}
        self.seen["dram"] += len(there)
        for i in there:
            self.verify(slots[i], first + i)
        wanted = sorted(slots.keys() - there)
        if die_after == "grant":
            self.come_back()
            return set()
        if wanted:
            self.pool.fetch(tag, wanted, sources)
        for _ in wanted:
            fetched = self.expect(Fetched, tag=tag)
            if fetched.slot is None:
                self.seen[f"refused: {fetched.refusal}"] += 1
                continue
            self.seen[fetched.origin or ""] += 1
            there.add(fetched.index)
            self.verify(fetched.slot, first + fetched.index)
        computed = sorted(slots.keys() - there) if compute else []
        for i in computed:
            self.pool.store(slots[i].slot, slots[i].generation, self.shape.content(first + i))
        if die_after == "store":
            self.come_back()
            return set()
        if computed:
            self.seen["computed"] += len(computed)
            self.pool.commit(tag, computed)
            there.update(computed)
        if die_after == "commit":
            self.come_back()
            return set()
        # They are held: nobody can evict them meanwhile.
        if durable and not self.flush():
            there = set()
        self.pool.end(tag)
        return {first + i for i in there}

    def flush(self) -> bool:
        self.seen["flushes"] += 1
        self.pool.flush()
        return self.expect(Flushed).ok

    def find(self, prefix: int) -> int:
        """How many leading blocks are in DRAM, all verified."""
        tag = self.tag()
        self.seen["lookups"] += 1
        self.pool.lookup(tag, self.shape.keys(prefix))
        located = self.expect(Located, Refused, tag=tag)
        slots = located.slots if isinstance(located, Located) else []
        for i, slot in enumerate(slots):
            self.verify(slot, prefix * LENGTH + i)
        self.pool.end(tag)
        return len(slots)

    def hint(self, prefix: int, sources: Sequence[NodeAddress] = ()) -> None:
        self.seen["hints"] += 1
        self.pool.prefetch(self.shape.keys(prefix), HEAD, 0, sources)

    def abort(self, prefix: int, sources: Sequence[NodeAddress] = ()) -> None:
        """Asks for a prefix, and lets go of it while that is under way."""
        tag = self.tag()
        self.seen["aborts"] += 1
        self.pool.grant(tag, self.shape.keys(prefix), False, HEAD, 0, "wait")
        if self.random.random() < 0.7:
            granted = self.expect(Granted, Refused, tag=tag)
            if isinstance(granted, Granted):
                self.pool.fetch(tag, [i for i, slot in enumerate(granted.slots) if not slot.committed], sources)
        self.pool.end(tag)
        # What was on its way to this tag is of no interest any more.
        self._events = [event for event in self._events if getattr(event, "tag", None) != tag]

    def something(self, prefixes: Iterable[int], sources: Sequence[NodeAddress] = ()) -> None:
        """One of all that clients do, by chance."""
        prefix = self.random.choice(list(prefixes))
        chance = self.random.random()
        try:
            if chance < 0.60:
                self.take(prefix, sources=sources)
            elif chance < 0.75:
                self.find(prefix)
            elif chance < 0.85:
                self.hint(prefix, sources)
            elif chance < 0.95:
                self.abort(prefix, sources)
            else:
                self.seen["deaths"] += 1
                self.take(prefix, sources=sources, die_after=self.random.choice(["grant", "store", "commit"]))
        except RetryError as error:
            raise Gone(str(error)) from error

    def counters(self) -> dict[str, int]:
        self.pool.request_counters()
        return self.expect(Counters).values

    def counter(self, name: str, *labels: str) -> int:
        """The sum over all samples of this name with these labels."""
        samples = self.counters().items()
        return sum(
            value for key, value in samples if key.startswith(name + "{") and all(label in key for label in labels)
        )
