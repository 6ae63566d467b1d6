"""`conductor`: the scheduler's command line. `serve` runs the global scheduler alone."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import cyclopts

from pyengine import _native, env
from pyengine.config import ConfigError
from pyengine.secret import read_secret, secret_file

from .conductor import Conductor
from .links import LinkError
from .policies import UnknownName
from .service import Service

#: Exit status by which a process says that to start it again the same way would not help.
IMPOSSIBLE = 2

app = cyclopts.App(
    name="conductor", help="The global scheduler: it sends each request where its KV is, or moves the KV."
)


@app.command
def serve(
    *,
    listen: str,
    daemons: str = "127.0.0.1:0",
    policy: str = "kvcache-centric",
    admission: str = "none",
    seed: int = 0,
    secret: Annotated[Path | None, cyclopts.Parameter(name="--secret-file")] = None,
    state_dir: Path | None = None,
    tls: Annotated[bool, cyclopts.Parameter(negative=())] = False,
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
        random, round-robin, least-loaded, kvcache-centric, or an entry point of the group pyengine.policies.
    admission
        none, or at-arrival: refuse what would miss its latency objective.
    seed
        Of the numbers that policies draw.
    secret
        The cluster secret; by default the one in the state directory, made if there is none.
    state_dir
        Where the cluster's secret is kept.
    tls
        Daemons report over TLS 1.3: start them with --tls too. Gateways and workers have CURVE.
    ready_fd
        Descriptor that gets one JSON line, {"endpoint": ..., "daemons": ...}, when it serves; by default stdout.
    """
    try:
        environment = env.read()
        logging.basicConfig(level=environment.log_level.upper(), format="conductor %(levelname)s %(name)s: %(message)s")
        key = read_secret(secret or secret_file(state_dir or environment.state_dir))
        conductor = Conductor(policy=policy, admission=admission, seed=seed)
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
        service.run()
    finally:
        service.close()
    return 0


def main() -> None:
    sys.exit(app())


if __name__ == "__main__":
    main()
