"""`pyengine ...`: the command line. Importing it loads no framework; each command imports what it runs.

Exit status: 0 stopped on request, 1 failed, 2 impossible as asked (a restart would not help).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from pyengine import env, logs, origins
from pyengine.config import ConfigError, GatewayConfig, ServeConfig, WorkerConfig

DISTRIBUTION = "pyengine-llm"
IMPOSSIBLE = 2


def installed_version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "not installed"


app = App(
    name="pyengine",
    help="Serves large language models with prefill and decode apart, around one shared KV cache.",
    version=installed_version,
)

#: In the order of `--help`. They are imported when they are called.
app.command("pyengine.commands.chat:chat", name="chat", help="Talks to a model.")
app.command("pyengine.commands.bench:bench", name="bench", help="Loads a gateway and measures it.")
app.command("pyengine.commands.doctor:doctor", name="doctor", help="Checks this machine, and says what to do.")
app.command(
    "pyengine.commands.config:config",
    name="config",
    help="Shows what a command would run with, and where each value came from.",
)
app.command("pyengine.commands.keys:app", name="keys", help="API keys of a gateway, and what their tenants may have.")

ConfigFile = Annotated[Path | None, Parameter(name="--config")]


@app.command
def serve(
    *,
    model: str | None = None,
    backend: str | None = None,
    prefill_backend: str | None = None,
    decode_backend: str | None = None,
    dtype: str | None = None,
    prefill_dtype: str | None = None,
    decode_dtype: str | None = None,
    convert_kv: Annotated[bool | None, Parameter(negative=())] = None,
    tp: int | None = None,
    prefill_tp: int | None = None,
    decode_tp: int | None = None,
    prefill: int | None = None,
    decode: int | None = None,
    both: int | None = None,
    nodes: int | None = None,
    transport: str | None = None,
    tls: Annotated[bool | None, Parameter(negative=())] = None,
    dram_bytes: str | None = None,
    ssd_dir: str | None = None,
    ssd_bytes: str | None = None,
    kv_bytes: str | None = None,
    pages: int | None = None,
    host: str | None = None,
    port: int | None = None,
    gateways: int | None = None,
    keys_file: str | None = None,
    audit_log: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    cors_origin: Annotated[tuple[str, ...] | None, Parameter(negative=())] = None,
    policy: str | None = None,
    admission: str | None = None,
    roles: str | None = None,
    slo_ttft: float | None = None,
    slo_tbt: float | None = None,
    max_tokens_per_step: int | None = None,
    max_sequences: int | None = None,
    max_queue: int | None = None,
    threads: int | None = None,
    state_dir: str | None = None,
    otlp_endpoint: str | None = None,
    log_json: bool | None = None,
    file: ConfigFile = None,
) -> int:
    """Gateway, conductor, workers and daemons on this machine.

    Parameters
    ----------
    model
        Name (smollm2), Hugging Face folder, GGUF file or hub name.
    backend
        torch, jax, or fake (computes no model; for tests).
    prefill_backend
        Of the prefill workers (default: backend).
    decode_backend
        Of the decode workers (default: backend). KV crosses between torch and jax.
    dtype
        In which workers compute and keep KV: float32, bfloat16, or auto (default: float32 on CPUs, else bfloat16).
    prefill_dtype
        Of the prefill workers (default: dtype).
    decode_dtype
        Of the decode workers (default: dtype).
    convert_kv
        Prefill workers convert KV to the dtype of the decode workers, if they differ.
    tp
        Over how many processes (torch) or devices (jax) a worker spreads each layer (default 1).
    prefill_tp
        Of the prefill workers (default: tp). It may differ from the decode workers'.
    decode_tp
        Of the decode workers (default: tp).
    prefill
        Prefill workers. With no number named: 1 prefill and 1 decode worker.
    decode
        Decode workers.
    both
        Workers that do both.
    nodes
        Daemons, each with its pool; worker k sits on node k mod nodes.
    transport
        How blocks cross between nodes: auto, shm, rdma or tcp.
    tls
        Daemons and conductor encrypt what travels by TCP.
    dram_bytes
        Pool arena per node, for example 2GiB (default: the lesser of 2 GiB and a tenth of the memory).
    ssd_dir
        Directory where nodes keep KV that survives a restart (default: none does). Needs ssd_bytes.
    ssd_bytes
        What each node may take there, for example 50GiB.
    kv_bytes
        Device memory for pages per worker (same default).
    pages
        Device pages per worker, instead of kv_bytes.
    host
        Where the gateway listens (default 127.0.0.1; any other needs API keys: pyengine keys).
    port
        Default 8000.
    gateways
        Gateway processes that listen there (default 1): more, where one core is too few for all streams.
    keys_file
        API keys (default: keys.json in the state directory; once it exists, everybody needs one).
    audit_log
        File that gets one line for each request of a key (default: none).
    tls_cert
        Certificate (PEM), for HTTPS. Needs tls_key.
    tls_key
        Its private key (PEM).
    cors_origin
        Origin of web pages that may use the gateway, as https://example.org; may be given several times.
    policy
        How the conductor chooses: random, round-robin, least-loaded, least-queue-time, cache-aware, kvcache-centric
        (default), least-harm; with settings if need be, as in kvcache-centric:threshold=2.
    admission
        none (default), at-arrival, patient, predictive, predictive-system: refuse what would miss an objective.
    roles
        fixed (default) or auto: workers take on the role that is short.
    slo_ttft
        Objective for the time to the first token, seconds.
    slo_tbt
        Objective for the time between tokens, seconds.
    max_tokens_per_step
        Tokens one step computes at most.
    max_sequences
        Sequences a worker runs at once.
    max_queue
        Requests a worker holds.
    threads
        Of each worker's backend (default: cores divided by workers).
    state_dir
        Secret and converted models (default: PYENGINE_STATE_DIR, else ~/.local/state/pyengine).
    otlp_endpoint
        OpenTelemetry collector that traces are sent to, as http://host:4318 (extra otel; default: none).
    log_json
        Log one JSON object a line, all processes.
    file
        TOML file with the same settings, underscores for dashes (default: PYENGINE_CONFIG). Flags override the
        environment (PYENGINE_DRAM_BYTES), which overrides the file: pyengine config shows what comes of it.
    """
    flags = {name: value for name, value in locals().items() if name != "file"}

    def run() -> int:
        from pyengine.launch import run_serve

        config = origins.load(ServeConfig, file, flags)
        logs.begin("serve", env.read().log_level, as_json=config.log_json)
        config.check()
        return run_serve(config)

    return guarded("serve", run)


@app.command
def worker(
    *,
    file: Annotated[Path, Parameter(name="--config")],
    backend: str | None = None,
    dtype: str | None = None,
    tp: int | None = None,
    log_json: bool | None = None,
    ready_fd: int | None = None,
) -> int:
    """One worker of a deployment.

    Parameters
    ----------
    file
        TOML or JSON file with the fields of pyengine.config.WorkerConfig; flags override it.
    backend
        torch, jax or fake.
    dtype
        float32, bfloat16 or auto.
    tp
        Over how many processes (torch) or devices (jax) each layer is spread.
    log_json
        Log one JSON object a line.
    ready_fd
        Descriptor that gets one JSON line when the worker accepts work.
    """
    flags = {"backend": backend, "dtype": dtype, "tp": tp, "log_json": log_json}

    def run() -> int:
        from pyengine.worker.service import run_worker

        config = origins.load(WorkerConfig, file, flags)
        config.check()
        logs.begin(config.worker, env.read().log_level, as_json=config.log_json)
        return run_worker(config, _announcer(ready_fd))

    return guarded("worker", run)


@app.command
def gateway(
    *,
    gateway: str | None = None,
    host: str | None = None,
    port: int | None = None,
    conductor: str | None = None,
    secret_file: str | None = None,
    keys_file: str | None = None,
    audit_log: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    cors_origin: Annotated[tuple[str, ...] | None, Parameter(negative=())] = None,
    otlp_endpoint: str | None = None,
    log_json: bool | None = None,
    file: ConfigFile = None,
    listen_fd: int | None = None,
    ready_fd: int | None = None,
) -> int:
    """One gateway of a deployment.

    Parameters
    ----------
    gateway
        Its name, unique in the cluster.
    host
        Where it listens.
    port
        Where it listens.
    conductor
        ZeroMQ endpoint of the conductor.
    secret_file
        The cluster secret.
    keys_file
        API keys (pyengine keys). Without it nobody is asked for one, and only this machine is listened to.
    audit_log
        File that gets one line for each request of a key.
    tls_cert
        Certificate (PEM), for HTTPS. Needs tls_key.
    tls_key
        Its private key (PEM).
    cors_origin
        Origin of web pages that may use the gateway; may be given several times.
    otlp_endpoint
        OpenTelemetry collector that traces are sent to, as http://host:4318 (extra otel; default: none).
    log_json
        Log one JSON object a line.
    file
        TOML or JSON file with the fields of pyengine.config.GatewayConfig; flags override it.
    listen_fd
        A listening socket that is open already, instead of host and port.
    ready_fd
        Descriptor that gets one JSON line when the address answers.
    """
    flags = {name: value for name, value in locals().items() if name not in ("file", "listen_fd", "ready_fd")}

    def run() -> int:
        from pyengine.gateway.listener import listen
        from pyengine.gateway.server import run_gateway

        config = origins.load(GatewayConfig, file, flags)
        logs.begin(config.gateway, env.read().log_level, as_json=config.log_json)
        config.check()
        listener = (
            listen(config.host, config.port, shared=bool(config.siblings))
            if listen_fd is None
            else socket.socket(fileno=listen_fd)
        )
        return run_gateway(config, listener, _announcer(ready_fd))

    return guarded("gateway", run)


def _announcer(descriptor: int | None) -> Callable[[dict[str, Any]], None]:
    """Writes what it is given as one JSON line to `descriptor`, and closes it."""

    def announce(facts: dict[str, Any]) -> None:
        if descriptor is not None:
            with os.fdopen(descriptor, "w") as stream:
                stream.write(json.dumps(facts) + "\n")

    return announce


def guarded(command: str, run: Callable[[], int]) -> int:
    """Runs a command; an impossible wish becomes one readable line and status 2."""
    try:
        logs.begin(command, env.read().log_level)
        return run()
    except (ConfigError, ValueError, MemoryError) as error:
        _complain(command, error)
        return IMPOSSIBLE
    except Exception as error:
        from pyengine._native import GiveUpError, RetryError

        if not isinstance(error, GiveUpError | RetryError):
            raise
        _complain(command, error)
        return IMPOSSIBLE if isinstance(error, GiveUpError) else 1


def _complain(command: str, error: Exception) -> None:
    if logs.is_json():
        logging.getLogger("pyengine").error("%s", error)
        return
    # In one write: two workers that fail for one reason share the terminal.
    sys.stderr.write(f"pyengine {command}: error: {error}\n")


def main() -> None:
    try:
        sys.exit(app(exit_on_error=False))
    except CycloptsError:
        # It has said what is wrong with the command line, and what is near.
        sys.exit(IMPOSSIBLE)


if __name__ == "__main__":
    main()
