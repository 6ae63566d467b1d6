"""One trace for each request, from the client's to the last token, by OpenTelemetry (extra `otel`).

    chat                                           SERVER span; its parent is the client's, if it sent a traceparent
     |- tokenize
     |- attempt 0           error: decode-0 was lost
     |   |- schedule        the conductor's answer
     |   `- prefill ...
     `- attempt 1
         |- schedule
         |- prefill         worker; queue, load, compute inside
         |- held            if the first token was kept back until the second
         |- transfer        from the first KV at the decode worker to the last
         `- decode          worker; load, step inside; until the last token

The gateway makes all spans. Workers tell how long each part took (`PrefillReport`, `Handoff`) whether anybody traces or
not, and each report arrives with what it ends in: so spans are laid backwards from that moment, on one clock. No clocks
need to agree, a worker needs no exporter, and a killed one leaves no hole but its own parts. What is off costs one
comparison a message.

References: W3C Trace Context; OpenTelemetry's semantic conventions for HTTP and generative AI.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyengine.gateway.request import Request
from pyengine.scheduler.messages import Handoff, PrefillReport

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

#: Attempts of a request that are told: of one that fails for minutes the first ones, and the last.
MAX_ATTEMPTS = 16


@dataclasses.dataclass(slots=True)
class Attempt:
    """Times are seconds (monotonic); nan: it did not come to that."""

    number: int
    asked: float
    planned: float = math.nan
    first: float = math.nan
    given: float = math.nan
    last: float = math.nan
    ended: float = math.nan
    error: str = ""
    prefill: str = ""
    decode: str = ""
    report: PrefillReport | None = None
    handoff: Handoff | None = None
    handed: float = math.nan
    base: int = 0


class Timeline:
    """What one sequence went through, seen after each message. Pure."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self._lost = 0

    def see(self, request: Request, now: float) -> None:
        """The request may have got on."""
        for number, when, why in request.lost[self._lost :]:
            for attempt in self.attempts:
                if attempt.number == number:
                    attempt.ended, attempt.error = when, why
        self._lost = len(request.lost)
        if request.attempt >= 0 and (not self.attempts or self.attempts[-1].number < request.attempt):
            if len(self.attempts) >= MAX_ATTEMPTS:
                self.attempts.pop()
            asked = now if request.attempt else request.asked
            self.attempts.append(Attempt(request.attempt, asked, base=len(request.tokens)))
        if not self.attempts or not math.isnan(self.attempts[-1].ended):
            return
        attempt = self.attempts[-1]
        # Of the request's first token there is one figure: that of timing.py.
        first = not attempt.base
        if math.isnan(attempt.planned) and request.plan is not None:
            attempt.planned = request.planned if first else now
            attempt.prefill, attempt.decode = request.plan.prefill.worker, request.plan.decode.worker
        if len(request.tokens) > attempt.base:
            if math.isnan(attempt.first):
                attempt.first = request.came if first else now
            if first:
                attempt.given = request.given
            attempt.last = now
        if request.done:
            attempt.ended = now
            attempt.error = str(request.error) if request.error is not None else ""

    def hear(
        self, number: int, now: float, *, report: PrefillReport | None = None, handoff: Handoff | None = None
    ) -> None:
        """A worker has told what it spent its time on."""
        for attempt in self.attempts[-1:]:
            if attempt.number == number:
                attempt.report = report or attempt.report
                if handoff is not None:
                    attempt.handoff, attempt.handed = handoff, now


class Trace:
    """Of one HTTP request: its root span is open until `Tracer.end`."""

    def __init__(self, root: Span, arrived: float) -> None:
        self.root = root
        self.arrived = arrived
        self.timelines: list[Timeline] = []

    @property
    def header(self) -> str:
        """For the answer: `traceresponse`, by which a client finds the trace (W3C Trace Context, level 2, draft)."""
        context = self.root.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


