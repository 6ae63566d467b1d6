"""How soon all is released after an abort, and how soon the client has its answer or error after a kill -9.

    python -m bench.abort            all three parts
    python -m bench.abort --quick    the same in two minutes, with few repetitions
    python -m bench.abort --only kill --repetitions 20

release     In one process, over real daemons and worker loops (tests/worker/harness.py), from the abort to the moment
            when no request, page, reservation, grant or pin is left anywhere: exact times, read from the parts
            themselves. It begins between two steps; a real abort waits for the step under way besides.
disconnect  Through HTTP, from the client's disconnect to the gateway having forgotten the request (exact), and to the
            cluster's counters on /metrics saying so (they come with heartbeats, every 0.5 to 1 s: an upper bound).
kill        Through HTTP, two workers of each role on two nodes, kill -9 of one process while a request is in it.
            Answers are compared with the oracle. Each repetition kills one of each kind and has a server of its own:
            a launcher restarts a part that dies again and again with growing pauses.

The model computes nothing (backend fake) but sleeps as long as a small one would compute. Every line is one JSON
object; the limits are the promises of the design: 250 ms after the step under way, and 5 s.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import random
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import aiohttp

from bench.client import Reply, completion, session, stream
from bench.common import end_on_sigterm, line, median, note, percentile
from bench.server import Server, ServerError, select
from pyengine.backends.fake import FakeBackend, fake_tokens
from pyengine.scheduler.types import SamplingParams
from tests.worker.harness import PATIENCE, Cluster, Request

BENCH = "abort"
PARTS = ("release", "disconnect", "kill")
#: Seconds the design promises from an abort to all released (beside the step under way), and from a death to an answer.
RELEASE_LIMIT = 0.25
KILL_LIMIT = 5.0


def report(case: str, seconds: Sequence[float], limit: float | None, **more: str | float) -> None:
    """Median and 99th percentile of what was measured; against the promise, if there is one."""
    for percent, value in ((50, median(seconds)), (99, percentile(seconds, 99))):
        name = f"{case} p{percent}"
        against = None if limit is None else "limit"
        times_better = None if limit is None or not seconds else limit / value
        line(BENCH, name, value, "s", against=against, ratio=times_better, repetitions=len(seconds), **more)


# -- release: in one process ---------------------------------------------------------------------------------------

#: Tokens of the aborted prompt: 32 blocks, 8 steps of 64 tokens.
PROMPT = 512
STEP = 64
#: Slots of a pool: one such request fits, two do not, so that the second is queued for its grant.
SLOTS = 48


def release_backend() -> FakeBackend:
    """256 KiB a block: a prompt is 8 MiB of KV, of which some is on its way when a transfer is aborted."""
    return FakeBackend(layers=8, kv_heads=4, head_dim=64)


def make_cluster(nodes: int) -> Cluster:
    cluster = Cluster()
    for node in ("a", "b")[:nodes]:
        cluster.add_node(node, SLOTS, release_backend())
    cluster.add_worker("prefill", "a", release_backend(), pages=SLOTS, max_tokens=STEP)
    cluster.add_worker("decode", "b" if nodes == 2 else "a", release_backend(), pages=SLOTS, max_tokens=STEP)
    return cluster


def held(cluster: Cluster) -> list[str]:
    return sorted(cluster.held())


def reached(cluster: Cluster, request: Request, phase: str, computed: int) -> bool:
    """Whether a request is in the phase in which it is to be aborted. computed: prompt tokens before it came."""
    decode = cluster.node_of["decode"]
    match phase:
        case "queued":
            return cluster.counter(decode, "pyengine_pool_grants", state="waiting") > 0
        case "mid-prefill":
            return cluster.workers["prefill"].counters["prefill"] > computed
        case "mid-transfer":
            return len(request.tokens) > 0
        case _:
            return len(request.tokens) > 3


def release(phase: str, nodes: int, repetitions: int, draw: random.Random) -> None:
    """Aborts in one phase, again and again in one cluster, and prints how long it took."""
    seconds = []
    reserved = 0
    sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)

    def prompt() -> list[int]:
        return [draw.randrange(256) for _ in range(PROMPT)]

    with make_cluster(nodes) as cluster:
        decode = cluster.node_of["decode"]
        blocker: Request | None = None
        if phase == "queued":
            # It holds its grant and waits for a prefill that nobody does.
            blocker = cluster.submit(prompt(), "prefill", "decode", parts=("decode",))
            cluster.until(lambda: cluster.counter(decode, "pyengine_pool_grants", state="held") > 0)
        before = held(cluster)
        for _ in range(repetitions):
            computed = cluster.workers["prefill"].counters["prefill"]
            request = cluster.submit(prompt(), "prefill", "decode", sampling=sampling)
            cluster.until(lambda: reached(cluster, request, phase, computed))  # noqa: B023 (called at once)
            reserved += cluster.counter(decode, "pyengine_pool_blocks", state="reserved") > 0
            began = time.perf_counter()
            cluster.abort(request)
            # Not `settle`, which sleeps between looks.
            while held(cluster) != before:
                cluster.step()
                if time.perf_counter() - began > PATIENCE:
                    raise RuntimeError(f"abort {phase}: still held after {PATIENCE:g} s: {held(cluster)}")
            seconds.append(time.perf_counter() - began)
        if blocker is not None:
            cluster.abort(blocker)
        cluster.settle()
    way = "tcp" if nodes == 2 else "arena"
    report(f"abort {phase} {way} to released", seconds, RELEASE_LIMIT, with_blocks_reserved=reserved)


# -- served: through HTTP ------------------------------------------------------------------------------------------

#: 640 tokens take 2 s to prefill and a token 10 ms to decode: long enough for counters to show where a request is.
MODEL = "fake:seconds_per_step=0.01,seconds_per_token=0.003"
SERVED_PROMPT = 640
SERVED_OUTPUT = 100
SERVED_FLAGS = ("--nodes", "2", "--max-tokens-per-step", "64", "--dram-bytes", "64MiB", "--kv-bytes", "64MiB")
#: Seconds a client waits for its whole answer before that is called an error: twice what it ever takes.
CLIENT_TIMEOUT = 40.0
#: Seconds within which anything but an answer (a counter, a restart) must have come.
EVENT_TIMEOUT = 30.0


class Client:
    """Requests to one server, each a task with a reply that can be watched."""

    def __init__(self, server: Server, http: aiohttp.ClientSession, model: str, draw: random.Random) -> None:
        self.server = server
        self.http = http
        self.model = model
        self.draw = draw

    def ask(self, prompt_tokens: int, output: int) -> tuple[list[int], Reply, asyncio.Task[None]]:
        """Starts a request with a random prompt."""
        prompt = [self.draw.randrange(33, 127) for _ in range(prompt_tokens)]
        reply = Reply(time.perf_counter())
        body = completion(self.model, prompt, output)
        return prompt, reply, asyncio.create_task(stream(self.http, self.server.base, body, reply))

    async def until(self, condition: Callable[[], bool], what: str, interval: float = 0.002) -> None:
        """Polls off the loop, so that streams are read meanwhile. Raises ServerError after EVENT_TIMEOUT."""
        limit = time.monotonic() + EVENT_TIMEOUT
        while not await asyncio.to_thread(quietly, condition):
            if time.monotonic() > limit:
                raise ServerError(f"not {what} within {EVENT_TIMEOUT:g} s; the log ends:\n{self.server.tail()}")
            await asyncio.sleep(interval)

    def busy(self, role: str) -> str | None:
        """A worker of the role that has a request, as the last heartbeats told."""
        for sample, value in self.server.metrics().items():
            if value and sample.startswith(f'pyengine_worker_requests{{worker="{role}-'):
                return sample.split('"')[1]
        return None

    async def find_busy(self, role: str, reply: Reply) -> str | None:
        """Waits until the request is at such a worker; None if it has ended before one was seen.

        A decode worker has the request from the start, and works on it once there is more than the first token.
        """
        found: list[str] = []

        def look() -> bool:
            at_work = role == "prefill" or len(reply.events) > 3
            if at_work and (name := self.busy(role)) is not None:
                found.append(name)
            return bool(found) or reply.ended > 0

        await self.until(look, f"seen at a {role} worker")
        return found[0] if found else None

    def forgotten(self) -> bool:
        """The gateway has no request (its own count, always current)."""
        samples = self.server.metrics()
        return not select(samples, "pyengine_gateway_requests", model_name=self.model)

    def released(self) -> bool:
        """No worker and no pool has reported anything held."""
        return not any(still_held(self.server.metrics()))


def still_held(samples: dict[str, float]) -> list[float]:
    """All counts that are zero when nobody asks for anything."""
    return [
        select(samples, "pyengine_worker_requests"),
        select(samples, "pyengine_worker_pages", state="referenced"),
        *(select(samples, "pyengine_pool_blocks", state=state) for state in ("reserved", "pinned", "quarantine")),
        select(samples, "pyengine_pool_grants"),
    ]


def quietly(condition: Callable[[], bool]) -> bool:
    """The condition; False while nobody answers."""
    try:
        return condition()
    except (OSError, ValueError, ServerError):
        return False


def with_server(work: Callable[[Client], Coroutine[Any, Any, None]], draw: random.Random, *flags: str) -> None:
    """Runs `work` against a server of its own."""

    async def inner(server: Server) -> None:
        async with session(CLIENT_TIMEOUT) as http:
            model = server.get_json("/v1/models")[1]["data"][0]["id"]
            client = Client(server, http, model, draw)
            _, reply, task = client.ask(16, 4)
            await task
            if reply.error is not None:
                raise ServerError(f"the first request failed: {reply.error}; the log ends:\n{server.tail()}")
            await work(client)

    with Server(*flags, *SERVED_FLAGS, model=MODEL, backend="fake") as server:
        asyncio.run(inner(server))


def disconnect(repetitions: int, draw: random.Random) -> None:
    """Clients go away mid-prefill and mid-decode."""
    forgotten: dict[str, list[float]] = {"prefill": [], "decode": []}
    released: dict[str, list[float]] = {"prefill": [], "decode": []}

    async def work(client: Client) -> None:
        for index in range(2 * repetitions):
            phase = ("prefill", "decode")[index % 2]
            await client.until(client.released, "released before the next request")
            _, reply, task = client.ask(SERVED_PROMPT, SERVED_OUTPUT)
            if await client.find_busy(phase, reply) is None:
                raise ServerError(f"the request ended too soon: {reply.error or 'answered'}")
            began = time.perf_counter()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await client.until(client.forgotten, "forgotten by the gateway")
            forgotten[phase].append(time.perf_counter() - began)
            await client.until(client.released, "released")
            released[phase].append(time.perf_counter() - began)

    with_server(work, draw, "--prefill", "1", "--decode", "1")
    for phase in forgotten:
        report(f"disconnect mid-{phase} to forgotten by gateway", forgotten[phase], RELEASE_LIMIT)
        report(
            f"disconnect mid-{phase} to reported released",
            released[phase],
            None,
            resolution="heartbeats, 0.5 to 1 s: an upper bound",
        )


class Scenario(NamedTuple):
    """Whom to kill, and while the request is at a worker of which role.

    part: its name, from that worker's. fatal: nobody else can go on with the request, the client gets an error.
    """

    name: str
    role: str
    part: Callable[[str], str]
    fatal: bool = False


def daemon_of(worker: str) -> str:
    """Two workers of each role on two nodes: worker k of a role sits on node k."""
    return f"transferd-{worker.rpartition('-')[2]}"


SCENARIOS = (
    Scenario("prefill worker", "prefill", lambda worker: worker),
    Scenario("decode worker", "decode", lambda worker: worker),
    Scenario("daemon at prefill", "prefill", daemon_of),
    Scenario("daemon at decode", "decode", daemon_of),
    Scenario("conductor", "decode", lambda _: "conductor"),
    Scenario("gateway", "decode", lambda _: "gateway", fatal=True),
)


class Shot(NamedTuple):
    """What one kill did. Seconds after the kill.

    ended: the answer or error was complete. silence: the longest time in which the client heard nothing.
    next: first token of a request sent right after the kill. outcome: "right", "wrong", or the error. lost: other parts
    that died of it.
    """

    ended: float
    silence: float
    next: float | None
    outcome: str
    next_outcome: str
    lost: tuple[str, ...]


async def shoot(client: Client, scenario: Scenario) -> Shot | None:
    """One request, one kill, one request more. None if the request ended before its worker was seen."""
    await client.until(client.released, "released before the next request")
    prompt, reply, task = client.ask(SERVED_PROMPT, SERVED_OUTPUT)
    worker = await client.find_busy(scenario.role, reply)
    if worker is None:
        await task
        return None
    await asyncio.sleep(client.draw.uniform(0.0, 0.2))
    name = scenario.part(worker)
    parts = client.server.children()
    killed = time.perf_counter()
    client.server.kill(name)
    next_prompt, next_reply, next_task = client.ask(48, 4)
    await asyncio.gather(task, next_task)
    seen = client.server.children()
    lost = tuple(part for part, pid in parts.items() if part != name and seen.get(part) != pid)

    def complete_again() -> bool:
        now = client.server.children()
        return now.keys() == parts.keys() and now[name] != parts[name]

    await client.until(complete_again, f"complete again after {name} was killed")
    await asyncio.to_thread(client.server.wait_workers, 4, EVENT_TIMEOUT)
    heard = [killed, *(at for at in reply.events if at > killed), reply.ended]
    return Shot(
        ended=reply.ended - killed,
        silence=max(later - earlier for earlier, later in itertools.pairwise(heard)),
        next=next_reply.events[0] - killed if next_reply.events else None,
        outcome=judge(prompt, reply, SERVED_OUTPUT),
        next_outcome=judge(next_prompt, next_reply, 4),
        lost=lost,
    )


def judge(prompt: list[int], reply: Reply, output: int) -> str:
    """ "right", "wrong" or the error."""
    if reply.error is not None:
        return reply.error
    return "right" if "".join(reply.text) == bytes(fake_tokens(prompt, output)).decode() else "wrong"


class Tally:
    """What the kills of one scenario did."""

    def __init__(self) -> None:
        self.shots: list[Shot] = []
        self.missed = 0

    def report(self, scenario: Scenario, undisturbed: float) -> int:
        """Prints; returns how many promises were broken: wrong answers, errors where others could serve, parts lost."""
        shots = self.shots
        case = f"kill {scenario.name}"
        report(f"{case} to answer or error", [shot.ended for shot in shots], None, undisturbed=undisturbed)
        report(f"{case} longest silence", [shot.silence for shot in shots], KILL_LIMIT)
        first_tokens = [shot.next for shot in shots if shot.next is not None]
        report(f"{case} to next request's first token", first_tokens, KILL_LIMIT)
        outcomes = collections.Counter(shot.outcome for shot in shots)
        next_outcomes = collections.Counter(shot.next_outcome for shot in shots)
        for title, counts in (("outcome", outcomes), ("next request's outcome", next_outcomes)):
            for outcome, count in counts.most_common():
                line(BENCH, f"{case} {title}", count, "requests", outcome=outcome)
        if self.missed:
            line(BENCH, f"{case} missed", self.missed, "requests", reason="ended before its worker was seen")
        lost = [part for shot in shots for part in shot.lost]
        line(BENCH, f"{case} parts lost besides", len(lost), "processes", parts=" ".join(lost))
        bad = outcomes["wrong"] if scenario.fatal else len(shots) - outcomes["right"]
        return bad + len(shots) - next_outcomes["right"] + len(lost)


def kill(repetitions: int, draw: random.Random) -> int:
    """Kills every kind of process, again and again; prints; returns how many promises were broken."""
    tallies = [Tally() for _ in SCENARIOS]
    undisturbed: list[float] = []

    async def work(client: Client) -> None:
        if not undisturbed:
            prompt, reply, task = client.ask(SERVED_PROMPT, SERVED_OUTPUT)
            await task
            if (outcome := judge(prompt, reply, SERVED_OUTPUT)) != "right":
                raise ServerError(f"undisturbed, the answer was {outcome}; the log ends:\n{client.server.tail()}")
            undisturbed.append(reply.ended - reply.sent)
        for index in draw.sample(range(len(SCENARIOS)), len(SCENARIOS)):
            note(f"kill {SCENARIOS[index].name}")
            shot = await shoot(client, SCENARIOS[index])
            if shot is None:
                tallies[index].missed += 1
            else:
                tallies[index].shots.append(shot)

    try:
        for _ in range(repetitions):
            with_server(work, draw, "--prefill", "2", "--decode", "2")
    finally:
        # Also what was measured before a server failed.
        broken = sum(
            tally.report(scenario, median(undisturbed)) for tally, scenario in zip(tallies, SCENARIOS, strict=True)
        )
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.abort", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="ends within two minutes: few repetitions")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part (may be given several times)")
    parser.add_argument("--repetitions", type=int, help="of kills and disconnects (default: 20; quick: 2)")
    parser.add_argument("--aborts", type=int, help="of aborts in one process (default: 200; quick: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and moments")
    options = parser.parse_args()
    repetitions = options.repetitions if options.repetitions is not None else (2 if options.quick else 20)
    aborts = options.aborts if options.aborts is not None else (10 if options.quick else 200)
    if min(repetitions, aborts) < 1:
        parser.error("--repetitions and --aborts must be at least 1")
    parts = options.only or PARTS
    draw = random.Random(options.seed)
    end_on_sigterm()
    broken = 0
    try:
        if "release" in parts:
            for nodes in (2, 1):
                for phase in ("queued", "mid-prefill", "mid-transfer", "mid-decode"):
                    note(f"abort {phase}, {nodes} nodes, {aborts} times")
                    release(phase, nodes, aborts, draw)
        if "disconnect" in parts:
            note(f"disconnect, {repetitions} times each")
            disconnect(repetitions, draw)
        if "kill" in parts:
            broken = kill(repetitions, draw)
    except ServerError as error:
        print(f"bench.abort: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
