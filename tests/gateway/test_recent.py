"""Goal: a gateway remembers how its latest requests went, without their text, and asks the conductor what it knows.
Method: a real gateway between a scripted conductor and workers (cluster.py); the ring against a plain list.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from pyengine.gateway import service as gateway_service
from pyengine.gateway.recent import Choice, Recent, Record
from pyengine.gateway.request import RequestError
from pyengine.scheduler.explanation import Explanation
from pyengine.scheduler.messages import Explain, Explained, FindHot, HotPrefix, HotPrefixes, Work
from pyengine.scheduler.types import FinishReason, Role

from .cluster import ANSWER, Cluster, FakeConductor, FakeWorker, cluster, failing, silent, tokens

PATIENCE = 60.0
SECRET = "the prompt of somebody"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pyg") as name:
        yield Path(name)


def body(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": SECRET}]
    return {"model": "fake", "messages": messages, "temperature": 0, "max_tokens": 5, **more}


async def post(at: Cluster, number: str, **more: Any) -> int:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{at.url}/v1/chat/completions", json=body(**more), headers={"X-Request-Id": number}) as response,
    ):
        await response.read()
        status: int = response.status
        return status


def one_by_one(worker: FakeWorker, identity: bytes, work: Work) -> None:
    """A decode worker whose tokens do not come together."""
    last = work.sampling.max_tokens

    def send(index: int) -> None:
        worker.send(identity, tokens(work, index, 1, FinishReason.LENGTH if index + 1 == last else None))
        if index + 1 < last:
            asyncio.get_running_loop().call_later(0.002, send, index + 1)

    send(1)


async def until(met: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not met():
            await asyncio.sleep(0.005)


async def test_what_has_ended_is_told_with_its_parts_and_without_its_text(folder: Path) -> None:
    async with cluster(folder, Role.PREFILL, Role.DECODE, slo_tbt=1e-9) as at:
        at.workers["decode-0"].script = one_by_one
        assert await post(at, "one", n=2) == 200
        record = at.service.recent.find("one")
        assert record is not None and at.service.recent.under_way == 0
        assert (record.number, record.model, record.end, record.completion) == ("one", "fake", "length", 10)
        assert record.tiers == {"ssd": record.cached} and record.cached and record.prompt > record.cached
        assert [(choice.prefill, choice.decode) for choice in record.choices] == [("prefill-0", "decode-0")] * 2
        assert [choice.id for choice in record.choices] == [route.request for route in at.conductor.routes]
        for choice in record.choices:
            parts = choice.parts
            told = sum(parts[name] for name in ("tokenize", "schedule", "queue", "load", "prefill", "return", "held"))
            assert parts["ttft"] == pytest.approx(told) and choice.total >= parts["ttft"]
            assert (choice.ttft_kept, choice.tbt_kept) == (True, False), "7 s are kept, a nanosecond is not"
        assert (at.service.recent.answers, at.service.recent.promised, at.service.recent.kept) == (2, 2, 0)
        text = msgspec.json.encode(record).decode()
        assert SECRET not in text and ANSWER[:5] not in text


async def test_what_is_under_way_is_told_and_ends_once(folder: Path) -> None:
    async with cluster(folder, Role.BOTH) as at:
        worker = at.workers["both-0"]
        worker.script = silent
        asking = asyncio.create_task(post(at, "long"))
        await until(lambda: worker.work)
        record = at.service.recent.find("long")
        assert record is not None and record.end == "" and at.service.recent.under_way == 1
        assert math.isnan(record.choices[0].tbt) and record.choices[0].parts == {}
        asking.cancel()
        await until(lambda: not at.service.recent.under_way)
        record = at.service.recent.find("long")
        assert record is not None and record.end == "gone"
        assert [each.number for each in at.service.recent.latest(10)] == ["long"]


async def test_attempts_that_were_lost_are_told(folder: Path) -> None:
    async with cluster(folder, Role.BOTH, Role.BOTH) as at:
        at.workers["both-0"].script = failing("retry")
        assert await post(at, "again") == 200
        record = at.service.recent.find("again")
        assert record is not None and record.retries == 1
        ((seconds, why),) = record.choices[0].lost
        assert seconds >= 0.0 and "scripted retry" in why and record.choices[0].prefill == "both-1"


async def test_the_conductor_is_asked_and_its_silence_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explanation = Explanation(
        gateway="g", request=7, attempt=0, at=1.0, policy="p", prompt_tokens=9, blocks=1, best=0, why="so"
    )
    hot = HotPrefix(key=bytes(16), blocks=3, heat=2.5, ago=0.5, nodes=("node-0",))

    def answering(conductor: FakeConductor, identity: bytes, message: Any) -> None:
        if isinstance(message, Explain):
            found = explanation if message.request == 7 else None
            conductor.send(identity, Explained(number=message.number, explanation=found))
        elif isinstance(message, FindHot):
            conductor.send(identity, HotPrefixes(number=message.number, prefixes=(hot,) * message.most))
        else:
            FakeConductor.on(conductor, identity, message)

    async with cluster(folder, Role.BOTH) as at:
        monkeypatch.setattr(at.conductor, "on", partial(answering, at.conductor))
        both = await asyncio.gather(at.service.explain(7), at.service.hottest(2), at.service.explain(8))
        assert tuple(both) == (explanation, (hot, hot), None)
        monkeypatch.undo()
        monkeypatch.setattr(gateway_service, "ANSWER_PATIENCE", 0.05)
        with pytest.raises(RequestError, match="not answered"):
            await at.service.explain(7)
        at.conductor.close()
        await until(lambda: not at.service.conductor_up)
        with pytest.raises(RequestError, match="away"):
            await at.service.hottest(1)


def test_only_the_last_are_kept() -> None:
    recent = Recent(kept=3)
    begun = [recent.begin(str(number), partial(told, str(number))) for number in range(6)]
    for number in (0, 2, 4, 5, 2):
        recent.end(begun[number])
    assert [record.number for record in recent.latest(10)] == ["3", "1", "5", "4", "2"]
    assert [record.number for record in recent.latest(3)] == ["3", "1", "5"]
    assert recent.find("0") is None and recent.answers == 4


def told(number: str, now: float, wall: float) -> Record:
    choices = (Choice(id=int(number), end="stop", tokens=1),)
    return Record(
        number=number,
        when=wall,
        model="m",
        tenant="",
        end="stop",
        prompt=1,
        cached=0,
        completion=1,
        tiers={},
        choices=choices,
    )