class Tracer:
    """Makes spans and gives them to an exporter, which sends them in batches on a thread of its own."""

    def __init__(self, exporter: SpanExporter, *, service: str = "pyengine", batch: bool = True) -> None:
        """batch: False sends each span at once (tests)."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Not the process's global provider: who embeds the gateway has his own.
        self._provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter) if batch else SimpleSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pyengine")
        self._propagator = TraceContextTextMapPropagator()
        # Spans have the wall clock's time, requests the monotonic clock's.
        self._offset = time.time_ns() - time.monotonic_ns()

    @classmethod
    def to(cls, endpoint: str, service: str) -> Tracer:
        """endpoint: of an OTLP collector, http://host:4318 (checked by `config.check_traces`)."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces"), service=service)

    def begin(self, endpoint: str, headers: Mapping[str, str], arrived: float) -> Trace:
        """headers: the client's, lower case; its traceparent is the parent, and says whether anybody is interested."""
        from opentelemetry.trace import SpanKind

        given = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        context = self._propagator.extract(given)
        root = self._tracer.start_span(endpoint, context, SpanKind.SERVER, start_time=self._wall(arrived))
        return Trace(root, arrived)

    def end(self, trace: Trace, requests: list[Request], attributes: Mapping[str, Any], now: float) -> None:
        """All spans of the request. requests: its sequences, beside their timelines. attributes: of the root."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        root = trace.root
        if root.is_recording():
            inside = set_span_in_context(root)
            root.set_attributes(dict(attributes))
            asked = min((request.asked for request in requests if not math.isnan(request.asked)), default=math.nan)
            self._span("tokenize", inside, trace.arrived, asked)
            for choice, timeline in enumerate(trace.timelines):
                for attempt in timeline.attempts:
                    self._attempt(inside, choice, attempt, now)
            errors = [request.error for request in requests if request.error is not None]
            if errors:
                root.set_status(Status(StatusCode.ERROR, str(errors[0])))
        root.end(self._wall(now))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()

    def _attempt(self, inside: Any, choice: int, attempt: Attempt, now: float) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        ended = now if math.isnan(attempt.ended) else attempt.ended
        span = self._span(f"attempt {attempt.number}", inside, attempt.asked, ended, choice=choice, close=False)
        if span is None:
            return
        within = set_span_in_context(span)
        self._span("schedule", within, attempt.asked, ended if math.isnan(attempt.planned) else attempt.planned)
        until = ended if math.isnan(attempt.first) else attempt.first
        prefill = self._span("prefill", within, attempt.planned, until, worker=attempt.prefill, close=False)
        if prefill is not None:
            self._prefill(set_span_in_context(prefill), attempt, until)
            prefill.end(self._wall(until))
        if attempt.given > attempt.first:
            self._span("held", within, attempt.first, attempt.given)
        self._decode(within, attempt, ended)
        if attempt.error:
            span.set_status(Status(StatusCode.ERROR, attempt.error))
        span.end(self._wall(ended))

    def _prefill(self, within: Any, attempt: Attempt, until: float) -> None:
        report = attempt.report
        if report is None:
            return
        # The token came right behind the report: what is left before these parts is the way there and back.
        compute = until - report.computing
        load = compute - report.loading
        self._span("queue", within, max(load - report.queued, attempt.planned), load)
        self._span("load", within, load, compute, cached=report.cached)
        self._span("compute", within, compute, until, computed=report.computed)

    def _decode(self, within: Any, attempt: Attempt, ended: float) -> None:
        from opentelemetry.trace import set_span_in_context

        handoff = attempt.handoff
        if handoff is None:
            if attempt.prefill == attempt.decode and attempt.last > attempt.first:
                self._span("decode", within, attempt.first, attempt.last, worker=attempt.decode)
            return
        step = attempt.handed - handoff.computing
        load = step - handoff.loading
        self._span("transfer", within, load - handoff.arriving, load, source=attempt.prefill, target=attempt.decode)
        last = ended if math.isnan(attempt.last) else attempt.last
        decode = self._span("decode", within, load, last, worker=attempt.decode, close=False)
        if decode is not None:
            inside = set_span_in_context(decode)
            self._span("load", inside, load, step)
            self._span("first step", inside, step, attempt.handed)
            decode.end(self._wall(last))

    def _span(
        self, name: str, within: Any, begin: float, end: float, *, close: bool = True, **attributes: str | int
    ) -> Span | None:
        """None if it did not begin."""
        if math.isnan(begin) or math.isnan(end):
            return None
        told = {f"pyengine.{key}": value for key, value in attributes.items()}
        span: Span = self._tracer.start_span(name, within, start_time=self._wall(begin), attributes=told)
        if close:
            span.end(self._wall(max(begin, end)))
        return span

    def _wall(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._offset
