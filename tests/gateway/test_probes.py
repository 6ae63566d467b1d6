"""Goal: health checks say who is at fault, and never that all is well while an engine hangs.

Method: a gateway with scripted workers; one that says nothing still sends heartbeats, as a hung one does. Real
processes that are stopped or stuck are met in tests/system/test_health.py.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from pyengine.gateway import probes
from pyengine.gateway.service import Model
from pyengine.grammar import Grammars
from pyengine.scheduler.messages import ClusterState, PrefillReport, Work
from pyengine.scheduler.types import Node, Rejection, Role, WorkerInfo
from tests.gateway.cluster import NAMESPACE, Cluster, FakeWorker, cluster, failing, silent, tokens

APART = (Role.PREFILL, Role.DECODE)
UP = {f'pyengine_worker_up{{worker="{name}"}}': 1.0 for name in ("prefill-0", "decode-0")}


async def look(http: aiohttp.ClientSession, at: Cluster, path: str) -> tuple[int, dict[str, Any]]:
    async with http.get(f"{at.url}{path}") as response:
        return response.status, await response.json()


async def failing_at(http: aiohttp.ClientSession, at: Cluster, path: str = "/health?deep=1&within=0.5") -> str:
    """What is at fault, by its name and text; the status says the same."""
    status, body = await look(http, at, path)
    assert (status, body["status"]) == ((503, "unavailable") if body["failing"] else (200, "ok"))
    assert body["failing"] == [f"{one['check']}: {one['detail']}" for one in body["checks"] if not one["ok"]]
    return "; ".join(body["failing"])


def counted(at: Cluster, counters: dict[str, float]) -> None:
    """As the conductor tells it from now on."""

    def announce() -> None:
        state = ClusterState(workers=tuple(worker.info for worker in at.conductor.workers), counters=counters)
        for identity in at.conductor.peers:
            at.conductor.send(identity, state)

    at.conductor.announce = announce  # type: ignore[method-assign]
    at.service.cluster = msgspec.structs.replace(at.service.cluster, counters=counters)


async def test_all_is_well(tmp_path: Path) -> None:
    async with cluster(tmp_path, Role.PREFILL, Role.DECODE, Role.DECODE) as at, aiohttp.ClientSession() as http:
        counted(at, UP)
        for path in ("/livez", "/readyz", "/health", "/health?deep=0", "/health?deep=1"):
            status, body = await look(http, at, path)
            assert (status, body["status"]) == (200, "ok"), path
        tried = [check["check"] for check in body["checks"] if check["check"].startswith("path ")]
        assert tried == ["path prefill-0 -> decode-0", "path prefill-0 -> decode-1"]
        # A probe goes where it is to go, before everybody, with nothing to keep.
        assert [len(worker.work) for worker in at.workers.values()] == [2, 1, 1]
        (work,) = at.workers["decode-1"].work
        assert work.keys == b"" and work.priority > 0 and work.sampling.max_tokens == 2
        # And nobody counts it.
        async with http.get(f"{at.url}/metrics") as response:
            text = await response.text()
        assert "vllm:generation_tokens_total" not in text or 'vllm:generation_tokens_total{model_name="fake"} 0' in text
        assert at.service.active == 0


async def test_who_says_nothing_is_named(tmp_path: Path) -> None:
    """Its heartbeats come all the time."""

    def first_only(worker: FakeWorker, identity: bytes, work: Work) -> None:
        report = PrefillReport(request=work.request, attempt=work.attempt, cached=0, computed=2)
        worker.send(identity, report, tokens(work, 0, 1))

    async with cluster(tmp_path, *APART) as at, aiohttp.ClientSession() as http:
        at.workers["prefill-0"].script = silent
        assert "no first token of prefill-0 (node-0) within 0.5 s" in await failing_at(http, at)
        assert (await look(http, at, "/readyz"))[0] == 200  # it is there; whether it works is another question
        await asyncio.wait_for(at.workers["prefill-0"].aborted.wait(), 5)  # nothing is left behind
        at.workers["prefill-0"].script = first_only
        at.workers["decode-0"].script = silent
        assert "no second token of decode-0" in await failing_at(http, at, "/health?deep=1&within=0.6")
        # Behind others it is only late.
        counted(at, {'vllm:num_requests_waiting{model_name="fake",worker="decode-0"}': 7.0})
        assert await failing_at(http, at, "/health?deep=1&within=0.7") == ""


@pytest.mark.parametrize("kind", ["retry", "bug", "too_large", "wrong_role"])
async def test_who_fails_is_named_and_not_asked_again(tmp_path: Path, kind: str) -> None:
    async with cluster(tmp_path, *APART) as at, aiohttp.ClientSession() as http:
        at.workers["prefill-0"].script = failing(kind)
        assert f"scripted {kind}" in await failing_at(http, at, "/health?deep=1&within=5")
        assert len(at.workers["prefill-0"].work) == 1


async def test_what_the_conductor_knows_is_told(tmp_path: Path) -> None:
    ill = {
        'pyengine_worker_up{worker="decode-0"}': 0.0,
        'pyengine_worker_up{worker="prefill-0"}': 1.0,
        'pyengine_worker_stalled_seconds{worker="prefill-0"}': 31.5,
        'pyengine_node_up{node="node-1"}': 0.0,
        'pyengine_tier_trouble{node="node-0",tier="ssd"}': 1.0,
        'pyengine_tier_trouble{node="node-2",tier="ssd"}': 0.0,
    }
    names = {check.check: check for check in probes.parts(ill, 10.0)}
    assert {name for name, check in names.items() if not check.ok} == {
        "worker decode-0", "worker prefill-0", "node node-1", "node node-0"
    }  # fmt: skip
    assert "31.5 s" in names["worker prefill-0"].detail
    later = {
        check.check: check.ok for check in probes.parts({**ill, 'pyengine_worker_up{worker="decode-0"}': 1.0}, 60.0)
    }
    assert later["worker decode-0"] and later["worker prefill-0"]
    async with cluster(tmp_path, *APART) as at, aiohttp.ClientSession() as http:
        counted(at, ill)
        told = await failing_at(http, at)
        assert all(name in told for name in ("decode-0", "prefill-0", "node-0", "node-1")) and "node-2" not in told


async def test_nobody_is_ready_without_a_conductor_and_both_parts(tmp_path: Path) -> None:
    async with cluster(tmp_path, *APART) as at, aiohttp.ClientSession() as http:
        at.kill("decode-0")
        while at.service.servable("fake"):
            await asyncio.sleep(0.005)
        assert await failing_at(http, at, "/readyz") == "model fake: no worker for decode"
        at.conductor.close()
        while at.service.conductor_up:
            await asyncio.sleep(0.005)
        assert "conductor: does not answer" in await failing_at(http, at, "/readyz")
        assert "conductor: does not answer" in await failing_at(http, at)
        assert await failing_at(http, at, "/livez") == ""


async def test_who_is_refused_for_load_is_not_ill(tmp_path: Path) -> None:
    async with cluster(tmp_path, *APART) as at, aiohttp.ClientSession() as http:
        at.conductor.reject = lambda route: Rejection(
            request=route.request, attempt=route.attempt, reason="full", retry_after=1.0, kind="slo_ttft"
        )
        status, body = await look(http, at, "/health?deep=1")
        assert status == 200 and "not tried" in body["checks"][-1]["detail"]


async def test_many_who_ask_are_one_probe(tmp_path: Path) -> None:
    async with cluster(tmp_path, *APART) as at, aiohttp.ClientSession() as http:
        answers = await asyncio.gather(*(look(http, at, "/health?deep=1") for _ in range(20)))
        assert {status for status, _ in answers} == {200}
        assert len(at.workers["prefill-0"].work) == 1


async def test_many_who_ask_differently_are_one_probe_at_a_time(tmp_path: Path) -> None:
    async with cluster(tmp_path, *APART) as at, aiohttp.ClientSession() as http:
        paths = [f"/health?deep=1&within={1 + i / 1000}" for i in range(20)]
        worker = at.workers["prefill-0"]
        worker.script = silent
        asking = [asyncio.create_task(look(http, at, path)) for path in paths]
        answers = await asyncio.gather(*asking)
        assert {status for status, _ in answers} == {503}
        assert len(worker.work) == 1
        # One that has ended answers for its own time only.
        await look(http, at, paths[-1])
        await look(http, at, paths[-2])
        assert len(worker.work) >= 2


async def test_pages_of_others_start_no_probe(tmp_path: Path) -> None:
    """An image whose address is here: browsers send no Origin with it."""
    async with cluster(tmp_path, *APART) as at, aiohttp.ClientSession() as http:
        for site, expected in (("cross-site", 403), ("same-origin", 200), ("none", 200)):
            async with http.get(f"{at.url}/health?deep=1", headers={"Sec-Fetch-Site": site}) as response:
                assert response.status == expected
        assert len(at.workers["prefill-0"].work) == 1


async def test_the_loop_of_the_gateway(tmp_path: Path) -> None:
    async with cluster(tmp_path, *APART) as at, aiohttp.ClientSession() as http:
        assert at.service._ticker is not None
        at.service._ticker.cancel()
        assert "its clock has stopped" in await failing_at(http, at, "/livez")


@pytest.mark.parametrize("within", ["", "x", "nan", "0", "-1", "1e9", "inf"])
async def test_a_time_that_is_none_is_refused(tmp_path: Path, within: str) -> None:
    async with cluster(tmp_path, *APART) as at, aiohttp.ClientSession() as http:
        status, body = await look(http, at, f"/health?deep=1&within={within}")
        assert status == 400 and body["error"]["param"] == "within" and "0.5 to 120" in body["error"]["message"]


def test_each_worker_is_on_a_path() -> None:
    def workers(**counts: int) -> tuple[WorkerInfo, ...]:
        roles = [Role(name) for name, count in counts.items() for _ in range(count)]
        return tuple(
            msgspec.structs.replace(SOME, worker=f"{role.value}-{at}", role=role) for at, role in enumerate(roles)
        )

    for shape in ({"prefill": 3, "decode": 1}, {"prefill": 1, "decode": 4}, {"both": 3}, {"both": 2, "prefill": 2},
                  {"prefill": 1, "decode": 1, "both": 1}):  # fmt: skip
        some = workers(**shape)
        made = probes.paths({"fake": MODEL}, some)
        assert {one.worker for path in made for one in (path.prefill, path.decode)} == {one.worker for one in some}
        assert all(path.prefill.role.prefills and path.decode.role.decodes for path in made)
        assert len(made) <= len(some)
    assert probes.paths({"fake": MODEL}, workers(prefill=2)) == []  # `ready` says why


MODEL = Model("fake", "bytes", NAMESPACE.digest(), 16, 258, 1024, 1024)
SOME = WorkerInfo(
    worker="", incarnation=1, role=Role.BOTH, node=Node("node-0", "127.0.0.1:1", 1), work="", model="fake",
    tokenizer="bytes", namespace=NAMESPACE, vocab_size=258, max_positions=1024, pages=64, pool_slots=64,
    max_tokens_per_step=512, max_sequences=32,
)  # fmt: skip


async def test_nobody_is_ready_before_the_vocabulary_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first grammar would stop the loop for as long as that takes: it is done before anybody is sent here."""
    reading, go_on = threading.Event(), threading.Event()
    load = Grammars.load

    def slow(grammars: Grammars) -> None:
        reading.set()
        go_on.wait(60)
        load(grammars)

    async with cluster(tmp_path, Role.BOTH) as at, aiohttp.ClientSession() as http:
        monkeypatch.setattr(Grammars, "load", slow)
        # As if it were another model: its vocabulary has not been read.
        at.service._grammars.clear()
        at.service._reading.clear()
        at.conductor.announce()
        await asyncio.to_thread(reading.wait, 60)
        assert await failing_at(http, at, "/readyz") == "model fake: its vocabulary is being read"
        assert (await look(http, at, "/health"))[0] == 503
        go_on.set()
        while not at.service.is_read("fake"):
            await asyncio.sleep(0)
        assert (await look(http, at, "/readyz"))[0] == 200
        assert at.service._grammars["bytes"]._vocabulary is not None
