"""Goal: a client that goes away leaves nothing behind, whatever its request was about to do.
Method: a real HTTP server over a scripted cluster (cluster.py); each phase is a script that holds the request in it and
says when it is there. Then the connection ends, and the books of all sides are read: each attempt that was asked for
has been ended at the conductor, each work that was sent is aborted at its worker, and the gateway holds nothing.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import pytest

from pyengine.gateway import threads
from pyengine.gateway.auth import Door
from pyengine.scheduler.messages import PrefillReport, Route, Work
from pyengine.scheduler.types import Rejection
from pyengine.text import _ByteTokenizer
from tests.gateway.cluster import Cluster, FakeWorker, cluster, failing, silent, tokens, whole_answer
from tests.gateway.test_auth import add, bearer, door_of
from tests.gateway.test_gateway import APART, PATIENCE, folder

__all__ = ["folder"]

#: Tokens that each answer would have.
LENGTH = 50


def head(body: bytes, key: str) -> bytes:
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {key}",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


async def until(true: Callable[[], bool]) -> None:
    """Turn by turn of the loop, each of which takes what has come."""
    async with asyncio.timeout(PATIENCE):
        while not true():
            await asyncio.sleep(0.001)


class Stage:
    """One cluster, and what its sides have on their books. choices: that the request has."""

    def __init__(self, at: Cluster, door: Door, choices: int, patch: pytest.MonkeyPatch) -> None:
        self.at = at
        self.door = door
        self.choices = choices
        self.patch = patch
        #: (worker, request, attempt) that a worker has ended itself; (request, attempt) that the conductor has refused.
        self.over: set[tuple[str, int, int]] = set()
        self.refused: set[tuple[int, int]] = set()
        #: Called when the client has gone.
        self.after: Callable[[], None] = lambda: None
        self.prefill, self.decode = at.workers["prefill-0"], at.workers["decode-0"]

    @property
    def held(self) -> list[int]:
        """Tokens of each choice that the gateway holds."""
        return sorted(len(asker.request.tokens) for asker in self.at.service._generations.values())

    @property
    def at_conductor(self) -> set[tuple[int, int]]:
        """Attempts that count as load: an answer to come, or workers' work."""
        ended = {(one.request, one.attempt) for one in self.at.conductor.ended}
        return {(route.request, route.attempt) for route in self.at.conductor.routes} - ended - self.refused

    @property
    def at_workers(self) -> set[tuple[str, int, int]]:
        """Work that nobody has ended, and the KV that is held for it."""
        workers = (self.prefill, self.decode)
        given = {(worker.name, one.request, one.attempt) for worker in workers for one in worker.work}
        return (
            given - self.over - {(worker.name, one.request, one.attempt) for worker in workers for one in worker.aborts}
        )


