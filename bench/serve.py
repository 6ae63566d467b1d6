"""Open-loop load on a server that this benchmark starts: TTFT, gap to the second token, TBT, throughput, goodput.

    python -m bench.serve                            one prefill and one decode worker, real model
    python -m bench.serve --compare                  role both beside prefill and decode apart, interleaved
    python -m bench.serve --compare --quick          the same in two minutes
    python -m bench.serve --backend fake --rate 50   the machinery alone, with a model that computes nothing

Requests arrive at their own times, whether earlier ones are answered or not, and latency counts from the time a request
was due. Client and server share this machine's cores. `--compare` starts one server per arrangement, all with the same
number of workers and threads, and gives each the same requests in turn, round by round; the figure is the median over
rounds. Every line is one JSON object; requests that failed are counted in one too, and make the exit status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import math
import random
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from bench.client import Reply, completion, session, stream
from bench.common import end_on_sigterm, line, longest_tenth, mean, median, note, percentile
from bench.server import Server, ServerError, select
from pyengine.scheduler.types import BLOCK_TOKENS

BENCH = "serve"
#: Seconds until the counters of all heartbeats have reached the gateway: conductor and workers speak every 0.5 s.
COUNTERS_SETTLE = 2.0
#: Token ids of prompts: printable ASCII, as the fake model's bytes and as SmolLM2's single characters. Answers to those
#: are mostly ASCII as well: a token that is half a character waits for the other half, and two tokens make one event.
FIRST_ID, LAST_ID = 33, 110


class Arrangement(NamedTuple):
    """A way to place the workers, and the flags that ask for it."""

    name: str
    flags: tuple[str, ...]


#: The first is what the others are measured against.
COMPARED = (
    Arrangement("both x2", ("--both", "2")),
    Arrangement("apart", ("--prefill", "1", "--decode", "1")),
    Arrangement("apart tcp", ("--prefill", "1", "--decode", "1", "--nodes", "2", "--transport", "tcp")),
)


class Load(NamedTuple):
    """What is asked of the server.

    rate: requests a second. duration: seconds in which they arrive. poisson: at random times, else evenly.
    prompt, output: (least, most) tokens, drawn evenly. shared: share of the shortest prompt that all begin with.
    slo_ttft, slo_tbt: seconds. timeout: seconds a request may take. seed: of arrivals, lengths and prompts.
    """

    rate: float
    duration: float
    poisson: bool
    prompt: tuple[int, int]
    output: tuple[int, int]
    shared: float
    slo_ttft: float
    slo_tbt: float
    timeout: float
    seed: int


class Planned(NamedTuple):
    """One request to come. at: seconds after the start of its round."""

    at: float
    prompt: list[int]
    output: int


def plan(load: Load, round_number: int) -> list[Planned]:
    """The requests of one round. Rounds share nothing, so that one finds none of another's blocks cached."""
    draw = random.Random(f"{load.seed}/{round_number}")

    def tokens(count: int) -> list[int]:
        return [draw.randint(FIRST_ID, LAST_ID) for _ in range(count)]

    common = tokens(int(load.shared * load.prompt[0]) // BLOCK_TOKENS * BLOCK_TOKENS)
    requests = []
    at = 0.0
    for _ in range(max(1, round(load.rate * load.duration))):
        length = draw.randint(*load.prompt)
        requests.append(Planned(at, common + tokens(length - len(common)), draw.randint(*load.output)))
        at += draw.expovariate(load.rate) if load.poisson else 1 / load.rate
    return requests


async def run_load(base: str, model: str, requests: Sequence[Planned], timeout: float) -> list[Reply]:
    """Sends each request at its time; returns when all are answered, failed or timed out."""
    bodies = [completion(model, request.prompt, request.output) for request in requests]
    replies = []
    async with session(timeout) as client, asyncio.TaskGroup() as tasks:
        start = time.perf_counter()
        for request, body in zip(requests, bodies, strict=True):
            due = start + request.at
            await asyncio.sleep(due - time.perf_counter())
            replies.append(Reply(due))
            tasks.create_task(stream(client, base, body, replies[-1]))
    for request, reply in zip(requests, replies, strict=True):
        if reply.error is None and reply.tokens != request.output:
            reply.error = f"short answer: {reply.tokens} tokens instead of {request.output}"
    return replies


class Figure(NamedTuple):
    """One measured number. higher: whether more is better."""

    value: float
    unit: str
    higher: bool


def figures(replies: Sequence[Reply], load: Load) -> dict[str, Figure]:
    """What one round showed, of the requests that were answered."""
    good = [reply for reply in replies if reply.error is None]
    ttft = [reply.ttft for reply in good if reply.events]
    second = [reply.gaps[0] for reply in good if reply.gaps]
    tbt = [longest_tenth(reply.gaps) for reply in good if reply.gaps]
    gaps = [gap for reply in good for gap in reply.gaps]
    span = max(reply.ended for reply in replies) - min(reply.due for reply in replies)
    kept = sum(
        reply.ttft <= load.slo_ttft and (not reply.gaps or longest_tenth(reply.gaps) <= load.slo_tbt)
        for reply in good
        if reply.events
    )
    found = {}
    for name, values in (("ttft", ttft), ("second token gap", second), ("tbt", tbt), ("itl", gaps)):
        found[f"{name} mean"] = Figure(mean(values), "s", False)
        for percent in (50, 99):
            found[f"{name} p{percent}"] = Figure(percentile(values, percent), "s", False)
    found["throughput"] = Figure(sum(reply.tokens for reply in good) / span, "tokens/s", True)
    found["goodput"] = Figure(kept / span, "requests/s", True)
    found["slo kept"] = Figure(kept / len(replies), "share", True)
    return found


def summary(rounds: Sequence[dict[str, Figure]]) -> dict[str, Figure]:
    """Medians over rounds."""
    return {
        name: first._replace(value=median([each[name].value for each in rounds])) for name, first in rounds[0].items()
    }


def ratio(ours: Figure, theirs: Figure) -> float:
    """How many times better ours is."""
    above, below = (ours.value, theirs.value) if ours.higher else (theirs.value, ours.value)
    return above / below if below else math.nan


def report(arrangement: Arrangement, rounds: Sequence[Sequence[Reply]], load: Load) -> dict[str, Figure]:
    """Prints what needs no comparison: requests, errors, how well the client kept time. Returns the medians."""
    replies = [reply for each in rounds for reply in each]
    errors = collections.Counter(reply.error for reply in replies if reply.error is not None)
    good = [reply for reply in replies if reply.error is None]
    tokens = sum(reply.tokens for reply in good)
    name = arrangement.name
    line(
        BENCH,
        f"{name} requests",
        len(replies),
        "requests",
        rounds=len(rounds),
        rate=load.rate,
        tokens=tokens,
        cached_tokens=sum(reply.cached for reply in good),
        tokens_per_event=tokens / max(1, sum(len(reply.events) for reply in good)),
        client_late_p99=percentile([reply.sent - reply.due for reply in replies], 99),
    )
    line(BENCH, f"{name} errors", errors.total(), "requests")
    for text, count in errors.most_common():
        line(BENCH, f"{name} error", count, "requests", error=text)
    return summary([figures(each, load) for each in rounds])


def report_counters(name: str, before: dict[str, float], after: dict[str, float]) -> None:
    """Prints what the server counted during the load: what crossed, what was computed twice."""

    def delta(sample: str, **labels: str) -> float:
        return select(after, sample, **labels) - select(before, sample, **labels)

    for transport in ("arena", "tcp"):
        blocks = delta("pyengine_transfer_blocks_total", transport=transport, direction="in")
        line(BENCH, f"{name} blocks over {transport}", blocks, "blocks")
    line(BENCH, f"{name} bytes over tcp", delta("pyengine_transfer_bytes_total", transport="tcp", direction="in"), "B")
    line(BENCH, f"{name} recomputed", delta("pyengine_recomputed_tokens_total"), "tokens")
    line(BENCH, f"{name} retries", delta("pyengine_request_retries_total"), "attempts")


def run(arrangements: Sequence[Arrangement], load: Load, rounds: int, options: argparse.Namespace) -> int:
    """Starts the servers, gives each the load `rounds` times, prints. Returns the number of failed requests."""
    shared = ("--dram-bytes", options.dram_bytes, "--kv-bytes", options.kv_bytes)
    with contextlib.ExitStack() as stack:
        servers = []
        for arrangement in arrangements:
            note(f"starting {arrangement.name}: pyengine serve {' '.join(arrangement.flags)}")
            server = Server(
                *arrangement.flags,
                *shared,
                model=options.model,
                backend=options.backend,
                state_dir=options.state_dir,
            )
            servers.append(stack.enter_context(server))
        models = [server.get_json("/v1/models")[1]["data"][0]["id"] for server in servers]
        for server, model in zip(servers, models, strict=True):
            # Two lengths: first calls allocate, and an adopted sequence decodes by another path than a prompt.
            warm = plan(load._replace(rate=2.0, duration=1.0, shared=0.0, seed=-load.seed - 1), 0)
            for reply in asyncio.run(run_load(server.base, model, warm, load.timeout)):
                if reply.error is not None:
                    raise ServerError(f"warm-up failed: {reply.error}; the server's log ends:\n{server.tail()}")
        time.sleep(COUNTERS_SETTLE)
        before = [server.metrics() for server in servers]
        replies: list[list[list[Reply]]] = [[] for _ in servers]
        for number in range(rounds):
            requests = plan(load, number)
            # Each round begins with another server, so that none always has the quieter or the warmer machine.
            for step in range(len(servers)):
                index = (number + step) % len(servers)
                note(f"round {number + 1} of {rounds}: {len(requests)} requests to {arrangements[index].name}")
                run_one = run_load(servers[index].base, models[index], requests, load.timeout)
                replies[index].append(asyncio.run(run_one))
        for arrangement, server, rounds_of in zip(arrangements, servers, replies, strict=True):
            if any(reply.error is not None for each in rounds_of for reply in each):
                note(f"{arrangement.name} failed requests; its log ends:\n{server.tail()}")
        time.sleep(COUNTERS_SETTLE)
        after = [server.metrics() for server in servers]
    base: dict[str, Figure] | None = None
    for index, arrangement in enumerate(arrangements):
        found = report(arrangement, replies[index], load)
        report_counters(arrangement.name, before[index], after[index])
        for name, figure in found.items():
            case = f"{arrangement.name} {name}"
            if base is None:
                line(BENCH, case, figure.value, figure.unit)
            else:
                against = COMPARED[0].name
                line(BENCH, case, figure.value, figure.unit, against=against, ratio=ratio(figure, base[name]))
        if len(arrangements) > 1 and base is None:
            base = found
    return sum(reply.error is not None for rounds_ in replies for each in rounds_ for reply in each)


def span(text: str) -> tuple[int, int]:
    """ "128" or "64-256" (argparse type)."""
    least, _, most = text.partition("-")
    try:
        pair = int(least), int(most or least)
    except ValueError:
        pair = 0, 0
    if not 1 <= pair[0] <= pair[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of tokens nor a range like 64-256")
    return pair


def positive(text: str) -> float:
    """A number above zero (argparse type)."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
    return value


def share(text: str) -> float:
    """A number from 0 to 1 (argparse type)."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1")
    return value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help="ends within two minutes: few requests, rough figures")
    made.add_argument("--compare", action="store_true", help=", ".join(a.name for a in COMPARED) + ", interleaved")
    made.add_argument("--backend", choices=("torch", "fake"), default="torch")
    made.add_argument("--model", help="default: smollm2, or fake with --backend fake")
    made.add_argument("--state-dir", help="where the secret and converted models are (default: the server's own)")
    made.add_argument("--prefill", type=int, default=0, help="prefill workers (without --compare)")
    made.add_argument("--decode", type=int, default=0, help="decode workers (without --compare)")
    made.add_argument("--both", type=int, default=0, help="workers of both roles (without --compare)")
    made.add_argument("--nodes", type=int, default=1, help="nodes (without --compare)")
    made.add_argument("--dram-bytes", default="512MiB", help="pool per node (default: 512MiB)")
    made.add_argument("--kv-bytes", default="512MiB", help="device pages per worker (default: 512MiB)")
    made.add_argument("--rate", type=positive, help="requests a second (default: 0.5 with torch, 20 with fake)")
    made.add_argument("--duration", type=positive, help="seconds in which requests arrive (default: 60; quick: 8)")
    made.add_argument("--rounds", type=int, help="rounds of the load (default: 3; quick: 2)")
    made.add_argument("--arrivals", choices=("poisson", "fixed"), default="poisson")
    made.add_argument("--prompt-tokens", type=span, default=(64, 192), help="a number or a range (default: 64-192)")
    made.add_argument("--output-tokens", type=span, default=(16, 32), help="a number or a range (default: 16-32)")
    made.add_argument(
        "--shared-prefix", type=share, default=0.5, help="share of the shortest prompt that all have (default: 0.5)"
    )
    made.add_argument("--slo-ttft", type=positive, default=2.0, help="seconds, for goodput (default: 2)")
    made.add_argument("--slo-tbt", type=positive, default=0.25, help="seconds, for goodput (default: 0.25)")
    made.add_argument("--timeout", type=positive, default=60.0, help="seconds a request may take (default: 60)")
    made.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and prompts")
    return made


