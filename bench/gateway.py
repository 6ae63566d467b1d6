"""What the gateway costs: events per CPU-second of its process, time added to the first token, bytes of an idle stream.

    python -m bench.gateway            three rounds
    python -m bench.gateway --quick    one short round
    python -m bench.gateway --gateways 2

stream  Many streams at once, each with a token at every step of a scripted worker, and in turn, round by round, from a
        bare uvicorn application that sends events of the same bytes at the same steps and knows nothing else: the limit
        of what is possible here. What counts is the CPU time of the two processes, and none of client or worker.
ttft    One request at a time through a server with a model that computes nothing, when nothing else runs: the time to
        its first token at the client, less the prefill worker's part, as the answer's Server-Timing header tells it.
scale   With --gateways N: as many streams as more than one gateway can serve, through one gateway and through N at one
        address: events per second, and which part of the processors each of all processes had.
idle    Resident memory of the process with many requests that wait for their first token, less that without.

Every line is one JSON object. Limits: 0.5 of the bare stream, 3 ms, 100 kB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from bench.client import completion
from bench.common import end_on_sigterm, line, median, note
from bench.server import POLL, Server, free_port
from pyengine.config import GatewayConfig
from pyengine.gateway.listener import listen, reserve
from pyengine.gateway.server import serve
from pyengine.gateway.service import Service
from pyengine.scheduler.messages import Abort, Message, Tokens, Work
from pyengine.scheduler.types import Role, WorkerInfo
from tests.gateway.cluster import SESSION_KEY, FakeConductor, FakeWorker, HashKeys

BENCH = "gateway"
RATIO_LIMIT, TTFT_LIMIT, IDLE_LIMIT = 0.5, 3e-3, 100e3
#: An event as the gateway sends it for one token of a plain completion.
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef01234567","object":"text_completion","created":1796000502,"model":"fake",'
    b'"choices":[{"index":0,"text":"x","logprobs":null,"finish_reason":null}],"usage":null}\n\n'
)
#: Tokens of a stream that is measured: more than it gets in any measurement.
TOKENS = 1 << 19
#: Seconds between the scripted worker's steps: a batch of 200 on a large model.
STEP = 0.02
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


# -- the bare stream ---------------------------------------------------------------------------------------------------


class Bare:
    """An ASGI application that sends each stream the same event at every step."""

    def __init__(self) -> None:
        self._step: asyncio.Future[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await receive()
        gone = asyncio.ensure_future(receive())
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while not gone.done():
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
            if self._step is None:
                self._begin()
            assert self._step is not None
            await self._step

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        old, self._step = self._step, loop.create_future()
        loop.call_later(STEP, self._begin)
        if old is not None and not old.done():
            old.set_result(None)


bare = Bare()


@contextlib.contextmanager
def bare_server() -> Iterator[tuple[int, int]]:
    """Its port and process id."""
    port = free_port()
    arguments = ["bench.gateway:bare", "--port", str(port), "--log-level", "error", "--lifespan", "off"]
    with subprocess.Popen([sys.executable, "-m", "uvicorn", *arguments]) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(POLL)
            yield port, process.pid
        finally:
            process.kill()


# -- a client that costs little ----------------------------------------------------------------------------------------


class Streams:
    """Many streams of one port at once, of which only the events are counted."""

    def __init__(self, port: int, body: bytes) -> None:
        self._port = port
        self._request = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.events = self.ended = 0

    @contextlib.asynccontextmanager
    async def open(self, count: int) -> AsyncIterator[None]:
        """Returns when each of them has had an event."""
        begun = [asyncio.Event() for _ in range(count)]
        tasks = [asyncio.create_task(self._read(each)) for each in begun]
        try:
            waiting = asyncio.gather(*(each.wait() for each in begun))
            both: list[asyncio.Future[Any]] = [waiting, *tasks]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise RuntimeError(f"a stream ended before it began: {next(task for task in tasks if task.done())}")
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, begun: asyncio.Event) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(self._request)
            while data := await reader.read(1 << 16):
                if count := data.count(b"data: {"):
                    self.events += count
                    begun.set()
            self.ended += 1
        finally:
            writer.transport.abort()


async def rate(port: int, pid: int, body: bytes, streams: int, seconds: float) -> tuple[float, float]:
    """Events per CPU-second of the process, and per second."""
    load = Streams(port, body)
    async with load.open(streams):
        before, spent, began = load.events, cpu_seconds(pid), time.monotonic()
        await asyncio.sleep(seconds)
        events, spent, took = load.events - before, cpu_seconds(pid) - spent, time.monotonic() - began
        if load.ended:
            raise RuntimeError(f"{load.ended} streams ended while they were measured: give them more tokens")
    return events / spent, events / took


def measure_streams(streams: int, seconds: float, rounds: int) -> None:
    body = completion("fake", [65] * 8, TOKENS)
    ours, limits, rates = [], [], []
    with bare_server() as (bare_port, bare_pid), scripted_gateway(STEP) as (port, pid):
        for number in range(rounds):
            limits.append(asyncio.run(rate(bare_port, bare_pid, body, streams, seconds))[0])
            per_cpu, per_second = asyncio.run(rate(port, pid, body, streams, seconds))
            ours.append(per_cpu)
            rates.append(per_second)
            note(f"round {number + 1} of {rounds}: {ours[-1]:.0f} of {limits[-1]:.0f} events per CPU-second")
    ratio = median([own / limit for own, limit in zip(ours, limits, strict=True)])
    line(BENCH, f"{streams} bare streams", median(limits), "events/CPU s", rounds=rounds)
    more: dict[str, Any] = {"events_per_second": median(rates), "limit": RATIO_LIMIT, "rounds": rounds}
    line(BENCH, f"{streams} streams", median(ours), "events/CPU s", against="bare", ratio=ratio, **more)


# -- a gateway with a scripted worker ----------------------------------------------------------------------------------


def gateway_main(endpoint: str, name: str, port: int) -> int:
    """A gateway's process, told of its conductor; says when it listens."""
    listener = listen("127.0.0.1", port, shared=True)
    config = GatewayConfig(gateway=name, conductor=endpoint, secret_file="")
    service = Service(config, SESSION_KEY, HashKeys())
    return serve(service, listener, lambda facts: print(facts["port"], flush=True))


