"""Goal: each request is one trace, from its client to its last token, whatever happens to its workers; off, it is not
there at all.

Method: a gateway with scripted workers behind real sockets, and OpenTelemetry's in-memory exporter.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pyengine import config
from pyengine.config import ConfigError
from pyengine.gateway.tracing import Tracer
from pyengine.scheduler.messages import Handoff, PrefillReport, Work
from pyengine.scheduler.types import FinishReason, Role
from tests.gateway.cluster import ANSWER, Cluster, FakeWorker, cluster, failing, tokens

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
APART = (Role.PREFILL, Role.DECODE)


def told(worker: FakeWorker, identity: bytes, work: Work) -> None:
    """As whole_answer, with made-up times: they are far shorter than the request."""
    if work.part == "prefill":
        report = PrefillReport(request=work.request, attempt=work.attempt, cached=1, computed=2)
        report = msgspec.structs.replace(report, queued=1e-6, loading=2e-6, computing=3e-6)
        worker.send(identity, report, tokens(work, work.generated, 1))
    else:
        first = work.generated + 1
        rest = tokens(work, first, work.sampling.max_tokens - first, FinishReason.LENGTH)
        worker.send(identity, msgspec.structs.replace(rest, handoff=Handoff(1e-6, 2e-6, 3e-6, 4e-6)))


class Traces:
    """The spans of one gateway."""

    def __init__(self, at: Cluster) -> None:
        self.exporter = InMemorySpanExporter()
        at.service.tracer = Tracer(self.exporter, batch=False)

    def tree(self) -> dict[str, Any]:
        """Spans by their path from the root. Each lies within its parent, and they are one trace."""
        spans: list[Any] = list(self.exporter.get_finished_spans())
        by_id = {span.context.span_id: span for span in spans}

        def path(span: Any) -> str:
            if span.parent is None or span.parent.span_id not in by_id:
                return str(span.name)
            parent = by_id[span.parent.span_id]
            assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time, span.name
            return f"{path(parent)}/{span.name}"

        assert len({span.context.trace_id for span in spans}) == 1
        found = {path(span): span for span in spans}
        assert len(found) == len(spans)
        return found


async def ask(http: aiohttp.ClientSession, at: Cluster, **fields: object) -> tuple[int, str]:
    """Status and `traceresponse`."""
    async with http.post(f"{at.url}/v1/chat/completions", json=CHAT | fields, headers=PARENT) as response:
        body = await response.json()
        if response.status == 200:
            assert body["choices"][0]["message"]["content"] == ANSWER[:5]
        return response.status, response.headers.get("traceresponse", "")


async def test_one_request_is_one_trace_below_the_client_s(tmp_path: Path) -> None:
    async with cluster(tmp_path, *APART) as at, aiohttp.ClientSession() as http:
        traces = Traces(at)
        for worker in at.workers.values():
            worker.script = told
        status, given_on = await ask(http, at)
        assert status == 200
        tree = traces.tree()
    attempt = "chat/attempt 0"
    assert set(tree) == {
        "chat",
        "chat/tokenize",
        attempt,
        *(f"{attempt}/{name}" for name in ("schedule", "prefill", "transfer", "decode")),
        *(f"{attempt}/prefill/{name}" for name in ("queue", "load", "compute")),
        *(f"{attempt}/decode/{name}" for name in ("load", "first step")),
    }
    root = tree["chat"]
    assert f"{root.context.trace_id:032x}" == TRACE and f"{root.parent.span_id:016x}" == SPAN
    assert given_on == f"00-{TRACE}-{root.context.span_id:016x}-01"
    assert root.attributes["gen_ai.usage.output_tokens"] == 5
    assert root.attributes["pyengine.end"] == "length"
    assert tree[f"{attempt}/transfer"].attributes["pyengine.target"] == "decode-0"
    assert tree[f"{attempt}/prefill/compute"].attributes["pyengine.computed"] == 2
    lengths = {name: span.end_time - span.start_time for name, span in tree.items()}
    assert lengths[f"{attempt}/transfer"] == pytest.approx(2000, abs=2)
    assert lengths[f"{attempt}/decode/load"] == pytest.approx(3000, abs=2)
    assert tree[f"{attempt}/transfer"].end_time == tree[f"{attempt}/decode"].start_time
    assert lengths[f"{attempt}/decode/first step"] == pytest.approx(4000, abs=2)
    assert lengths[f"{attempt}/prefill/compute"] == pytest.approx(3000, abs=2)


async def test_a_retry_after_a_killed_worker_stays_in_the_trace(tmp_path: Path) -> None:
    async with cluster(tmp_path, Role.PREFILL, Role.DECODE, Role.DECODE) as at, aiohttp.ClientSession() as http:
        traces = Traces(at)

        def dies(worker: FakeWorker, identity: bytes, work: Work) -> None:
            worker.send(identity, tokens(work, 1, 2))
            worker._loop.call_later(0.05, at.kill, worker.name)

        at.workers["decode-0"].script = dies
        at.workers["decode-1"].script = at.workers["prefill-0"].script = told
        status, _ = await ask(http, at)
        assert status == 200
        tree = traces.tree()
    first, second = tree["chat/attempt 0"], tree["chat/attempt 1"]
    assert "decode-0" in (first.status.description or "") and not first.status.is_ok
    assert second.status.description is None
    assert first.end_time <= second.start_time
    assert "chat/attempt 1/decode" in tree and tree["chat/attempt 1/decode"].attributes["pyengine.worker"] == "decode-1"
    assert tree["chat"].status.description is None


async def test_choices_and_failures_are_told(tmp_path: Path) -> None:
    async with cluster(tmp_path, *APART) as at, aiohttp.ClientSession() as http:
        traces = Traces(at)
        assert (await ask(http, at, n=2))[0] == 200
        spans: list[Any] = list(traces.exporter.get_finished_spans())
        assert sorted(span.attributes["pyengine.choice"] for span in spans if span.name == "attempt 0") == [0, 1]
        traces.exporter.clear()
        at.workers["prefill-0"].script = failing("bug")
        assert (await ask(http, at))[0] == 500
        tree = traces.tree()
        assert "scripted bug" in (tree["chat"].status.description or "")
        assert "chat/attempt 0/decode" not in tree
        traces.exporter.clear()
        assert (await ask(http, at, max_tokens=0))[0] == 400  # refused before anything began


async def test_a_client_that_does_not_sample_is_heeded(tmp_path: Path) -> None:
    async with cluster(tmp_path, *APART) as at, aiohttp.ClientSession() as http:
        traces = Traces(at)
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
        async with http.post(f"{at.url}/v1/chat/completions", json=CHAT, headers=headers) as response:
            assert response.status == 200
            assert response.headers["traceresponse"].startswith(f"00-{TRACE}-")
        assert traces.exporter.get_finished_spans() == ()
        for odd in ("", "00-zz", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 10_000):
            async with http.post(f"{at.url}/v1/chat/completions", json=CHAT, headers={"traceparent": odd}) as response:
                assert response.status == 200
        assert len({span.context.trace_id for span in traces.exporter.get_finished_spans() if span.name == "chat"}) == 4


async def test_nothing_is_told_of_traces_that_nobody_makes(tmp_path: Path) -> None:
    async with cluster(tmp_path, *APART) as at, aiohttp.ClientSession() as http:
        assert at.service.tracer is None
        assert await ask(http, at) == (200, "")


def test_what_is_off_is_not_imported() -> None:
    """FastAPI imports OpenTelemetry's API by itself; what makes and sends spans is ours to leave out."""
    code = "import sys, pyengine.gateway.server; print([name for name in sys.modules if 'opentelemetry' in name])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "opentelemetry.sdk" not in loaded and "opentelemetry.exporter" not in loaded


def test_a_collector_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config.check_traces("")
    config.check_traces("http://127.0.0.1:4318")
    for wrong in ("127.0.0.1:4318", "grpc://x", "http://", "http://a b"):
        with pytest.raises(ConfigError, match="as http://127"):
            config.check_traces(wrong)
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="extra `otel`"):
        config.check_traces("http://127.0.0.1:4318")
