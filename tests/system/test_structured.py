"""Goal: an answer under a grammar is the same whole answer when the worker that makes it is killed meanwhile.

Method: real processes over the fake backend; the oracle begins anew for each token (tests/worker/test_grammar.py).
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema_rs

from pyengine.scheduler.types import Grammar, SamplingParams
from tests.system.conftest import FAKE_SLOW, PATIENCE, fake_server, prompt, stream, until
from tests.worker.test_grammar import oracle, written

SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 40, "maxLength": 60}, "odd": {"enum": ["é{", "👍"]}},
    "required": ["text", "odd"],
    "additionalProperties": False,
}


def test_a_killed_worker_costs_no_answer_its_form(state_dir: Path) -> None:
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    expected = []
    for i in range(6):
        tokens = oracle(prompt(60, i), SamplingParams(temperature=0.8, seed=i, max_tokens=150, grammar=grammar))
        expected.append(written(tokens))
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(expected[-1]))
    flags = ("--prefill", "2", "--decode", "2", "--nodes", "2")
    with fake_server(state_dir, *flags, model=FAKE_SLOW) as server:
        flowing = threading.Barrier(7, timeout=PATIENCE)

        def client(i: int) -> str:
            pieces = []
            form = {"json": json.dumps(SCHEMA)}
            for piece in stream(
                server, prompt(60, i), 150, temperature=0.8, seed=i, ignore_eos=False, structured_outputs=form
            ):
                pieces.append(piece)
                if len(pieces) == 3 + i:  # tokens have gone out
                    flowing.wait()
            return "".join(pieces)

        with ThreadPoolExecutor(6) as threads:
            answers = [threads.submit(client, i) for i in range(6)]
            flowing.wait()

            def requests() -> list[float]:
                return [server.metric("pyengine_worker_requests", worker=f"decode-{k}") for k in range(2)]

            # What a worker has is told with its heartbeats. No two are measured equally fast: one may have all.
            until(lambda: any(requests()), "decode workers tell of their requests")
            told = requests()
            server.kill(f"decode-{told.index(max(told))}")
            assert [answer.result(PATIENCE) for answer in answers] == expected
        assert server.metric("pyengine_request_retries_total") > 0
