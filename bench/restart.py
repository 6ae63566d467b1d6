"""What survives: a long prompt is asked, all is stopped and started again, and the same is asked once more.

    python -m bench.restart              SmolLM2: prefill and decode on two nodes, as `make serve` has them
    python -m bench.restart --fake       no model: a backend that sleeps as long as a small one would compute; a life
                                         asks until all is on SSD, so that even a very slow machine keeps it

Each life is a `pyengine serve` of its own over one SSD directory, warmed up by another prompt and ended by SIGTERM.
Every line is one JSON object: the time to the first token of a life, where its cached tokens were found, and whether
the answer is that of the first. Status 1: the answers differ, or nothing came from SSD.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

from bench.client import Reply, session, stream
from bench.common import end_on_sigterm, line, note
from bench.server import START_TIMEOUT, Server, ServerError

BENCH = "restart"
#: Characters of the text below that are asked about: some 1,500 tokens of SmolLM2, seconds of prefill on two cores.
LENGTH = 6000
TEXT = Path(__file__).parents[1] / "LICENSE"
QUESTION = "\n\nIn one sentence, the text above says that"
ANSWER_TOKENS = 24
#: Seconds a conductor may take to learn what its nodes have on SSD.
INDEX_PATIENCE = START_TIMEOUT
FAKE = "fake:seconds_per_token=0.0005"
BLOCK = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", action="store_true", help="compute no model")
    parser.add_argument("--ssd-dir", type=Path, help="where KV is kept (default: a temporary directory)")
    parser.add_argument("--ssd-bytes", default="1GiB", help="what each node may take there")
    parser.add_argument("--state-dir", type=Path, help="secret and converted models (default: as pyengine serve)")
    options = parser.parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="pyengine-restart-") as folder:
        directory = options.ssd_dir or Path(folder) / "kv"
        try:
            return compare(options, directory)
        except ServerError as error:
            note(str(error))
            return 1


def compare(options: argparse.Namespace, directory: Path) -> int:
    first = life("first", options, directory, blocks=0)
    second = life("second", options, directory, blocks=(first.prompt - 1) // BLOCK)
    same = same_answer(first, second)
    report("first", first)
    report("second", second, first)
    note(f"first token after {first.ttft:.3f} s, and after the restart {second.ttft:.3f} s")
    note(f"cached tokens: {told(first)}, and after the restart {told(second)}, of {second.prompt}")
    note(f"the answers are {'the same' if same else 'different'}: {''.join(second.text)!r}")
    return 0 if same and second.tiers.get("ssd", 0) else 1


def life(name: str, options: argparse.Namespace, directory: Path, blocks: int) -> Reply:
    """One server's life; asks when its conductor knows of `blocks` blocks on the prefill worker's node."""
    flags = ("--nodes", "2", "--prefill", "1", "--decode", "1")
    kept = ("--ssd-dir", str(directory), "--ssd-bytes", options.ssd_bytes)
    model, backend = (FAKE, "fake") if options.fake else ("smollm2", "torch")
    note(f"{name} life: starting")
    with Server(*flags, *kept, model=model, backend=backend, state_dir=options.state_dir) as server:
        served = server.get_json("/v1/models")[1]["data"][0]["id"]
        # What a process does once only (kernels chosen, buffers made) is not what is compared.
        ask(server, served, f"{name}: warming up. " * 30)
        server.wait_until(
            lambda: server.metric("pyengine_index_blocks", node="node-0") >= blocks, INDEX_PATIENCE, "aware of its SSD"
        )
        prompt = TEXT.read_text()[:LENGTH] + QUESTION
        reply = ask(server, served, prompt)
        if options.fake:
            server.wait_until(lambda: is_kept(server, served, prompt, reply), INDEX_PATIENCE, "done with writing")
        server.stop(number=signal.SIGTERM)
    return reply


def ask(server: Server, model: str, prompt: str) -> Reply:
    """One streamed answer. Raises ServerError if none comes."""
    body = {"model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}

    async def run() -> Reply:
        reply = Reply(due=time.perf_counter())
        async with session(600) as client:
            await stream(client, server.base, json.dumps(body).encode(), reply)
        return reply

    reply = asyncio.run(run())
    if reply.error is not None:
        raise ServerError(f"no answer: {reply.error}; the server's log ends:\n{server.tail()}")
    return reply


def is_kept(server: Server, model: str, prompt: str, reply: Reply) -> bool:
    """Whether the prompt is on SSD in the prefill worker's node; asks it once more if not, as what is found again is
    written at once, and all else at the end, as far as there is time.
    """
    stored = server.metric("pyengine_pool_blocks", node="node-0", tier="ssd", state="stored")
    return stored >= (reply.prompt - 1) // BLOCK or not ask(server, model, prompt)


def report(case: str, reply: Reply, before: Reply | None = None) -> None:
    against, ratio = ("first", before.ttft / reply.ttft) if before else (None, None)
    same = before is None or same_answer(before, reply)
    tiers = {f"cached_{tier}": tokens for tier, tokens in reply.tiers.items()}
    more = {"prompt_tokens": reply.prompt, "cached_tokens": reply.cached, "same_answer": same, **tiers}
    line(BENCH, f"{case} ttft", reply.ttft, "s", against=against, ratio=ratio, **more)


def same_answer(one: Reply, other: Reply) -> bool:
    """In whatever pieces they came: that depends on the machine's speed."""
    return "".join(one.text) == "".join(other.text)


def told(reply: Reply) -> str:
    return ", ".join(f"{tokens} from {tier}" for tier, tokens in reply.tiers.items()) or "none"


if __name__ == "__main__":
    sys.exit(main())