def main() -> int:
    made = parser()
    options = made.parse_args()
    options.model = options.model or ("fake" if options.backend == "fake" else "smollm2")
    rounds = options.rounds if options.rounds is not None else (2 if options.quick else 3)
    if rounds < 1:
        made.error(f"--rounds must be at least 1, not {rounds}")
    load = Load(
        rate=options.rate or (20.0 if options.backend == "fake" else 0.5),
        duration=options.duration or (8.0 if options.quick else 60.0),
        poisson=options.arrivals == "poisson",
        prompt=options.prompt_tokens,
        output=options.output_tokens,
        shared=options.shared_prefix,
        slo_ttft=options.slo_ttft,
        slo_tbt=options.slo_tbt,
        timeout=options.timeout,
        seed=options.seed,
    )
    placement = {name: getattr(options, name) for name in ("prefill", "decode", "both")}
    if options.compare:
        if any(placement.values()) or options.nodes != 1:
            made.error("--compare brings its own arrangements: leave out --prefill, --decode, --both and --nodes")
        arrangements: tuple[Arrangement, ...] = COMPARED
    else:
        if not any(placement.values()):
            placement["prefill"] = placement["decode"] = 1
        named = {name: count for name, count in placement.items() if count}
        flags = tuple(word for name, count in named.items() for word in (f"--{name}", str(count)))
        title = " ".join(f"{name} {count}" for name, count in named.items())
        if options.nodes > 1:
            title += f" nodes {options.nodes}"
        arrangements = (Arrangement(title, (*flags, "--nodes", str(options.nodes))),)
    end_on_sigterm()
    try:
        failed = run(arrangements, load, rounds, options)
    except ServerError as error:
        print(f"bench.serve: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