def first_token(worker: FakeWorker, identity: bytes, work: Work) -> None:
    """A prefill worker's part; it holds the KV until the decode worker has it."""
    report = PrefillReport(request=work.request, attempt=work.attempt, cached=0, computed=len(work.token_ids) // 4)
    worker.send(identity, report, tokens(work, work.generated, 1))


# -- phases: each brings about that a request stays in it, and returns what is true once it is there -------------------

Phase: TypeAlias = Callable[[Stage], Callable[[], bool]]


def sending(stage: Stage) -> Callable[[], bool]:
    return lambda: len(stage.door._visits) == 1


def tokenizing(stage: Stage) -> Callable[[], bool]:
    """On a thread, which nobody can stop: what it is for must not begin behind it."""
    here, go = threading.Event(), threading.Event()

    def slow(tokenizer: Any, text: str, **more: Any) -> list[int]:
        here.set()
        assert go.wait(PATIENCE)
        return list(text.encode())

    stage.patch.setattr(threads, "SHORT", 0)
    stage.patch.setattr(_ByteTokenizer, "encode", slow)
    stage.after = go.set
    return here.is_set


def compiling(stage: Stage) -> Callable[[], bool]:
    here = asyncio.Event()

    async def follow(*_: Any) -> None:
        here.set()
        await asyncio.Event().wait()

    stage.patch.setattr(stage.at.service, "follow", follow)
    return here.is_set


def routing(stage: Stage) -> Callable[[], bool]:
    """The conductor has the question, and says nothing yet."""
    stage.patch.setattr(stage.at.conductor, "send", lambda *_: None)
    return lambda: len(stage.at_conductor) == stage.choices


def backing_off(stage: Stage) -> Callable[[], bool]:
    """The prefill worker has failed all, and nobody else is there."""

    def fails(worker: FakeWorker, identity: bytes, work: Work) -> None:
        stage.over.add((worker.name, work.request, work.attempt))
        failing("retry")(worker, identity, work)

    def reject(route: Route) -> Rejection | None:
        if not route.attempt:
            return None
        stage.refused.add((route.request, route.attempt))
        return Rejection(request=route.request, attempt=route.attempt, reason="nobody is left", retry_after=1.0)

    stage.prefill.script, stage.decode.script = fails, silent
    stage.at.conductor.reject = reject
    return lambda: len({request for request, _ in stage.refused}) == stage.choices


def queued(stage: Stage) -> Callable[[], bool]:
    stage.prefill.script = stage.decode.script = silent
    return lambda: len(stage.at_workers) == 2 * stage.choices


def handing_off(stage: Stage) -> Callable[[], bool]:
    """The first token is here, its KV on the way to the decode worker."""
    stage.prefill.script, stage.decode.script = first_token, silent
    return lambda: stage.held == [1] * stage.choices


def decoding(stage: Stage) -> Callable[[], bool]:
    stage.prefill.script = first_token
    stage.decode.script = lambda worker, identity, work: worker.send(identity, tokens(work, 1, 2))
    return lambda: stage.held == [3] * stage.choices


def ending(stage: Stage) -> Callable[[], bool]:
    """The first of the choices is complete, the others wait for their second tokens."""
    first: list[int] = []

    def one_of_them(worker: FakeWorker, identity: bytes, work: Work) -> None:
        first.append(work.request)
        if work.request == first[0]:
            stage.over |= {(worker.name, work.request, 0), ("prefill-0", work.request, 0)}
            whole_answer(worker, identity, work)

    stage.prefill.script, stage.decode.script = first_token, one_of_them
    return lambda: stage.held == [*[1] * (stage.choices - 1), LENGTH]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("phase", "choices"),
    [
        (sending, 1),
        (tokenizing, 1),
        (compiling, 1),
        *((phase, choices) for phase in (routing, backing_off, queued, handing_off, decoding) for choices in (1, 3)),
        (ending, 3),
    ],
)
async def test_nothing_is_left_of_who_goes_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch, phase: Phase, choices: int, stream: bool
) -> None:
    key, door = add(folder, "a", concurrent=choices), door_of(folder)
    fields: dict[str, Any] = {"model": "fake", "prompt": "What?", "n": choices, "stream": stream, "max_tokens": LENGTH}
    if phase is compiling:
        fields["structured_outputs"] = {"regex": "a+"}
    body = json.dumps(fields).encode()
    async with cluster(folder, *APART, door=door, patience=PATIENCE) as at:
        stage = Stage(at, door, choices, monkeypatch)
        there = phase(stage)
        before = asyncio.all_tasks()
        _, writer = await asyncio.open_connection("127.0.0.1", int(at.url.rpartition(":")[2]))
        writer.write(head(body, key) + (body[:9] if phase is sending else body))
        await until(there)
        if choices > 1:
            # As a client that has died, not one that has closed: its system answers with a reset.
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()
        await until(lambda: not door._visits)
        stage.after()
        assert not at.service._generations
        assert door.limiter.under_way() == {}
        assert at.service.recent.under_way == 0
        await until(lambda: not stage.at_conductor and not stage.at_workers)
        await until(lambda: asyncio.all_tasks() <= before and not at.service.threads._pieces)
        # The next one is served, and the only one that is.
        monkeypatch.undo()
        at.conductor.reject = lambda route: None
        stage.prefill.script = stage.decode.script = whole_answer
        routes = len(at.conductor.routes)
        async with aiohttp.ClientSession() as http:
            url, plain = f"{at.url}/v1/completions", {"model": "fake", "prompt": "x", "max_tokens": 3}
            async with http.post(url, json=plain, headers=bearer(key)) as response:
                assert response.status == 200
        assert len(at.conductor.routes) == routes + 1
        for worker in (stage.prefill, stage.decode):
            told = Counter((one.request, one.attempt) for one in worker.aborts)
            assert max(told.values(), default=1) == 1, "an attempt was ended twice"
