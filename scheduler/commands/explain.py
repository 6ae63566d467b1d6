"""`conductor explain`: why one request went where it went, or was refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from pyengine import _native, env
from pyengine.secret import read_secret, secret_file

from ..asking import ask
from ..backends import Task, find_backend
from ..explanation import Explanation
from ..messages import ClusterState, Explain, Explained
from ..report.document import dumps
from ..report.explained import explained
from ..types import Slo
from .guard import InputError, guarded, told, try_output, write_text
from .options import ClusterOptions, RunOptions, at_least
from .trace import TraceOptions
from .unsent import MAX_TOKENS, Unsent, read_prompt


def explain(
    *,
    request: int | None = None,
    trace: TraceOptions | None = None,
    cluster: ClusterOptions | None = None,
    run: RunOptions | None = None,
    backend: Annotated[str, Parameter(name="--backend")] = "sim",
    conductor: str | None = None,
    tokens: int | None = None,
    prompt_file: Path | None = None,
    max_tokens: int = MAX_TOKENS,
    model: str = "",
    tenant: str = "",
    ttft: float | None = None,
    tbt: float | None = None,
    secret: Annotated[Path | None, Parameter(name="--secret-file")] = None,
    state_dir: Path | None = None,
    timeout: float = 10.0,
    json_: Annotated[Path | None, Parameter(name="--json")] = None,
) -> int:
    """Tells of one request every candidate, every term of the decision, and the choice.

    Simulated, with --trace: the cluster is as it is when the request comes, after all before it. Live, with
    --conductor: one of its latest decisions, or, with --tokens or --prompt-file, where a request would go that nobody
    sends. Ends with 1 if a live conductor does not remember the request.

    Parameters
    ----------
    request
        Simulated: its number in the trace, from 0. Live: its id as the gateway numbers it; by default the latest.
    backend
        As for simulate.
    conductor
        ZeroMQ endpoint of a live conductor: ipc://PATH or tcp://HOST:PORT.
    tokens
        Of a request that nobody sends: a prompt of so many tokens, nothing of which is cached anywhere.
    prompt_file
        Of one: its prompt, a text, as /v1/completions would get it.
    max_tokens, model, tenant, ttft, tbt
        Of one: how long its answer may be, of which model (needed if there are several), whose KV it may share
        (cache_salt), and the seconds that are promised until its first token and between tokens.
    secret
        The cluster secret; by default the one in the state directory.
    state_dir
        Where the cluster's secret is kept.
    timeout
        Seconds to wait for the conductor.
    json_
        File for everything, as JSON.
    """
    options = trace or TraceOptions()

    def work() -> int:
        try_output(json_)
        if (conductor is None) == (options.trace is None):
            raise InputError("name --trace FILE for a simulated request, or --conductor ENDPOINT for a live one")
        if conductor is not None:
            known = read_secret(secret or secret_file(state_dir or env.read().state_dir))
            session = _native.derive_key(known, "session")
            if tokens is None and prompt_file is None:
                found = ask_conductor(conductor, session, request, timeout)
            elif request is not None or (tokens is not None and prompt_file is not None):
                raise InputError("name one of --request, --tokens and --prompt-file")
            else:
                prompt = read_prompt(prompt_file) if prompt_file is not None else None
                slo = Slo(ttft=ttft, tbt=tbt)
                unsent = Unsent(prompt, tokens or 0, at_least("--max-tokens", max_tokens, 1), model, tenant, slo)
                found = foresee(conductor, session, unsent, _native.derive_key(known, "hash"), timeout)
            if found is None:
                said = "has decided nothing yet" if request is None else f"does not remember request {request}"
                print(f"the conductor {said}: it keeps its latest decisions only")
                return 1
        else:
            if tokens is not None or prompt_file is not None:
                raise InputError("--tokens and --prompt-file ask a live cluster: name its --conductor ENDPOINT")
            if request is None:
                raise InputError("name the request by its number in the trace, from 0 (--request N)")
            number = at_least("--request", request, 0)
            spec, scheduled = (cluster or ClusterOptions()).spec(), (run or RunOptions()).spec()
            requests = options.made(spec.block_tokens, scheduled.seed)
            task = Task(requests=requests, description=requests.description, cluster=spec, run=scheduled)
            found = find_backend(backend).explain(task, number)
        with told(explained(found)):
            write_text(json_, dumps(msgspec.to_builtins(found)))
        return 0

    return guarded("explain", work)


def ask_conductor(endpoint: str, session_key: bytes, request: int | None, timeout: float) -> Explanation | None:
    """None: it does not remember. Raises LinkError, InputError."""
    number = time.time_ns()
    try:
        answer = ask(endpoint, session_key, Explain(number=number, request=request), Explained, timeout)
    except TimeoutError as error:
        raise InputError(str(error)) from None
    return answer.explanation


def foresee(endpoint: str, session_key: bytes, unsent: Unsent, hash_key: bytes, timeout: float) -> Explanation | None:
    """Where it would go. Raises LinkError, InputError."""

    def question(state: ClusterState) -> Explain:
        return Explain(number=time.time_ns(), route=unsent.route(state.workers, hash_key))

    try:
        return ask(endpoint, session_key, question, Explained, timeout).explanation
    except TimeoutError as error:
        raise InputError(str(error)) from None
