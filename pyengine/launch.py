"""`pyengine serve`: starts all parts of a cluster on this machine as child processes, and minds them.

    launch -- conductor, one daemon per node, workers, gateway      (each: python -m pyengine.child ...)

A child that dies is reported and restarted with a doubling pause; a launcher that dies takes its children along
(child.py); Ctrl-C ends all within 5 s, with an SSD within 9 s: first those that serve clients, then those that hold
memory for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from pyengine import env, keys, logs
from pyengine.cli import installed_version
from pyengine.config import ConfigError, DaemonConfig, GatewayConfig, ServeConfig, WorkerConfig
from pyengine.dashboard import lazy as dashboard
from pyengine.gateway.listener import check_reach, listen, reserve
from pyengine.scheduler.policies import UnknownName, find_admission, find_policy
from pyengine.scheduler.sharing import difference
from pyengine.scheduler.types import Namespace, Role
from pyengine.secret import claim_ssd, secret_file
from pyengine.tenants import quota_tables

log = logging.getLogger("pyengine.serve")

#: Exit status by which a child says that a restart would not help (cli.py, transferd, conductor).
IMPOSSIBLE = 2
#: Pause before a restart, seconds: doubles from the first to the last, starts anew after a life of STEADY seconds.
FIRST_PAUSE = 0.2
LAST_PAUSE = 5.0
STEADY = 30.0
#: Crashes before a part was ever ready after which the launcher gives up.
START_ATTEMPTS = 5
#: Seconds to end by themselves for gateway and workers, then for conductor and daemons; SIGKILL follows. The sum stays
#: below the promised 5 s. A daemon with an SSD is given more: it drains (DaemonConfig.drain_seconds), writes for 3 s at
#: most what is in DRAM only, and closes its log; one that is killed before has lost those blocks.
STOP_FRONT = 2.5
STOP_BACK = 2.0
STOP_SSD = 6.0
#: Level of a daemon's log by the launcher's: what it says at "info" the launcher says itself.
DAEMON_LOG = {"debug": "debug", "info": "warn", "warning": "warn", "error": "error"}
#: sockaddr_un holds 107 bytes and a zero; the longest name of a socket put into the run directory is /node-255.sock.
MAX_RUN_DIRECTORY = 107 - 14


class StartError(Exception):
    """The cluster cannot be started; what is wrong has been printed by the part.

    status: that of the launcher then: IMPOSSIBLE where the part said that a restart would not help.
    """

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One child process. front: it is ended before those that are not. fds: descriptors it inherits.

    `{ready}` in the arguments becomes the descriptor to which it writes one JSON line when it is ready.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    front: bool
    fds: tuple[int, ...] = ()


class Supervisor:
    """Runs parts until told to stop. report: gets one line per event, for people. stop_back: see STOP_BACK."""

    def __init__(self, parts: Sequence[Part], report: Callable[[str], None], stop_back: float = STOP_BACK) -> None:
        self._parts = list(parts)
        self._stop_back = stop_back
        self._report = report
        self._begun = time.monotonic()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ready: dict[str, asyncio.Event] = {part.name: asyncio.Event() for part in parts}
        #: What each part said when it was ready last.
        self.facts: dict[str, dict[str, Any]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the parts that are alive."""
        return {name: process.pid for name, process in self._processes.items()}

    async def start(self) -> None:
        """Starts all at once; returns when each has been ready. Raises StartError when one cannot."""
        self._tasks = [asyncio.create_task(self._mind(part), name=part.name) for part in self._parts]
        everybody = asyncio.create_task(self._all_ready())
        try:
            await asyncio.wait((everybody, self._failure), return_when=asyncio.FIRST_COMPLETED)
        finally:
            everybody.cancel()
        if self._failure.done():
            self._failure.result()

    async def _all_ready(self) -> None:
        for event in self._ready.values():
            await event.wait()

    async def stop(self) -> None:
        """Ends all parts, front first; returns when they are gone, about STOP_FRONT + stop_back later at the latest."""
        self._stopping = True
        for front, patience in ((True, STOP_FRONT), (False, self._stop_back)):
            names = {part.name for part in self._parts if part.front is front}
            tasks = [task for task in self._tasks if task.get_name() in names]
            for task in tasks:
                # A part between two lives is in its pause.
                if task.get_name() not in self._processes:
                    task.cancel()
            self._signal(names, signal.SIGTERM)
            if tasks:
                await asyncio.wait(tasks, timeout=patience)
            late = sorted(names & self._processes.keys())
            if late:
                self._report(f"{', '.join(late)} did not end in time: killed")
            self._signal(names, signal.SIGKILL)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._failure.done():
            self._failure.cancel()

    def _signal(self, names: set[str], number: signal.Signals) -> None:
        for name in names & self._processes.keys():
            self._processes[name].send_signal(number)

    async def _mind(self, part: Part) -> None:
        """One part through all its lives."""
        pause = FIRST_PAUSE
        crashes = 0
        while not self._stopping:
            born = time.monotonic()
            status = await self._live(part)
            if self._stopping:
                return
            if not self._ready[part.name].is_set():
                crashes += 1
                if status == IMPOSSIBLE or crashes >= START_ATTEMPTS:
                    self._fail(part.name, IMPOSSIBLE if status == IMPOSSIBLE else 1)
                    return
            if time.monotonic() - born >= STEADY:
                pause = FIRST_PAUSE
            self._report(f"{part.name} {_how(status)}: restarting it in {pause:.1f} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    def _fail(self, name: str, status: int) -> None:
        if not self._failure.done():
            self._failure.set_exception(StartError(f"{name} cannot start", status))

    async def _live(self, part: Part) -> int:
        """One life: spawned, ready, dead. Returns the exit status (negative: signal)."""
        process, reading = _spawn(part)
        self._processes[part.name] = process
        watching = asyncio.create_task(self._watch_ready(part, reading))
        try:
            await _exit_of(process.pid)
        finally:
            watching.cancel()
            status = process.wait()
            del self._processes[part.name]
        return status

    async def _watch_ready(self, part: Part, reading: int) -> None:
        loop = asyncio.get_running_loop()
        with os.fdopen(reading, "rb", 0) as pipe:
            stream = asyncio.StreamReader()
            transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
            try:
                line = await stream.readline()
            finally:
                transport.close()
        if line:
            again = " again" if self._ready[part.name].is_set() else ""
            self.facts[part.name] = facts = _facts(line)
            self._report(f"{part.name:<12} ready{again} after {time.monotonic() - self._begun:.1f} s{_shown(facts)}")
            self._ready[part.name].set()


def _spawn(part: Part) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a part; also returns the descriptor where its ready line will come."""
    reading, writing = os.pipe()
    try:
        # The child ties itself to the thread that forks it, so this must be the main one. -P: whatever lies in the
        # current directory is not imported.
        tied = (sys.executable, "-P", "-m", "pyengine.child", "--parent", str(os.getpid()), "--name", part.name)
        process = subprocess.Popen(
            [*tied, part.module, *(argument.replace("{ready}", str(writing)) for argument in part.arguments)],
            stdin=subprocess.DEVNULL,
            pass_fds=(writing, *part.fds),
            env=env.for_children(),
            # Ctrl-C in the terminal is for the launcher, which ends its children in order.
            process_group=0,
        )
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return process, reading


async def _exit_of(pid: int) -> None:
    """Returns when the child has ended; it is still to be waited for."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptor = os.pidfd_open(pid)
    try:
        loop.add_reader(descriptor, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _how(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _facts(line: bytes) -> dict[str, Any]:
    """What a ready line says."""
    try:
        facts = json.loads(line)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _shown(facts: dict[str, Any]) -> str:
    """What of it a person wants to see."""
    shown = [f"{facts[name]} {unit}".strip() for name, unit in (("address", ""), ("pages", "pages")) if name in facts]
    return f"  ({', '.join(shown)})" if shown else ""


# -- the cluster as parts ------------------------------------------------------------------------------------------


def plan_parts(
    config: ServeConfig, run: Path, secret: Path, listen_fd: int, daemons: str, dashboard_port: int = 0
) -> list[Part]:
    """All parts of one machine, their configuration written into `run`.

    config: derived; listen_fd: the gateway's socket; daemons: "host:port" where the conductor awaits daemons.
    dashboard_port: where the first of several gateways listens alone.
    """
    conductor = f"ipc://{run}/conductor"
    parts = [
        Part(
            name="conductor",
            module="pyengine.scheduler.cli",
            arguments=(
                *("serve", "--listen", conductor, "--daemons", daemons),
                *("--policy", config.policy, "--admission", config.admission, "--roles", config.roles),
                *("--secret-file", str(secret), "--state-dir", config.state_dir, "--ready-fd", "{ready}"),
                *(("--tls",) if config.tls else ()),
                *(("--log-json",) if config.log_json else ()),
            ),
            front=False,
        )
    ]
    quotas = quota_tables(keys.read_book(Path(config.keys_file)).tenants) if config.keys_file else ""
    for index in range(config.nodes):
        node = f"node-{index}"
        daemon = DaemonConfig(
            node=node,
            dram_bytes=config.dram_bytes,
            listen="127.0.0.1:0",
            transport=config.transport,
            socket=f"{run}/{node}.sock",
            conductor=daemons,
            secret_file=str(secret),
            tls=config.tls,
            ssd_dirs=(str(Path(config.ssd_dir).absolute() / node),) if config.ssd_dir else (),
            ssd_bytes=config.ssd_bytes,
            log_json=config.log_json,
        )
        file = _write(run / f"{node}.toml", (daemon.toml() + quotas).encode())
        parts.append(
            Part(
                name=f"transferd-{index}",
                module="pyengine._transferd",
                arguments=("--config", file, "--ready-fd", "{ready}", "--log", DAEMON_LOG[env.read().log_level]),
                front=False,
            )
        )
    for index, (name, role) in enumerate(config.placement()):
        node = f"node-{index % config.nodes}"
        worker = WorkerConfig(
            worker=name,
            role=role,
            node=node,
            daemon_socket=f"{run}/{node}.sock",
            conductor=conductor,
            work_endpoint=f"ipc://{run}/{name}",
            secret_file=str(secret),
            model=config.model,
            backend=config.backend_of(role),
            dtype=config.dtype_of(role),
            converted=config.converted,
            tp=config.tp_of(role),
            state_dir=config.state_dir,
            kv_bytes=config.kv_bytes,
            pages=config.pages,
            max_tokens_per_step=config.max_tokens_per_step,
            max_sequences=config.max_sequences,
            max_queue=config.max_queue,
            threads=config.threads,
            log_json=config.log_json,
        )
        file = _write(run / f"{name}.json", msgspec.json.encode(worker))
        parts.append(
            Part(
                name=name,
                module="pyengine.cli",
                arguments=("worker", "--config", file, "--ready-fd", "{ready}"),
                front=True,
            )
        )
    gateway = GatewayConfig(
        host=config.host,
        port=config.port,
        conductor=conductor,
        secret_file=str(secret),
        keys_file=config.keys_file,
        audit_log=config.audit_log,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
        cors_origin=config.cors_origin,
        slo_ttft=config.slo_ttft,
        slo_tbt=config.slo_tbt,
        slo_class=config.slo_class,
        otlp_endpoint=config.otlp_endpoint,
        log_json=config.log_json,
    )
    names = [f"gateway-{index}" for index in range(config.gateways)]
    if config.gateways > 1:
        own: dict[str, Any] = {"siblings": tuple(names), "siblings_dir": str(run), "dashboard_port": dashboard_port}
        gateway = msgspec.structs.replace(gateway, **own)
    for name in names:
        named = name if config.gateways > 1 else "gateway"
        # One is handed its socket, whose connections wait for its next life. Several have their own: to those that live
        # come all connections.
        handed = (listen_fd,) if config.gateways == 1 else ()
        file = _write(run / f"{named}.json", msgspec.json.encode(msgspec.structs.replace(gateway, gateway=name)))
        parts.append(
            Part(
                name=named,
                module="pyengine.cli",
                arguments=(
                    *("gateway", "--config", file, "--ready-fd", "{ready}"),
                    *(text for number in handed for text in ("--listen-fd", str(number))),
                ),
                front=True,
                fds=handed,
            )
        )
    return parts


def _write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def run_serve(config: ServeConfig) -> int:
    """Starts the cluster, prints where it is, minds it until SIGINT or SIGTERM; returns the exit status.

    Raises ConfigError for what cannot work, before anything is started.
    """
    config = config.derived()
    try:
        find_policy(config.policy)
        find_admission(config.admission)
    except UnknownName as error:
        raise ConfigError(str(error)) from error
    if not config.state_dir:
        config = msgspec.structs.replace(config, state_dir=str(env.read().state_dir))
    if not config.keys_file:
        config = msgspec.structs.replace(config, keys_file=str(Path(config.state_dir) / keys.NAME))
    asks = Path(config.keys_file).exists()
    keys.read_book(Path(config.keys_file))
    with contextlib.closing((listen if config.gateways == 1 else reserve)(config.host, config.port)) as listener:
        check_reach(listener, asks, bool(config.tls_cert))
        return asyncio.run(_serve(config, listener))


async def _serve(config: ServeConfig, listener: socket.socket) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    begun = time.monotonic()
    workers = ", ".join(f"{name} ({config.backend_of(role)})" for name, role in config.placement())
    _tell(f"pyengine {installed_version()}: {config.model}, {workers}, nodes: {config.nodes}")
    secret = secret_file(Path(config.state_dir))
    if config.ssd_dir:
        claim_ssd(Path(config.ssd_dir).absolute(), secret)
    with (
        run_directory(env.read().runtime_dir) as run,
        _reserved_port() as port,
        contextlib.closing(reserve(config.host, 0)) as own,
    ):
        several = config.gateways > 1 and dashboard.available()
        dashboard_port = own.getsockname()[1] if several else 0
        parts = plan_parts(config, run, secret, listener.fileno(), f"127.0.0.1:{port}", dashboard_port)
        supervisor = Supervisor(parts, _say, STOP_SSD if config.ssd_dir else STOP_BACK)
        try:
            starting = asyncio.create_task(supervisor.start())
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting
                expect_shared_kv(supervisor.facts)
                ready = asyncio.create_task(_announce(config, listener.getsockname()[0], begun))
                await stopped
                ready.cancel()
            starting.cancel()
        except StartError as error:
            text = f"{error}; what is wrong is said above"
            if logs.is_json():
                log.error(text)
            else:
                print(f"pyengine serve: error: {text}", file=sys.stderr)
            return error.status
        finally:
            await supervisor.stop()
    _say("all parts have ended")
    return 0


class Sharing(msgspec.Struct, frozen=True):
    """Of a worker's ready line: what KV it can share."""

    vocab_size: int
    namespace: Namespace


def expect_shared_kv(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ConfigError, naming the field, if any two workers cannot share KV. facts: see `Supervisor.facts`."""
    # By role, and by number within it: not in the order in which they were ready.
    names = sorted((name for name, each in facts.items() if "namespace" in each), key=_rank)
    workers = [(name, msgspec.convert(facts[name], Sharing)) for name in names]
    for (one, mine), (other, others) in pairwise(workers):
        field = difference(mine, others)
        if field is None:
            continue
        remedy = (
            "give all workers one --dtype, or add --convert-kv, --prefill-dtype and --decode-dtype"
            if "dtype" in field
            else "all workers must load the same model"
        )
        raise ConfigError(f"{one} and {other} cannot share KV: {field}; {remedy}")


def _rank(worker: str) -> tuple[int, int, str]:
    role, _, number = worker.rpartition("-")
    known = [each.value for each in Role]
    return known.index(role) if role in known else len(known), int(number) if number.isdecimal() else 0, worker


def _say(line: str) -> None:
    _tell(f"  {line}")


def _tell(line: str) -> None:
    """To who started it; for a collector of logs as one of them."""
    if logs.is_json():
        log.info(line.strip())
    else:
        print(line, flush=True)


async def _announce(config: ServeConfig, address: str, begun: float) -> None:
    """Says that all is ready when the gateway knows a model, with a line to try it. address: where it listens."""
    everywhere = address in ("0.0.0.0", "::")
    address = "127.0.0.1" if everywhere else address
    model = ""
    while not model:
        # The gateway may be between two lives, or not what answers there: then it is asked again.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            if (await _get_json(config, address, "/health"))[1]["status"] == "ok":
                status, models = await _get_json(config, address, "/v1/models")
                # Who needs a key is not told, and with one model need not say which.
                model = models["data"][0]["id"] if status == 200 else "its only one"
        await asyncio.sleep(0.05)
    # A gateway that asks for no keys answers to addresses of this machine only, not to names that somebody gave it.
    named = not everywhere and (status != 200 or config.host == "localhost")
    host = config.host if named else address
    base = f"{'https' if config.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{config.port}"
    message = {"role": "user", "content": "What is the capital of France?"}
    said = {"model": model} if status == 200 else {}
    body = json.dumps({**said, "messages": [message], "stream": True, "temperature": 0})
    headers = "-H 'Content-Type: application/json'" + ("" if status == 200 else ' -H "Authorization: Bearer $KEY"')
    hint = "" if status == 200 else " with an API key (pyengine keys)"
    _tell(f"\nReady at {base} after {time.monotonic() - begun:.1f} s.")
    if dashboard.available():
        _tell(f"Dashboard: {base}{dashboard.PATH}")
    if logs.is_json():
        return
    print(f"Try{hint}:\n", flush=True)
    print(f"curl -N {base}/v1/chat/completions {headers} -d '{body}'\n", flush=True)


async def _get_json(config: ServeConfig, address: str, path: str) -> tuple[int, Any]:
    """Status and body. Raises OSError, ValueError."""
    # Nothing is told to it and nothing secret is asked: whose certificate it is does not matter.
    context = None
    if config.tls_cert:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(address, config.port, ssl=context)
    try:
        # By a name that it always answers to, however its address is written.
        writer.write(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return int(head[9:12]), json.loads(body)
    finally:
        writer.close()


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port for the conductor, also for its next lives: bound and never listening, so that nobody is given it,
    while whoever binds it with SO_REUSEADDR may listen.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextlib.contextmanager
def run_directory(parent: Path) -> Iterator[Path]:
    """A private directory (0700) for sockets, gone afterwards; what killed launchers left behind goes too."""
    if len(str(parent)) + len("/pyengine-12345678") > MAX_RUN_DIRECTORY:
        parent = Path("/tmp")
    if not parent.is_dir():
        raise ConfigError(f"the directory {parent} for sockets does not exist: set XDG_RUNTIME_DIR to one that does")
    for old in parent.glob("pyengine-*"):
        with contextlib.suppress(OSError):
            if old.stat().st_uid == os.getuid() and not _is_held(old / "lock"):
                shutil.rmtree(old)
    run = Path(tempfile.mkdtemp(prefix="pyengine-", dir=parent))
    try:
        # Children do not inherit it (close-on-exec), so the lock ends with the launcher.
        with open(run / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield run
    finally:
        shutil.rmtree(run, ignore_errors=True)


def _is_held(lock: Path) -> bool:
    """Whether a living launcher holds this lock. Raises FileNotFoundError if it has not been made yet."""
    with open(lock, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
