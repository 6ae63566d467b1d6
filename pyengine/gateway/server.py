"""The gateway process: keys, socket, uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from pyengine import _native
from pyengine.config import GatewayConfig
from pyengine.dashboard import lazy
from pyengine.gateway.app import create_app
from pyengine.gateway.audit import AuditLog
from pyengine.gateway.auth import Door
from pyengine.gateway.listener import check_reach, listen
from pyengine.gateway.protocol import GuardedProtocol
from pyengine.gateway.service import Service
from pyengine.ledger import SharedLedger
from pyengine.secret import read_secret

#: Seconds open streams get when the process is asked to stop; the launcher waits a little longer.
GRACE = 1


class ClusterKeys:
    """Block keys by the native code."""

    def __init__(self, hash_key: bytes) -> None:
        self._hash_key = hash_key

    def root(self, namespace: bytes, salt: bytes = b"") -> bytes:
        return _native.root_key(namespace, b"", salt, self._hash_key)

    def blocks(self, tokens: bytes, block_tokens: int, root: bytes) -> bytes:
        return _native.block_keys(tokens, block_tokens, root, self._hash_key)


class Server(uvicorn.Server):
    """uvicorn's server, but a signal ends it with status 0 and is not raised again."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


def http_config(app: ASGIApp, config: GatewayConfig) -> uvicorn.Config:
    """How uvicorn serves this gateway."""
    return uvicorn.Config(
        app,
        http=GuardedProtocol,
        # Its lines are ours, in their form.
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="websockets-sansio" if lazy.available() else "none",
        lifespan="on",
        timeout_graceful_shutdown=GRACE,
        ssl_certfile=config.tls_cert or None,
        ssl_keyfile=config.tls_key or None,
    )


def run_gateway(
    config: GatewayConfig, listener: socket.socket, ready: Callable[[dict[str, object]], None] = lambda _: None
) -> int:
    """Serves on `listener` until SIGTERM or SIGINT; returns the exit status.

    ready: called once when the address answers, with its host and port. Raises ConfigError for an address that others
    reach while nobody needs a key.
    """
    secret = read_secret(Path(config.secret_file))
    keys = ClusterKeys(_native.derive_key(secret, "hash"))
    audit = AuditLog(Path(config.audit_log)) if config.audit_log else None
    ledger = None
    if config.siblings:
        folder = Path(config.siblings_dir) / "usage"
        ledger = SharedLedger(folder, len(config.siblings), config.siblings.index(config.gateway))
    keys_file = Path(config.keys_file) if config.keys_file else None
    door = Door(keys_file, audit, config.cors_origin, ledger=ledger)
    check_reach(listener, door.asks, bool(config.tls_cert))
    own = []
    if config.dashboard_port and config.gateway == config.siblings[0]:
        own.append(listen(config.host, config.dashboard_port, shared=True))
    return serve(Service(config, _native.derive_key(secret, "session"), keys), listener, ready, door, own)


def serve(
    service: Service,
    listener: socket.socket,
    ready: Callable[[dict[str, object]], None] = lambda _: None,
    door: Door | None = None,
    own: Sequence[socket.socket] = (),
) -> int:
    """As `run_gateway`, of a service. door: as `create_app` has it. own: where it listens, too."""
    server = Server(http_config(create_app(service, door), service.config))

    async def run() -> None:
        serving = asyncio.create_task(server.serve(sockets=[listener, *own]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            # What was imported is never garbage: no collection is to look through it while clients wait.
            gc.freeze()
            host, port = listener.getsockname()[:2]
            ready({"gateway": service.config.gateway, "host": host, "port": port})
        await serving

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(run())
    return 0
