"""`conductor`: the scheduler's command line. `serve` runs the global scheduler alone; `clear` has it make all
nodes forget a tenant's or a namespace's blocks. The commands about whole clusters have a file each in `commands/`.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import string
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import cyclopts
import msgspec

from pyengine import _native, env, logs
from pyengine.config import ConfigError
from pyengine.secret import read_secret, secret_file

from .asking import ask
from .conductor import Conductor
from .links import LinkError
from .messages import Clear, ClearOutcome
from .native_index import NativeIndex
from .policies import UnknownName
from .service import Service
from .types import tenant_number

#: Exit status by which a process says that to start it again the same way would not help.
IMPOSSIBLE = 2

app = cyclopts.App(
    name="conductor", help="The global scheduler: it sends each request where its KV is, or moves the KV."
)

#: Imported when they are called, or help is asked for: `serve` starts without a simulator.
COMMANDS = ("simulate", "compare", "plan", "explain", "replay")
for _command in COMMANDS:
    app.command(f"pyengine.scheduler.commands.{_command}:{_command}", name=_command)


@app.command
def serve(
    *,
    listen: str,
    daemons: str = "127.0.0.1:0",
    policy: str = "kvcache-centric",
    admission: str = "none",
    roles: str = "fixed",
    seed: int = 0,
    secret: Annotated[Path | None, cyclopts.Parameter(name="--secret-file")] = None,
    state_dir: Path | None = None,
    tls: Annotated[bool, cyclopts.Parameter(negative=())] = False,
    log_json: Annotated[bool, cyclopts.Parameter(negative=())] = False,
    ready_fd: int | None = None,
) -> int:
    """Serves gateways, workers and daemons until SIGTERM or SIGINT.

    Parameters
    ----------
    listen
        ZeroMQ endpoint for gateways and workers: ipc://PATH in a private directory, or tcp://HOST:PORT.
    daemons
        HOST:PORT for daemons; port 0 takes any and the ready line tells it.
    policy
        kvcache-centric, least-harm, or another of those that simulate has, with settings: name:knob=value,...; or an
        entry point of the group pyengine.policies.
    admission
        none, or who refuses what would miss its latency objective: at-arrival, patient, predictive,
        predictive-system.
    roles
        fixed, or auto: workers are told to take on the role that is short.
    seed
        Of the numbers that policies draw.
    secret
        The cluster secret; by default the one in the state directory, made if there is none.
    state_dir
        Where the cluster's secret is kept.
    tls
        Daemons report over TLS 1.3: start them with --tls too. Gateways and workers have CURVE.
    log_json
        Log one JSON object a line.
    ready_fd
        Descriptor that gets one JSON line, {"endpoint": ..., "daemons": ...}, when it serves; by default stdout.
    """
    try:
        environment = env.read()
        logs.begin("conductor", environment.log_level, as_json=log_json)
        if seed < 0:
            raise ValueError(f"--seed must be at least 0, not {seed}")
        key = read_secret(secret or secret_file(state_dir or environment.state_dir))
        conductor = Conductor(
            policy=policy,
            admission=admission,
            roles=roles,
            seed=seed,
            first_order=time.time_ns(),
            index=NativeIndex(),
            inflight=_native.Inflight(),
        )
        service = Service(conductor, listen, daemons, _native.derive_key(key, "session"), tls=tls)
    except (ConfigError, LinkError, UnknownName, ValueError, _native.GiveUpError) as error:
        print(f"conductor serve: error: {error}", file=sys.stderr)
        return IMPOSSIBLE

    def end(number: int, frame: FrameType | None) -> None:
        service.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        line = json.dumps({"endpoint": service.endpoint, "daemons": service.daemons}) + "\n"
        with os.fdopen(sys.stdout.fileno() if ready_fd is None else ready_fd, "w", closefd=ready_fd is not None) as out:
            out.write(line)
        # What was imported, some 30,000 objects, is never garbage: no collection is to look through it while requests
        # wait. With it a full one took 23 ms.
        gc.freeze()
        service.run()
    finally:
        service.close()
    return 0


@app.command
def clear(
    *,
    conductor: str,
    tenant: str | None = None,
    namespace: str | None = None,
    secret: Annotated[Path | None, cyclopts.Parameter(name="--secret-file")] = None,
    state_dir: Path | None = None,
    timeout: float = 150.0,
    json_: Annotated[bool, cyclopts.Parameter(name="--json", negative=())] = False,
) -> int:
    """Forgets all blocks of a tenant or of a namespace, in memory and on SSD, on all nodes that are there.

    Names the nodes that were away: what these have comes back with them, so ask again then. Ends with 1 if there were
    any, if blocks are in use and stay, or if an SSD could not make it durable.

    Parameters
    ----------
    conductor
        Its ZeroMQ endpoint: ipc://PATH or tcp://HOST:PORT.
    tenant
        The `cache_salt` of the tenant's requests.
    namespace
        16 hex digits, as `transferd keys --json` shows them: all of a model whose weights have changed.
    secret
        The cluster secret; by default the one in the state directory.
    state_dir
        Where the cluster's secret is kept.
    timeout
        Seconds to wait.
    json_
        JSON instead of text.
    """
    try:
        if (tenant is None) == (namespace is None):
            raise ValueError("give --tenant or --namespace, one of them")
        if tenant == "":
            raise ValueError("--tenant is empty: that would be all who name no tenant; clear their namespace instead")
        digest = None if namespace is None else _digest(namespace)
        path = secret or secret_file(state_dir or env.read().state_dir)
        key = _native.derive_key(read_secret(path), "session")
        message = Clear(number=1, namespace=digest, tenant=None if tenant is None else tenant_number(tenant))
        outcome = ask(conductor, key, message, ClearOutcome, timeout)
    except (ConfigError, LinkError, ValueError, OSError) as error:
        print(f"conductor clear: error: {error}", file=sys.stderr)
        return IMPOSSIBLE
    except TimeoutError as error:
        print(f"conductor clear: {error}", file=sys.stderr)
        return 1
    if outcome.refused:
        print(f"conductor clear: {outcome.refused}", file=sys.stderr)
        return 1
    if json_:
        print(msgspec.json.encode(outcome).decode())
    else:
        for node in outcome.nodes:
            lasting = "" if node.durable else "; its SSD could not make that durable: after a crash some may be back"
            print(f"{node.node}: {node.dropped} dropped, {node.held} held and kept{lasting}")
        for name in outcome.away:
            print(f"{name}: away, what it has on SSD is not cleared: ask again when it is back")
        if not outcome.nodes and not outcome.away:
            print("the conductor knows no node yet")
    well = outcome.nodes and not outcome.away and all(node.durable and not node.held for node in outcome.nodes)
    return 0 if well else 1


def _digest(text: str) -> int:
    if not 0 < len(text) <= 16 or not all(digit in string.hexdigits for digit in text):
        raise ValueError(f"--namespace {text!r} is none: write at most 16 hex digits, as `transferd keys --json` does")
    return int(text, 16)


def main() -> None:
    if not sys.argv[1:] or sys.argv[1] in ("--help", "-h"):
        # The list tells what each is for, in the words of its own help.
        for name in COMMANDS:
            app[name]
    sys.exit(app())


if __name__ == "__main__":
    main()
