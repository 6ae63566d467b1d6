"""How much each tenant may ask for: requests and tokens a minute, and answers at once. Pure: time is an argument.

Both rates are token buckets [1]: a bucket holds at most a minute's worth, refills steadily, and what is asked for is
taken out. So a tenant who was silent may send its minute's worth at once, and in any span of t seconds at most
(1 + t / 60) minutes' worth is admitted. Tokens of a prompt are taken when it is admitted; those of the answer when they
have been made, however many they are: a bucket may owe, and nothing is admitted before it has paid.

All numbers are kept in units of 1/60: a bucket of N a minute holds 60 N and gains N a second. With whole limits and
times that are sums of powers of two the arithmetic is exact, which the tests use.

[1] J. Turner, New directions in communications (or which way to the information age?), IEEE Communications Magazine
24(10), 1986.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from pyengine.tenants import Tenant

#: Retry-After of who has too many answers under way, seconds: nobody knows when one ends.
SOON = 1.0


class Refusal(msgspec.Struct, frozen=True):
    """limit: name of the limit, a field of Tenant. wait: seconds after which it would be admitted; None: never."""

    limit: str
    text: str
    wait: float | None


class Bucket:
    """One rate. missing: units that are not there; `at`: seconds, when that was so. Full at first."""

    def __init__(self, missing: float = 0.0, at: float = 0.0) -> None:
        self.missing = missing
        self.at = at

    def wait(self, amount: int, limit: int, now: float) -> float | None:
        """Seconds until `amount` is there, of `limit` a minute; None: never, as the bucket holds less."""
        if amount > limit:
            return None
        self._refill(limit, now)
        return max(0.0, (self.missing - 60.0 * (limit - amount)) / limit)

    def take(self, amount: int, limit: int, now: float) -> None:
        """Takes it, there or not."""
        self._refill(limit, now)
        self.missing += 60.0 * amount

    def _refill(self, limit: int, now: float) -> None:
        # A clock that is told out of order takes nothing back.
        if now > self.at:
            self.missing = max(0.0, self.missing - limit * (now - self.at))
            self.at = now


class Usage:
    """Of one tenant. own: answers under way at this gateway: of a request that has been read, one for each sequence;
    before, one. others: at other gateways that share the tenant's limits.
    """

    def __init__(self) -> None:
        self.own = 0
        self.others = 0
        self.requests = Bucket()
        self.tokens = Bucket()

    @property
    def under_way(self) -> int:
        return self.own + self.others


class Ledger(Protocol):
    """Where usage is kept."""

    def usage(self, tenant: str) -> AbstractContextManager[Usage]:
        """A tenant's, to be looked at and changed inside; nobody else does meanwhile. Full buckets at first."""
        ...

    def own(self) -> dict[str, int]:
        """Answers of each tenant that has any under way here."""
        ...

    def keep(self, names: set[str]) -> None:
        """May forget who is not among them and has nothing under way."""
        ...


class OwnLedger:
    """Of a gateway that is alone."""

    def __init__(self) -> None:
        self._tenants: dict[str, Usage] = {}

    @contextlib.contextmanager
    def usage(self, tenant: str) -> Iterator[Usage]:
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = Usage()
        yield known

    def own(self) -> dict[str, int]:
        return {name: usage.own for name, usage in self._tenants.items() if usage.own}

    def keep(self, names: set[str]) -> None:
        for name in [name for name, usage in self._tenants.items() if name not in names and not usage.own]:
            del self._tenants[name]


class Limiter:
    """All tenants of one address. `now` in seconds, never less than before.

    Limits come with each call, so they may change at any time; a tenant's usage stays.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger or OwnLedger()

    def begin(self, tenant: Tenant, now: float) -> Refusal | None:
        """One more request: one answer is counted if it is admitted, which is `end`ed once then. Else why not."""
        with self._ledger.usage(tenant.name) as usage:
            if (refusal := _too_many(usage, tenant.concurrent, 1)) is not None:
                return refusal
            if limit := tenant.requests_per_minute:
                wait = usage.requests.wait(1, limit, now)
                if wait != 0.0:
                    text = f"this tenant has sent its {limit} requests a minute"
                    return Refusal("requests_per_minute", text, wait)
                usage.requests.take(1, limit, now)
            usage.own += 1
            return None

    def more(self, tenant: Tenant, answers: int) -> Refusal | None:
        """A request that has begun is found to want so many answers beside its first: they are counted if they are
        admitted, and `end`ed with it. Else why not.
        """
        limit = tenant.concurrent
        if limit and answers + 1 > limit:
            text = f"the request wants {answers + 1} answers, and this tenant gets {limit} at once: ask for fewer"
            return Refusal("concurrent", text, None)
        if not answers:
            return None
        with self._ledger.usage(tenant.name) as usage:
            if (refusal := _too_many(usage, limit, answers)) is None:
                usage.own += answers
            return refusal

    def prompt(self, tenant: Tenant, tokens: int, now: float) -> Refusal | None:
        """The prompt of a request that has begun: its tokens are taken if it is admitted."""
        limit = tenant.tokens_per_minute
        if not limit:
            return None
        with self._ledger.usage(tenant.name) as usage:
            bucket = usage.tokens
            wait = bucket.wait(tokens, limit, now)
            if wait is None:
                text = f"the prompt has {tokens} tokens, and this tenant gets {limit} a minute: it must be shorter"
                return Refusal("tokens_per_minute", text, None)
            if wait > 0.0:
                text = f"this tenant has used its {limit} tokens a minute; the prompt has {tokens}"
                return Refusal("tokens_per_minute", text, wait)
            bucket.take(tokens, limit, now)
            return None

    def generated(self, tenant: Tenant, tokens: int, now: float) -> None:
        """Tokens of an answer, once they are there."""
        if tenant.tokens_per_minute:
            with self._ledger.usage(tenant.name) as usage:
                usage.tokens.take(tokens, tenant.tokens_per_minute, now)

    def end(self, tenant: Tenant, answers: int = 1) -> None:
        """A request that was admitted is over. answers: all that were counted for it."""
        with self._ledger.usage(tenant.name) as usage:
            assert usage.own >= answers, f"{tenant.name}: {answers} ended of {usage.own} that have begun"
            usage.own -= answers

    def under_way(self) -> dict[str, int]:
        """Answers of each tenant that has any under way here."""
        return self._ledger.own()

    def keep(self, names: set[str]) -> None:
        """May forget who is not among them and has nothing under way."""
        self._ledger.keep(names)


def _too_many(usage: Usage, limit: int, answers: int) -> Refusal | None:
    if not limit or usage.under_way + answers <= limit:
        return None
    text = f"{usage.under_way} answers of this tenant are under way, of {limit}"
    return Refusal("concurrent", text, SOON)
