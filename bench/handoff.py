"""What a hand-off costs whoever waits for it: the gap between the first token, which leaves at prefill, and the second.

    python -m bench.handoff                  2,048 tokens, the real model and a device, one node and two over tcp
    python -m bench.handoff --quick          the same with fewer rounds

The real model: the same prompts go to three servers in turn, round by round: one worker of role both, and a prefill and
a decode worker on one node and on two. A line says by how much the gap is longer than role both's, as a share of its
time to the first token (the prefill); medians over the rounds. Only one server has a request at any time, but all
share this machine's cores: what a hand-off takes from a prefill beside it shows in `ttft`.

The device: a model that sleeps as a device of its own would compute, so that the processor is free meanwhile, with
SmolLM2's KV for each token, in real worker loops and daemons of one process. `gap more` is the gap less its own decode
step; beside it stands the same with blocks that leave after their step, not layer by layer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from bench.client import Reply, completion, session, stream
from bench.common import end_on_sigterm, line, median, note
from bench.serve import FIRST_ID, LAST_ID
from bench.server import Server
from pyengine.backend import Readable, Slice, Written
from pyengine.backends.fake import FakeBackend
from pyengine.scheduler.messages import Message, Tokens
from pyengine.scheduler.types import BLOCK_TOKENS, SamplingParams
from tests.worker.harness import Cluster

BENCH = "handoff"
PROMPT = 2048
TIMEOUT = 300.0
#: Memory of one node's pool: some prompts of the model (94 MB each), so that none waits for another's eviction.
DRAM = "1GiB"
#: Of the device: 2,048 tokens take a second.
SECONDS_PER_TOKEN = 0.0005
#: Tokens in a step, as workers have by themselves.
STEP = 512


class Arrangement(NamedTuple):
    """A way to place the workers, the flags that ask for it, and the most that a hand-off may cost, of the prefill."""

    name: str
    flags: tuple[str, ...]
    limit: float


BOTH = Arrangement("both", ("--both", "1"), 0.0)
APART = (
    Arrangement("one node", ("--prefill", "1", "--decode", "1"), 0.03),
    Arrangement("two nodes tcp", ("--prefill", "1", "--decode", "1", "--nodes", "2", "--transport", "tcp"), 0.08),
)


class Sample(NamedTuple):
    """Seconds to the first token, and from there to the second."""

    ttft: float
    gap: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a minute or two")
    parser.add_argument("--prompt", type=int, default=PROMPT, metavar="TOKENS")
    parser.add_argument("--only", choices=("smollm2", "device"), help="one of the two")
    parser.add_argument("--rounds", type=int, help="default 7, with --quick 3")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (3 if arguments.quick else 7)
    end_on_sigterm()
    if arguments.only != "device":
        serve("smollm2", "torch", arguments.prompt, rounds)
    if arguments.only != "smollm2":
        for arrangement in APART:
            beside_device(arrangement, arguments.prompt, rounds)
    return 0


def serve(model: str, backend: str, prompt: int, rounds: int) -> None:
    """Measures all arrangements with one model, and prints their lines."""
    case = model
    arrangements = (BOTH, *APART)
    with contextlib.ExitStack() as stack:
        flags = ("--dram-bytes", DRAM)
        servers = [
            stack.enter_context(Server(*each.flags, *flags, model=model, backend=backend)) for each in arrangements
        ]
        samples: list[list[Sample]] = [[] for _ in arrangements]
        for number in range(rounds + 1):
            tokens = prompt_of(number, prompt)
            for server, measured in zip(servers, samples, strict=True):
                sample = asyncio.run(ask(server, tokens))
                if number:  # the first round warms up
                    measured.append(sample)
            note(f"{case}: round {number} of {rounds}")
    ttft, gap = typical(samples[0])
    line(BENCH, f"{case} {prompt} both ttft", ttft, "s", rounds=rounds)
    line(BENCH, f"{case} {prompt} both gap", gap, "s", rounds=rounds)
    for arrangement, measured in zip(APART, samples[1:], strict=True):
        name = f"{case} {prompt} {arrangement.name}"
        apart_ttft, apart_gap = typical(measured)
        more = median([ours.gap - theirs.gap for ours, theirs in zip(measured, samples[0], strict=True)])
        share = more / ttft
        line(BENCH, f"{name} ttft", apart_ttft, "s", against="both", ratio=ttft / apart_ttft)
        line(BENCH, f"{name} gap", apart_gap, "s", against="both", ratio=gap / apart_gap)
        ratio = arrangement.limit / share if share > 0 else math.inf
        line(BENCH, f"{name} gap more", 100 * share, "% of prefill", against="limit", ratio=ratio, seconds=more)


def beside_device(arrangement: Arrangement, prompt: int, rounds: int) -> None:
    """Measures one arrangement over a device, layer by layer and block by block in turn, and prints its lines."""
    name = f"device {prompt} {arrangement.name}"
    nodes = ("a", "b") if "--nodes" in arrangement.flags else ("a",)
    pages = -(-prompt // BLOCK_TOKENS) + 8
    cluster = Timed()
    with cluster:
        for node in nodes:
            cluster.add_node(node, 2 * pages, Device())
        prefill, decode = Device(), Device()
        cluster.add_worker("prefill", "a", prefill, pages=pages, max_tokens=STEP)
        cluster.add_worker("decode", nodes[-1], decode, pages=pages, max_tokens=STEP)
        samples: dict[bool, list[Sample]] = {True: [], False: []}
        for number in range(rounds + 1):
            for layerwise, measured in samples.items():
                prefill.layerwise = decode.layerwise = layerwise
                sample = cluster.ask(prompt_of(2 * number + layerwise, prompt), decode)
                if number:
                    measured.append(sample)
    ttft, gap = typical(samples[True])
    blockwise = typical(samples[False])
    line(BENCH, f"{name} ttft", ttft, "s", against="blockwise", ratio=blockwise.ttft / ttft, rounds=rounds)
    computing = SECONDS_PER_TOKEN * prompt
    line(BENCH, f"{name} ttft", ttft, "s", against="limit", ratio=computing / ttft)
    share = gap / computing
    line(BENCH, f"{name} gap more", 100 * share, "% of prefill", against="limit", ratio=arrangement.limit / share)
    line(BENCH, f"{name} gap more", 100 * share, "% of prefill", against="blockwise", ratio=blockwise.gap / gap)


class Device(FakeBackend):
    """Computes nothing: its KV is what lies in the pages. seconds: how long the last step would take alone."""

    def __init__(self) -> None:
        # SmolLM2's KV, in fp32.
        super().__init__(layers=30, kv_heads=3, head_dim=64, seconds_per_token=SECONDS_PER_TOKEN)
        self.seconds = 0.0

    def _compute(
        self, slices: list[Slice], written: Written | None = None, readable: Readable | None = None
    ) -> list[int]:
        layers = self.namespace.kv.layers
        self.seconds = SECONDS_PER_TOKEN * sum(len(slice_.tokens) for slice_ in slices)
        over = time.perf_counter()
        for layer in range(layers):
            if readable is not None:
                readable(layer)
                over = max(over, time.perf_counter())
            over += self.seconds / layers
            time.sleep(max(over - time.perf_counter(), 0.0))
            if written is not None:
                written(layer)
        return [-1 if slice_.sampling is None else FIRST_ID for slice_ in slices]


class Timed(Cluster):
    """Keeps when each token left its worker."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def _take(self, message: Message) -> None:
        if isinstance(message, Tokens):
            self.times.append(time.perf_counter())
        super()._take(message)

    def ask(self, prompt: list[int], decode: Device) -> Sample:
        """One request that is alone. The gap is told without decode's own step."""
        self.times.clear()
        began = time.perf_counter()
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        request = self.submit(prompt, "prefill", "decode", sampling=sampling)
        self.run(request)
        self.settle()
        if len(request.ids) != 2 or request.cached:
            raise RuntimeError(f"no answer to measure: {request}")
        first, second = self.times
        return Sample(first - began, second - first - decode.seconds)


def prompt_of(number: int, count: int) -> list[int]:
    """Prompts of different rounds share no block."""
    draw = random.Random(number)
    return [draw.randint(FIRST_ID, LAST_ID) for _ in range(count)]


async def ask(server: Server, prompt: Sequence[int]) -> Sample:
    """One request that is alone. Raises RuntimeError if it is not answered as it should be."""
    model = server.get_json("/v1/models")[1]["data"][0]["id"]
    reply = Reply(0.0)
    async with session(TIMEOUT) as client:
        # Three tokens, of which the second is not the last: an answer's end is another path.
        await stream(client, server.base, completion(model, prompt, 3), reply)
    if reply.error is not None or reply.cached or len(reply.events) != 3:
        raise RuntimeError(f"no answer to measure: {reply.error}, {reply.cached} cached, texts {reply.text}")
    return Sample(reply.events[0] - reply.sent, reply.gaps[0])


def typical(samples: Sequence[Sample]) -> Sample:
    return Sample(median([sample.ttft for sample in samples]), median([sample.gap for sample in samples]))


if __name__ == "__main__":
    raise SystemExit(main())
