"""Goal: everybody is told one time to the first token, with the same parts, whoever asks and however it went.
Method: one answer over scripted workers (cluster.py) that say how long their parts took; the header, the comment at the
stream's end, `/metrics`, the trace, the log, what the dashboard reads and what the conductor learns are compared.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pyengine.gateway.timing import FIRST_TOKEN_PARTS
from pyengine.gateway.tracing import Tracer
from pyengine.scheduler.messages import PrefillReport, Work
from pyengine.scheduler.types import FinishReason
from tests.gateway.cluster import FakeWorker, cluster, failing, tokens
from tests.gateway.test_gateway import APART, PATIENCE, folder, http

__all__ = ["folder", "http"]

#: Seconds of queue, load and prefill, as the worker tells them: less than any way there and back.
TOLD: Any = {"queued": 1e-5, "loading": 2e-5, "computing": 3e-5}


def parsed(header: str) -> dict[str, float]:
    """Seconds by part of a Server-Timing header."""
    return {name: float(ms) / 1000 for name, ms in (part.split(";dur=") for part in header.split(", "))}


def sums(text: str) -> dict[str, float]:
    """Sums of histograms in /metrics: by part of the first token, or by name."""
    found = {}
    for name, labels, value in re.findall(r"^(\S+)_sum\{(.*)\} (\S+)$", text, re.MULTILINE):
        part = re.search(r'part="(\w+)"', labels)
        if name == "pyengine_first_token_seconds" and part is not None:
            found[part[1]] = float(value)
        elif part is None:
            found[name] = float(value)
    return found


@pytest.mark.parametrize("how", ["at once", "held", "retried"])
async def test_all_are_told_one_figure(
    folder: Path, http: aiohttp.ClientSession, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """held: both objectives are promised, so the first token waits for the second. retried: the first attempt is lost
    before it has one."""
    caplog.set_level(logging.INFO, "pyengine.gateway")
    held = asyncio.Event()
    promised: dict[str, Any] = {"slo_tbt": 1.0} if how == "held" else {}

    def prefills(worker: FakeWorker, identity: bytes, work: Work) -> None:
        if how == "retried" and work.attempt == 0:
            failing("retry")(worker, identity, work)
            return
        made: Any = {"request": work.request, "attempt": work.attempt}
        worker.send(identity, PrefillReport(**made, cached=0, computed=9, **TOLD), tokens(work, 0, 1))

    async def decoded(worker: FakeWorker, identity: bytes, work: Work) -> None:
        # The first token is there, and nobody has it.
        while not any(asker.request.tokens for asker in at.service._generations.values()):
            await asyncio.sleep(0)
        (asker,) = at.service._generations.values()
        assert asker.request.shown == (0 if how == "held" else 1)
        worker.send(identity, tokens(work, 1, 2, FinishReason.LENGTH))
        held.set()

    def decodes(worker: FakeWorker, identity: bytes, work: Work) -> None:
        if how != "retried" or work.attempt:
            tasks.append(asyncio.create_task(decoded(worker, identity, work)))

    tasks: list[asyncio.Task[None]] = []
    async with cluster(folder, *APART, **promised) as at:
        exporter = InMemorySpanExporter()
        at.service.tracer = Tracer(exporter, batch=False)
        at.workers["prefill-0"].script, at.workers["decode-0"].script = prefills, decodes
        body = {"model": "fake", "prompt": "What is?", "max_tokens": 3, "stream": True}
        sent = time.monotonic()
        async with http.post(f"{at.url}/v1/completions", json=body, headers={"Prefer": "server-timing"}) as response:
            seen = time.monotonic() - sent
            begun = parsed(response.headers["Server-Timing"])
            lines = (await response.read()).decode().splitlines()
        await asyncio.wait_for(held.wait(), PATIENCE)
        async with asyncio.timeout(PATIENCE):
            while not any(one.finished for one in at.conductor.ended):
                await asyncio.sleep(0.001)
        (comment,) = [line for line in lines if line.startswith(": server-timing ")]
        told = parsed(comment.removeprefix(": server-timing "))
        async with http.get(f"{at.url}/metrics") as response:
            metrics = sums(await response.text())
        (record,) = at.service.recent.ended()
        (choice,) = record.choices
        (log,) = [one.getMessage() for one in caplog.records if one.name == "pyengine.gateway.exchange"]
        ended = at.conductor.ended[-1]
        spans: dict[str, Any] = {span.name: span for span in exporter.get_finished_spans()}

    # The parts are the whole, and no more than the client saw pass.
    exact = choice.parts
    assert list(exact) == [*FIRST_TOKEN_PARTS, "held", "ttft", "handoff"]
    assert exact["ttft"] == pytest.approx(sum(exact[name] for name in (*FIRST_TOKEN_PARTS, "held")), abs=1e-9)
    assert 0 < exact["ttft"] <= seen
    assert {"queued": exact["queue"], "loading": exact["load"], "computing": exact["prefill"]} == TOLD
    assert (exact["held"] > 0) == (how == "held")
    # To the header's hundredth of a millisecond. It left before the hand-off was over, unless the token waited for it.
    shown = {name: round(1000 * value, 2) / 1000 for name, value in exact.items()}
    assert told == pytest.approx(shown, abs=1e-9)
    assert {**told, **begun} == told
    assert log.endswith(comment.removeprefix(": server-timing "))
    # To the last bit.
    assert metrics["vllm:time_to_first_token_seconds"] == pytest.approx(exact["ttft"], abs=1e-12)
    assert metrics["pyengine_first_token_held_seconds"] == exact["held"]
    for name in FIRST_TOKEN_PARTS:
        assert metrics[name] == exact[name]
    root = spans["completion"]
    assert {name: root.attributes[f"pyengine.{name}_seconds"] for name in exact} == exact
    # Spans have nanoseconds.
    attempt = f"attempt {1 if how == 'retried' else 0}"
    lengths = {name: (span.end_time - span.start_time) / 1e9 for name, span in spans.items()}
    assert lengths["tokenize"] == pytest.approx(exact["tokenize"], abs=1e-8)
    for span, part in (("queue", "queue"), ("load", "load"), ("compute", "prefill")):
        assert lengths[span] == pytest.approx(exact[part], abs=1e-8)
    back = lengths["prefill"] - lengths["queue"] - lengths["load"] - lengths["compute"]
    assert back == pytest.approx(exact["return"], abs=1e-8)
    came = (spans["prefill"].end_time - root.start_time) / 1e9
    assert came == pytest.approx(exact["ttft"] - exact["held"], abs=1e-8)
    assert spans["prefill"].parent.span_id == spans[attempt].context.span_id
    assert ("held" in spans) == (how == "held")
    if how == "held":
        assert lengths["held"] == pytest.approx(exact["held"], abs=1e-8)
    # What is predicted is when the token came, not when it was shown.
    assert ended.ttft == pytest.approx(exact["ttft"] - exact["held"], abs=1e-9)
    # Promised or not, it is judged by what the client saw.
    assert choice.ttft_kept is True