class SteadyWorker(FakeWorker):
    """A token for each of its sequences at every step, all of a gateway in one message, as real workers send them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.running: dict[int, tuple[bytes, Work, int]] = {}
        self.script = lambda _, identity, work: self.running.update({work.request: (identity, work, 0)})

    @property
    def info(self) -> WorkerInfo:
        return msgspec.structs.replace(super().info, max_positions=1 << 20, pages=1 << 20, pool_slots=1 << 20)

    def on(self, identity: bytes, message: Any) -> None:
        super().on(identity, message)
        if isinstance(message, Abort):
            self.running.pop(message.request, None)

    def step(self) -> None:
        out: dict[bytes, list[Message]] = {}
        for number, (identity, work, first) in self.running.items():
            made = Tokens(request=number, attempt=work.attempt, first=first, tokens=(65,))
            out.setdefault(identity, []).append(made)
            self.running[number] = (identity, work, first + 1)
        for identity, messages in out.items():
            self.send(identity, *messages)


def worker_main(folder: Path, step: float) -> None:
    """Conductor and worker in a process of their own. step: seconds; 0: nothing is ever answered."""

    async def run() -> None:
        context: zmq.Context[Any] = zmq.Context()
        worker = SteadyWorker(context, folder, "both-0", Role.BOTH)
        conductor = FakeConductor(context, f"ipc://{folder}/conductor", [worker])
        assert conductor.workers
        due = time.monotonic()
        while True:
            due = max(due + (step or 1.0), time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            if step:
                worker.step()

    asyncio.run(run())


@contextlib.contextmanager
def scripted_gateways(count: int, step: float) -> Iterator[tuple[int, list[int], int]]:
    """The port of so many gateways, their process ids, and the worker's."""
    with tempfile.TemporaryDirectory(prefix="pyg") as name, reserve("127.0.0.1", 0) as kept:
        own = [sys.executable, "-m", "bench.gateway"]
        worker = subprocess.Popen([*own, "--worker", name, "--step", str(step)])
        port = kept.getsockname()[1]
        told = ["--conductor", f"ipc://{name}/conductor", "--port", str(port)]
        gateways = [
            subprocess.Popen([*own, *told, "--name", f"gateway-{number}"], stdout=subprocess.PIPE)
            for number in range(count)
        ]
        try:
            for gateway in gateways:
                assert gateway.stdout is not None
                gateway.stdout.readline()
            # Whoever takes the connection: many in a row have met all.
            healthy = 0
            while healthy < 16 * count:
                healthy = healthy + 1 if b'"ok"' in _get(port, "/health") else 0
                time.sleep(POLL)
            yield port, [gateway.pid for gateway in gateways], worker.pid
        finally:
            for process in (*gateways, worker):
                process.kill()
                process.wait()


