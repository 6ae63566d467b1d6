"""Goal: a request that nobody has sent is asked about as a gateway would ask. Method: the gateway's own state machine
is the oracle for its question; complaints by hand.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pyengine import _native
from pyengine.gateway.request import Request, Terms, ToConductor
from pyengine.gateway.server import ClusterKeys
from pyengine.scheduler.commands.guard import InputError
from pyengine.scheduler.commands.unsent import Unsent, read_prompt
from pyengine.scheduler.explanation import UNSENT
from pyengine.scheduler.messages import Route
from pyengine.scheduler.types import Role, SamplingParams, Slo
from pyengine.text import Tokenizer

from ..scheduler.world import BLOCK, NAMESPACE, worker

SECRET = bytes(range(32))
WORKERS = [worker("prefill-0", Role.PREFILL, "node-0"), worker("decode-0", Role.DECODE, "node-1")]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 5 * BLOCK, 5 * BLOCK + 1])
@pytest.mark.parametrize("tenant", ["", "somebody"])
def test_it_is_asked_about_as_its_gateway_would(length: int, tenant: str) -> None:
    slo, text = Slo(ttft=1.0, tbt=0.1), "x" * length
    hash_key = _native.derive_key(SECRET, "hash")
    found = Unsent(prompt=text, max_tokens=9, tenant=tenant, slo=slo).route(WORKERS, hash_key)
    keys, digest = ClusterKeys(hash_key), NAMESPACE.digest()
    root = keys.root(digest, tenant.encode())
    request = Request(
        0,
        Tokenizer.load("bytes").encode(text),
        SamplingParams(max_tokens=9, seed=1),
        model="model",
        namespace=digest,
        block_tokens=BLOCK,
        root=root,
        key_of=lambda tokens: keys.blocks(tokens, BLOCK, root),
        patience=1.0,
        longest=60.0,
        terms=Terms(arrived=0.0, slo=slo, tenant=tenant),
    )
    (action,) = request.start(0.0)
    assert isinstance(action, ToConductor)
    assert isinstance(action.message, Route)
    assert found == msgspec.structs.replace(action.message, attempt=UNSENT)


def test_what_cannot_be_asked_says_what_to_do(tmp_path: Path) -> None:
    two = [*WORKERS, worker("both-0", Role.BOTH, "node-2", model="mobel")]
    for workers, unsent, complaint in (
        ([], Unsent(tokens=5), "no worker"),
        (two, Unsent(tokens=5), "name one of mobel, model"),
        (two, Unsent(tokens=5, model="modell"), "did you mean 'model'?"),
        (WORKERS, Unsent(tokens=0), "at least one"),
        (WORKERS, Unsent(tokens=1 << 60), "at least one"),
        (WORKERS, Unsent(tokens=5, slo=Slo(ttft=-1.0)), "negative"),
        ([worker("both-0", Role.BOTH, "n", tokenizer="/nowhere")], Unsent(prompt="x"), "the tokenizer of model"),
    ):
        with pytest.raises(InputError, match=complaint.replace("?", r"\?")):
            unsent.route(workers, SECRET)
    assert Unsent(tokens=5, model="mobel").route(two, SECRET).model == "mobel"
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "away", tmp_path / "binary"):
        with pytest.raises(InputError, match="cannot be read"):
            read_prompt(path)
