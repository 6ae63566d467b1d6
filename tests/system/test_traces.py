"""Goal: what a collector gets of a real cluster is one trace a request, through the death of a worker.

Method: a collector of OTLP over HTTP here, which keeps what it is sent; one decode worker killed in mid-stream.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from pyengine.backends.fake import fake_tokens
from tests.system.conftest import FAKE_SLOW, body, fake_server, prompt, stream, text, until

proto = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="the extra `otel` is not installed"
)


class Collector(ThreadingHTTPServer):
    """spans: all that came."""

    spans: list[Any]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        data = self.rfile.read(int(self.headers["Content-Length"]))
        for resource in proto.ExportTraceServiceRequest.FromString(data).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans.extend(scope.spans)  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector(("127.0.0.1", 0), Handler)
    made.spans = []
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_a_killed_worker_is_an_attempt_of_the_same_trace(state_dir: Path, collector: Collector) -> None:
    flags = ("--prefill", "1", "--decode", "2", "--otlp-endpoint", collector.url)
    with fake_server(state_dir, *flags, model=FAKE_SLOW) as server:
        ids = prompt(100)
        pieces = stream(server, ids, 100)
        got = [next(pieces) for _ in range(3)]

        def decoding() -> list[str]:
            busy = (name for name in ("decode-0", "decode-1") if server.metric("pyengine_worker_requests", worker=name))
            return list(busy)

        until(lambda: bool(decoding()), "somebody decodes")
        (killed,) = decoding()
        server.kill(killed)
        assert "".join([*got, *pieces]) == text(fake_tokens(ids, 100))
        parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
        answer = httpx2.post(
            f"{server.base}/v1/completions", json=body(prompt(40), 4), headers={"traceparent": parent}, timeout=60
        )
        assert answer.status_code == 200
        server.stop()  # it sends what is left
    traces: dict[bytes, dict[bytes, Any]] = {}
    for span in collector.spans:
        traces.setdefault(span.trace_id, {})[span.span_id] = span
    ours = traces.pop(bytes.fromhex("ab" * 16))
    (retried,) = traces.values()
    for spans, attempts in ((ours, 1), (retried, 2)):
        names = [span.name for span in spans.values()]
        assert [names.count(name) for name in ("completion", "attempt 0", "attempt 1")] == [1, 1, attempts - 1]
        roots = [span for span in spans.values() if span.parent_span_id not in spans]
        assert [span.name for span in roots] == ["completion"]
        assert names.count("transfer") >= 1 and names.count("compute") == attempts
        for span in spans.values():
            assert span.start_time_unix_nano <= span.end_time_unix_nano
    failed = next(span for span in retried.values() if span.name == "attempt 0")
    assert killed in failed.status.message
    assert next(span for span in ours.values() if span.name == "completion").parent_span_id == bytes.fromhex("cd" * 8)
