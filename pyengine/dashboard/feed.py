"""Looks at a gateway for all pages that are open. Nobody looks, nothing is asked."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from pyengine.dashboard import drawing
from pyengine.dashboard.view import Facts, Observer
from pyengine.gateway.request import RequestError
from pyengine.gateway.service import Service
from pyengine.scheduler.messages import ClusterState, HotPrefix

#: Seconds between looks, and between questions to the conductor.
EVERY = 1.0
HOT_EVERY = 5.0
#: Seconds that a look waits for the conductor's answer; it is shown with the next one otherwise.
HOT_PATIENCE = 0.5
#: Counters that are read each second, on average: 20,000 hold up the gateway's loop for 40 ms.
COUNTERS_A_SECOND = 20_000
#: Hot prefixes and requests shown.
MOST_HOT = 10
MOST_REQUESTS = 40


class Look(NamedTuple):
    """sections: as `drawing.sections` makes them."""

    models: tuple[str, ...]
    sections: dict[str, str]


class Feed:
    """One for all pages of a gateway."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._observer = Observer()
        self._look: Look | None = None
        self._at = self._asked = float("-inf")
        self._hot: tuple[HotPrefix, ...] = ()
        self._asking: asyncio.Future[None] | None = None
        self._seen: ClusterState | None = None
        self._told = 0.0

    async def look(self) -> Look:
        """The state of things, at most EVERY seconds old (more where there is much to read), drawn once for all."""
        now = time.monotonic()
        state = self._service.cluster
        pause = max(EVERY, len(state.counters) / COUNTERS_A_SECOND)
        # A page's own clock is not exact.
        if self._look is not None and now - self._at < 0.9 * pause:
            return self._look
        self._at = now
        if now - self._asked >= HOT_EVERY and self._service.conductor_up:
            self._asked = now
            self._asking = asyncio.ensure_future(self._ask())
            # A conductor that hangs holds up no page: who opens one is shown the rest.
            await asyncio.wait((self._asking,), timeout=HOT_PATIENCE)
        if state is not self._seen:
            self._seen, self._told = state, now
        facts = self._facts(now)
        requests = self._service.recent.latest(MOST_REQUESTS)
        samples = {**state.counters, **self._service.counters()}
        wall = time.time()
        view = self._observer.view(state.workers, samples, self._told, facts, self._hot, requests, wall)
        self._look = Look(view.models, drawing.sections(view, wall))
        return self._look

    async def _ask(self) -> None:
        try:
            self._hot = await self._service.hottest(MOST_HOT)
        except RequestError:
            self._hot = ()

    def _facts(self, now: float) -> Facts:
        service = self._service
        models = [service.metrics.of(name) for name in service.models]
        finished: dict[str, int] = {}
        for model in models:
            for reason, count in model.finished.items():
                finished[reason] = finished.get(reason, 0) + count
        return Facts(
            at=now,
            conductor_up=service.conductor_up,
            servable={name: service.servable(name) for name in service.models},
            under_way=service.recent.under_way,
            prompt_tokens=sum(model.prompt_tokens for model in models),
            generated_tokens=sum(model.generated_tokens for model in models),
            finished=finished,
            promised=service.recent.promised,
            kept=service.recent.kept,
        )
