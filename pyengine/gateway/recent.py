"""The latest requests of this gateway: how each went, for whoever looks. No text of a prompt or an answer is in it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from pyengine.gateway import timing

if TYPE_CHECKING:
    from pyengine.gateway.answers import Usage
    from pyengine.gateway.request import Request

#: Requests remembered, of some 2 kB each.
KEPT = 200


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. id: as the conductor knows it. prefill, decode: the workers it went to last, "" if there was no plan.

    parts: seconds by part (timing.py). total: until its end, or until now. tbt: mean of the longest tenth of the gaps
    between its tokens, NaN if there were none. lost: attempts that were not the last: when (seconds after the arrival),
    and why.
    ttft_kept, tbt_kept: whether what was promised was kept; None: nothing was, or nobody knows yet.
    """

    id: int
    end: str
    tokens: int
    prefill: str = ""
    decode: str = ""
    parts: dict[str, float] = {}
    handoff: dict[str, float] = {}
    total: float = 0.0
    tbt: float = math.nan
    lost: tuple[tuple[float, str], ...] = ()
    ttft_kept: bool | None = None
    tbt_kept: bool | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request. number: as it is in `X-Request-Id`. when: seconds since 1970. end: "" while it is under way.

    prompt, cached, completion: tokens; tiers: of the cached ones, where they were found.
    """

    number: str
    when: float
    model: str
    tenant: str
    end: str
    prompt: int
    cached: int
    completion: int
    tiers: dict[str, int]
    choices: tuple[Choice, ...]

    @property
    def retries(self) -> int:
        return sum(len(choice.lost) for choice in self.choices)


def choice_of(request: Request, end: str, now: float) -> Choice:
    """now: seconds, monotonic."""
    parts = timing.parts(request)
    slo, tbt = request.terms.slo, request.tbt
    handoff = request.handoff
    return Choice(
        id=request.id,
        end=end,
        tokens=len(request.tokens),
        prefill=request.went[0],
        decode=request.went[1],
        parts=parts,
        handoff={} if handoff is None else {name: getattr(handoff, name) for name in handoff.__struct_fields__},
        total=max(now - request.arrived, 0.0),
        tbt=tbt,
        lost=tuple((max(at - request.arrived, 0.0), why) for _, at, why in request.lost),
        ttft_kept=None if slo.ttft is None or math.isnan(request.given) else parts["ttft"] <= slo.ttft,
        tbt_kept=None if slo.tbt is None or math.isnan(tbt) else tbt <= slo.tbt,
    )


def record_of(
    number: str, requests: Sequence[tuple[Request, str]], usage: Usage, end: str, now: float, wall: float
) -> Record:
    """requests: each with how it ended, at least one. now: seconds, monotonic; wall: the same moment since 1970."""
    choices = tuple(choice_of(request, each, now) for request, each in requests)
    first = requests[0][0]
    return Record(
        number=number,
        when=wall - max(now - first.arrived, 0.0),
        model=first.model,
        tenant=first.terms.tenant,
        end=end,
        prompt=usage.prompt,
        cached=usage.cached,
        completion=usage.completion,
        tiers=dict(usage.tiers),
        choices=choices,
    )


#: How one stands: of seconds, monotonic, and the same moment since 1970.
Tell: TypeAlias = "Callable[[float, float], Record]"


class Recent:
    """Those under way, and the last KEPT that have ended."""

    def __init__(self, kept: int = KEPT) -> None:
        #: By a number of our own: nothing keeps clients from giving two requests one name.
        self._open: dict[int, tuple[str, Tell]] = {}
        self._begun = 0
        self._ended: deque[Record] = deque(maxlen=kept)
        #: Answers that ended, of them those that were promised something, and of these those that got it.
        self.answers = self.promised = self.kept = 0

    def begin(self, number: str, tell: Tell) -> int:
        """number: what clients call it. Returns what `end` wants."""
        self._begun += 1
        self._open[self._begun] = (number, tell)
        return self._begun

    def end(self, begun: int) -> None:
        """It is over; how it went is asked once more. Idempotent."""
        found = self._open.pop(begun, None)
        if found is None:
            return
        record = found[1](time.monotonic(), time.time())
        self._ended.append(record)
        for choice in record.choices:
            verdicts = [kept for kept in (choice.ttft_kept, choice.tbt_kept) if kept is not None]
            self.answers += 1
            self.promised += bool(verdicts)
            self.kept += bool(verdicts) and all(verdicts)

    @property
    def under_way(self) -> int:
        return len(self._open)

    def ended(self) -> Iterator[Record]:
        """The latest first."""
        return reversed(self._ended)

    def latest(self, most: int) -> list[Record]:
        """Those under way, then those that have ended, the latest first in either."""
        now, wall = time.monotonic(), time.time()
        records = [tell(now, wall) for _, tell in list(reversed(self._open.values()))[:most]]
        for record in self.ended():
            if len(records) >= most:
                break
            records.append(record)
        return records

    def find(self, number: str) -> Record | None:
        """The latest of this name."""
        for known, tell in reversed(self._open.values()):
            if known == number:
                return tell(time.monotonic(), time.time())
        return next((record for record in self.ended() if record.number == number), None)
