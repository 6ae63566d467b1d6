"""Goal: what a tenant gets is what its limits say, whatever it does and however they change.
Method: a naive model that keeps the whole history, in fractions; times are sums of powers of two, so both are exact.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.ledger import SharedLedger
from pyengine.limiter import Limiter, OwnLedger
from pyengine.tenants import Tenant


class Naive:
    """A bucket as its definition has it: the least of what is left over any stretch of the past, and never over
    full."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken: list[tuple[Fraction, int]] = []

    def level(self, now: Fraction) -> Fraction:
        levels = [Fraction(self.limit)]
        for at, (since, _) in enumerate(self.taken):
            spent = sum(amount for _, amount in self.taken[at:])
            levels.append(self.limit + (now - since) * self.limit / 60 - spent)
        return min(levels)

    def wait(self, amount: int, now: Fraction) -> Fraction | None:
        if amount > self.limit:
            return None
        return max(Fraction(0), (amount - self.level(now)) * 60 / self.limit)


#: (seconds since the one before, in 1/16; what is done; how many tokens)
EVENTS = st.lists(
    st.tuples(
        st.integers(0, 1600), st.sampled_from(["begin", "more", "prompt", "generated", "end"]), st.integers(0, 60)
    ),
    max_size=40,
)
LIMITS = st.integers(0, 40)


@contextmanager
def limiters(gateways: int) -> Iterator[list[Limiter]]:
    """Of so many gateways, which have one tenant's limits together."""
    with tempfile.TemporaryDirectory() as folder:
        shared = [SharedLedger(Path(folder), gateways, index) for index in range(gateways)]
        try:
            yield [Limiter(ledger) for ledger in shared]
        finally:
            for ledger in shared:
                ledger.close()


@pytest.mark.parametrize("gateways", [1, 3])
@given(events=EVENTS, requests=LIMITS, tokens=LIMITS, concurrent=st.integers(0, 4))
@settings(max_examples=200, deadline=None)
def test_the_limiter_is_the_naive_one(
    gateways: int, events: list[Any], requests: int, tokens: int, concurrent: int
) -> None:
    if gateways == 1:
        _compare([Limiter()], events, requests, tokens, concurrent)
        return
    with limiters(gateways) as several:
        _compare(several, events, requests, tokens, concurrent)


