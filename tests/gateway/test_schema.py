"""Goal: whatever is asked within (or beside) the served schema is answered as the schema says, and never with a 500.
Method: schemathesis makes the requests, the same ones each time; a gateway in a thread of its own answers them, with
scripted conductor and workers behind it.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from pyengine.gateway import schema
from pyengine.scheduler.messages import Work
from pyengine.scheduler.types import Role
from tests.gateway.cluster import FakeWorker, cluster, whole_answer


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A gateway that answers until all tests of this file are through."""
    ready: list[str] = []
    started, over = threading.Event(), threading.Event()

    async def serve(folder: Path) -> None:
        async with cluster(folder, Role.PREFILL, Role.DECODE) as at:
            for worker in at.workers.values():
                worker.script = brief
            ready.append(at.url)
            started.set()
            await asyncio.to_thread(over.wait)

    with tempfile.TemporaryDirectory(prefix="pyg") as name:
        thread = threading.Thread(target=lambda: asyncio.run(serve(Path(name))))
        thread.start()
        started.wait()
        yield ready[0]
        over.set()
        thread.join()


def brief(worker: FakeWorker, identity: bytes, work: Work) -> None:
    """A few tokens, however many are asked for: 128 answers of thousands would take the test's client too long."""
    few = min(work.sampling.max_tokens, 4)
    sampling = msgspec.structs.replace(work.sampling, max_tokens=few, min_tokens=min(work.sampling.min_tokens, few))
    whole_answer(worker, identity, msgspec.structs.replace(work, sampling=sampling))


DOCUMENT: Any = schemathesis.openapi.from_dict(json.loads(schema.DOCUMENT))
OPERATIONS = [result.ok() for result in DOCUMENT.get_all_operations()]

#: What is refused although a schema cannot say why is no failure, so that what it allows need not be accepted.
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_every_operation(operation: Any, mode: GenerationMode, url: str) -> None:
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    @hypothesis.settings(
        max_examples=10 if operation.body else 3,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def asked(case: schemathesis.Case[Any]) -> None:
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
            # Else every request would end at a model that is not there.
            case.body["model"] = "fake"
        case.call_and_validate(base_url=url, checks=CHECKS)

    try:
        asked()
    except hypothesis.errors.Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE, "nothing can be asked"


def test_the_schema_names_every_route_and_field(url: str) -> None:
    with urllib.request.urlopen(f"{url}/openapi.json") as answer:
        document = json.load(answer)
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "n", "logit_bias", "min_p", "top_logprobs", "stream_options", "return_token_ids"} <= set(chat)
    assert chat["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 128}