@contextlib.contextmanager
def scripted_gateway(step: float) -> Iterator[tuple[int, int]]:
    """One gateway's port and process id."""
    with scripted_gateways(1, step) as (port, pids, _):
        yield port, pids[0]


def measure_scale(most: int, streams: int, seconds: float) -> None:
    body = completion("fake", [65] * 8, TOKENS)

    async def run(port: int, pids: list[int], worker: int) -> tuple[float, list[float]]:
        load, everybody = Streams(port, body), [*pids, worker, os.getpid()]
        async with load.open(streams):
            before, spent, began = load.events, [cpu_seconds(pid) for pid in everybody], time.monotonic()
            await asyncio.sleep(seconds)
            took = time.monotonic() - began
            shares = [(cpu_seconds(pid) - was) / took for pid, was in zip(everybody, spent, strict=True)]
            return (load.events - before) / took, shares

    alone = 0.0
    for count in (1, most):
        with scripted_gateways(count, STEP) as (port, pids, worker):
            value, shares = asyncio.run(run(port, pids, worker))
        alone = alone or value
        more: dict[str, Any] = {"streams": streams, "cores": os.cpu_count()}
        more |= {"gateway_cores": [round(each, 2) for each in shares[:-2]]}
        more |= {"worker_cores": round(shares[-2], 2), "client_cores": round(shares[-1], 2)}
        line(BENCH, f"{count} gateways", value, "events/s", against="one gateway", ratio=value / alone, **more)


def _get(port: int, path: str) -> bytes:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.read()


# -- first token, idle streams -----------------------------------------------------------------------------------------


async def first_token(port: int, body: bytes) -> float:
    """Seconds to the first event, less what the prefill worker says that it took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nPrefer: server-timing\r\nContent-Length: %d\r\n\r\n"
    began = time.perf_counter()
    writer.write(head % len(body) + body)
    answer = await reader.readuntil(b"data: {")
    took = time.perf_counter() - began
    writer.transport.abort()
    worker = re.findall(rb"(?:queue|load|prefill);dur=([0-9.]+)", answer)
    if len(worker) != 3:
        raise RuntimeError(f"no times in the answer: {answer!r}")
    return took - sum(map(float, worker)) / 1e3


def measure_first_token(server: Server, requests: int) -> None:
    added = [
        asyncio.run(first_token(server.port, completion("fake", [65, *range(66, 90)], 2))) for _ in range(requests)
    ]
    value = median(added)
    line(
        BENCH, "added to the first token p50", value, "s", against="limit", ratio=TTFT_LIMIT / value, requests=requests
    )


def measure_idle(streams: int) -> None:
    async def held(port: int, pid: int) -> float:
        load = Streams(port, completion("fake", [65] * 8, TOKENS))
        before = resident_bytes(pid)
        tasks = [asyncio.create_task(load._read(asyncio.Event())) for _ in range(streams)]
        while json.loads(await asyncio.to_thread(_get, port, "/load"))["server_load"] < streams:
            await asyncio.sleep(POLL)
        after = resident_bytes(pid)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return (after - before) / streams

    with scripted_gateway(0.0) as (port, pid):
        value = asyncio.run(held(port, pid))
    line(BENCH, "idle stream", value, "B", against="limit", ratio=IDLE_LIMIT / value, streams=streams)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description="What the gateway costs.")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of two seconds")
    parser.add_argument("--only", choices=("stream", "ttft", "idle"))
    parser.add_argument("--gateways", type=int, default=1, help="measures how so many scale, and nothing else")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--step", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--conductor", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.conductor:
        return gateway_main(options.conductor, options.name, options.port)
    if options.worker:
        worker_main(options.worker, options.step)
    if options.quick:
        options.rounds, options.seconds = 1, 2.0
    end_on_sigterm()
    if options.gateways > 1:
        measure_scale(options.gateways, 4 * options.streams, options.seconds)
        return 0
    if options.only in (None, "stream"):
        measure_streams(options.streams, options.seconds, options.rounds)
    if options.only in (None, "ttft"):
        with Server("--both", "1", model="fake", backend="fake") as server:
            measure_first_token(server, 100)
    if options.only in (None, "idle"):
        measure_idle(5 * options.streams)
    return 0


if __name__ == "__main__":
    sys.exit(main())