def _compare(limiters: list[Limiter], events: list[Any], requests: int, tokens: int, concurrent: int) -> None:
    """Events go to the limiters in turns, but for the end of a request, which is where it began."""
    tenant = Tenant(name="a", requests_per_minute=requests, tokens_per_minute=tokens, concurrent=concurrent)
    now = Fraction(0)
    #: Answers of each request under way, and where it is.
    running: list[int] = []
    places: list[Limiter] = []
    buckets = {"requests_per_minute": Naive(requests), "tokens_per_minute": Naive(tokens)}
    for turn, (pause, what, amount) in enumerate(events):
        limiter = limiters[turn % len(limiters)]
        now += Fraction(pause, 16)
        if what == "generated":
            limiter.generated(tenant, amount, float(now))
            buckets["tokens_per_minute"].taken.append((now, amount))
            continue
        if what == "end":
            if running:
                at = amount % len(running)
                places.pop(at).end(tenant, running.pop(at))
            continue
        if what == "more":
            if running:
                at = amount % len(running)
                refusal, extra = places[at].more(tenant, amount // 10), amount // 10
                never = bool(concurrent) and 1 + extra > concurrent
                if never or (concurrent and extra and sum(running) + extra > concurrent):
                    assert refusal is not None and (refusal.limit, refusal.wait is None) == ("concurrent", never)
                else:
                    assert refusal is None
                    running[at] += extra
            continue
        name, many = ("requests_per_minute", 1) if what == "begin" else ("tokens_per_minute", amount)
        refusal = limiter.prompt(tenant, many, float(now)) if what == "prompt" else limiter.begin(tenant, float(now))
        if what == "begin" and concurrent and sum(running) >= concurrent:
            assert refusal is not None and refusal.limit == "concurrent"
            continue
        wait = buckets[name].wait(many, now) if getattr(tenant, name) else Fraction(0)
        if wait == 0:
            assert refusal is None
            buckets[name].taken.append((now, many))
            running += [1] if what == "begin" else []
            places += [limiter] if what == "begin" else []
        else:
            assert refusal is not None and refusal.limit == name
            assert (refusal.wait is None) == (wait is None)
            assert wait is None or abs(refusal.wait - wait) < 1e-9  # type: ignore[operator]
        assert sum(each.under_way().get("a", 0) for each in limiters) == sum(running)


def test_after_the_wait_that_was_told_it_is_admitted() -> None:
    tenant = Tenant(name="a", requests_per_minute=3, tokens_per_minute=60)
    limiter = Limiter()
    assert [limiter.begin(tenant, 0.0) for _ in range(3)] == [None] * 3
    refusal = limiter.begin(tenant, 0.0)
    assert refusal is not None and refusal.wait == 20.0
    assert limiter.begin(tenant, 19.875) is not None
    assert limiter.begin(tenant, 20.0) is None
    assert limiter.prompt(tenant, 50, 0.0) is None
    limiter.generated(tenant, 40, 1.0)
    refusal = limiter.prompt(tenant, 20, 1.0)
    assert refusal is not None and refusal.wait == 49.0
    assert limiter.prompt(tenant, 20, 50.0) is None


def test_tenants_do_not_share_and_who_left_is_forgotten() -> None:
    one, other = Tenant(name="a", concurrent=1), Tenant(name="b", concurrent=1)
    ledger = OwnLedger()
    limiter = Limiter(ledger)
    assert limiter.begin(one, 0.0) is None
    assert limiter.begin(other, 0.0) is None
    assert limiter.begin(one, 0.0) is not None
    limiter.end(other)
    limiter.keep(set())
    # Who still has requests under way is not forgotten before they have ended.
    assert limiter.under_way() == {"a": 1}
    limiter.end(one)
    limiter.keep(set())
    assert ledger._tenants == {}


def test_a_limit_that_changes_counts_from_now_on() -> None:
    limiter = Limiter()
    assert limiter.begin(Tenant(name="a", requests_per_minute=1), 0.0) is None
    assert limiter.begin(Tenant(name="a", requests_per_minute=1), 0.0) is not None
    assert limiter.begin(Tenant(name="a", requests_per_minute=2), 0.0) is None
    assert limiter.begin(Tenant(name="a"), 0.0) is None


def test_what_ends_is_counted_though_no_file_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = Tenant(name="a", concurrent=2, tokens_per_minute=60)
    first, second = SharedLedger(tmp_path, 2, 0), SharedLedger(tmp_path, 2, 1)
    assert [Limiter(first).begin(tenant, 0.0) for _ in range(2)] == [None, None]

    def opened(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        Limiter(first).generated(tenant, 50, 0.0)
        Limiter(first).end(tenant, 2)
        with pytest.raises(OSError, match="too many"):
            Limiter(first).begin(tenant, 0.0)
    assert first.own() == {}
    assert [Limiter(second).begin(tenant, 0.0) for _ in range(2)] == [None, None]
    refusal = Limiter(second).prompt(tenant, 20, 0.0)
    assert refusal is not None and refusal.limit == "tokens_per_minute"
    second.close()
    assert not [link for link in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(link)]


DIES = """
import os, signal, sys
from pathlib import Path
from pyengine.ledger import SharedLedger
from pyengine.limiter import Limiter
from pyengine.tenants import Tenant
ledger = SharedLedger(Path(sys.argv[1]), 2, 1)
tenant = Tenant(name="a", concurrent=5, requests_per_minute=9)
assert [Limiter(ledger).begin(tenant, 1.0) for _ in range(3)] == [None] * 3
with ledger.usage("a") as usage:
    usage.own = 77
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_gateway_that_is_killed_gives_back_what_it_had_under_way(tmp_path: Path) -> None:
    """Killed while it holds the lock: nobody waits for it, what it had not written is not there, its rates stay used,
    and its next life takes its answers back.
    """
    tenant = Tenant(name="a", concurrent=5, requests_per_minute=9)
    survivor = Limiter(SharedLedger(tmp_path, 2, 0))
    assert survivor.begin(tenant, 0.0) is None
    killed = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], env=dict(os.environ), check=False)
    assert killed.returncode == -signal.SIGKILL
    assert survivor.begin(tenant, 1.0) is None
    refusal = survivor.begin(tenant, 1.0)
    assert refusal is not None and refusal.limit == "concurrent" and refusal.text.startswith("5 answers")
    again = Limiter(SharedLedger(tmp_path, 2, 1))
    assert again.under_way() == {} and survivor.under_way() == {"a": 2}
    assert [again.begin(tenant, 1.0) for _ in range(3)] == [None] * 3
    survivor.end(tenant, 2)
    refusal = survivor.begin(tenant, 1.0)
    assert refusal is None
    refusal = again.begin(tenant, 1.0)
    assert refusal is not None and refusal.limit == "requests_per_minute"


def test_files_of_another_number_of_gateways_count_anew(tmp_path: Path) -> None:
    """A launcher that was killed left them; who is asked for them now has more, or fewer, siblings."""
    tenant = Tenant(name="alice", concurrent=2)
    for gateways in (3, 2, 4):
        limiter = Limiter(SharedLedger(tmp_path, gateways, 0))
        assert limiter.begin(tenant, 1.0) is None and limiter.begin(tenant, 1.0) is None
        assert limiter.begin(tenant, 1.0) is not None
