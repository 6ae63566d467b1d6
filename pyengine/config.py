"""Settings as data: one frozen struct per process, each field with its unit, default and the reason for the default.

A setting has one name everywhere: `dram_bytes` here and in TOML is `--dram-bytes` on the command line and
PYENGINE_DRAM_BYTES in the environment: origins.py reads them. 0 stands for "derive it" only where the field says so;
`derived()` fills these in.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import ssl
from importlib.util import find_spec
from pathlib import Path

import msgspec

from pyengine.backends import BACKENDS, DTYPES, MAX_SEQUENCES, MAX_TOKENS, lacking
from pyengine.scheduler.types import Role, Slo

GIB = 1 << 30
TRANSPORTS = ("auto", "shm", "tcp", "rdma")
ROLES = ("fixed", "auto")
#: What clients send as `service_tier` when they mean no class in particular (OpenAI's words).
DEFAULT_TIERS = ("auto", "default")
MAX_CLASSES = 64
#: Gateways of one machine: each is a core's worth of streams, and each tells all others what it counts.
MAX_GATEWAYS = 16
#: What a node's SSD space must hold at least: four of the smallest segments (as transferd has it).
SSD_MINIMUM = 16 << 20
#: File systems of the kernel's own, where nothing is stored.
NO_DISKS = ("/dev", "/proc", "/sys")

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
_ORIGIN = re.compile(r"https?://[a-z0-9.\-\[\]:]+")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class ConfigError(ValueError):
    """A setting is impossible; the text names it and says what to do. Exit status 2: a restart would not help."""


def parse_size(value: str | int) -> int:
    """Bytes from "2GiB", "500MB" or a plain number. Raises ConfigError."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = _SIZE.fullmatch(str(value))
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(
                f"{value!r} is not a size; write a number of bytes, or one with KiB, MiB, GiB (or kB, MB, GB)"
            )
        size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size < 0:
        raise ConfigError(f"a size cannot be negative: {value}")
    return size


def memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def default_pool_bytes() -> int:
    """2 GiB, but never more than a tenth of the memory: several nodes and workers share one machine by default."""
    return min(2 * GIB, memory_bytes() // 10)


class SloClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Objectives that a request chooses by its `service_tier`. Seconds; 0: none.

    ttft: to the first token. tbt: between tokens. deadline: to the last token, after which the answer is worthless.
    """

    name: str
    ttft: float = 0.0
    tbt: float = 0.0
    deadline: float = 0.0

    def slo(self) -> Slo:
        return Slo(self.ttft or None, self.tbt or None, self.deadline or None)


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`pyengine serve`: everything on this machine.

    model: name, folder or file. The default comes with a small package, so that it works without a hub. backend: who
    computes: torch, jax, or fake, which computes no model (tests, benchmarks). prefill_backend, decode_backend: of the
    workers of one role; "": as backend. dtype: in which a worker computes and keeps its KV; auto: float32 on CPUs,
    bfloat16 on accelerators. prefill_dtype, decode_dtype: of the workers of one role; "": as dtype. convert_kv: prefill
    workers convert KV to the dtype of the decode workers. Off, because tokens then depend on which blocks were reused.
    tp: over how many processes (torch) or devices (jax) a worker spreads each layer. prefill_tp, decode_tp: of the
    workers of one role; 0: as tp. prefill, decode, both: numbers of workers of each role. None named at all: one
    prefill and one decode worker. nodes: daemons (each with its own pool); worker k sits on node k mod nodes, prefill
    workers first. One: hand-off through a shared arena, the fastest on one machine. transport: how blocks cross between
    nodes. auto takes the best that stands: shm on one host, then rdma, then tcp. tls: daemons and conductor encrypt
    what travels by TCP (TLS 1.3); rdma cannot be encrypted and is not used then. dram_bytes: pool arena per node,
    bytes; 0: the lesser of 2 GiB and a tenth of the memory. ssd_dir: directory where nodes keep KV that survives a
    restart, each in a folder of its own; "": none does. ssd_bytes: what each node may take there, bytes. kv_bytes:
    device pages per worker, bytes; 0: as dram_bytes. pages: device pages per worker; 0: derived from kv_bytes. host,
    port: where the gateway listens. Loopback: what others may reach asks for keys. gateways: processes that listen
    there, for more streams than one core carries. keys_file: API keys; "": keys.json in the state directory. Once it
    exists, everybody needs one. audit_log: file that gets one line for each request of a key; "": none.
    tls_cert, tls_key: certificate and its private key (PEM), for HTTPS; "": HTTP. cors_origin: origins of web pages
    that may use the gateway. None: it is for programs, not for pages of strangers. policy, admission: how
    the conductor chooses and refuses. kvcache-centric is Mooncake's Algorithm 1; admission is off because its forecast
    needs a measured machine. roles: fixed, or auto: the conductor tells workers to take on the role that is short.
    Fixed until that is measured. slo_ttft, slo_tbt: latency objectives of requests that choose no class, seconds; 0:
    none. Admission refuses what would miss them. slo_class: objectives that requests may choose by name (their
    `service_tier`). max_tokens_per_step, max_sequences, max_queue, threads: see WorkerConfig. threads 0: cores divided
    by workers. state_dir: secret and converted models; "": PYENGINE_STATE_DIR, else ~/.local/state/pyengine.
    otlp_endpoint: OpenTelemetry collector that gateways send traces to, as http://host:4318; "": none.
    log_json: all processes log one JSON object a line.
    """

    model: str = "smollm2"
    backend: str = "torch"
    prefill_backend: str = ""
    decode_backend: str = ""
    dtype: str = "auto"
    prefill_dtype: str = ""
    decode_dtype: str = ""
    convert_kv: bool = False
    tp: int = 1
    prefill_tp: int = 0
    decode_tp: int = 0
    prefill: int = 0
    decode: int = 0
    both: int = 0
    nodes: int = 1
    transport: str = "auto"
    tls: bool = False
    dram_bytes: int = 0
    ssd_dir: str = ""
    ssd_bytes: int = 0
    kv_bytes: int = 0
    pages: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    gateways: int = 1
    keys_file: str = ""
    audit_log: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    cors_origin: tuple[str, ...] = ()
    policy: str = "kvcache-centric"
    admission: str = "none"
    roles: str = "fixed"
    slo_ttft: float = 0.0
    slo_tbt: float = 0.0
    slo_class: tuple[SloClass, ...] = ()
    max_tokens_per_step: int = MAX_TOKENS
    max_sequences: int = MAX_SEQUENCES
    max_queue: int = 1024
    threads: int = 0
    state_dir: str = ""
    otlp_endpoint: str = ""
    log_json: bool = False

    def check(self) -> None:
        """Raises ConfigError for what cannot work, with what to do."""
        self._check_backends()
        check_traces(self.otlp_endpoint)
        _one_of("transport", self.transport, TRANSPORTS)
        if self.tls and self.transport == "rdma":
            raise ConfigError("rdma is not encrypted: use --transport auto or tcp with --tls, or leave --tls out")
        for name in (
            "prefill",
            "decode",
            "both",
            "dram_bytes",
            "kv_bytes",
            "pages",
            "threads",
            "slo_ttft",
            "slo_tbt",
            "prefill_tp",
            "decode_tp",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, not {getattr(self, name)}")
        if not 1 <= self.gateways <= MAX_GATEWAYS:
            raise ConfigError(f"gateways must be 1 to {MAX_GATEWAYS}, not {self.gateways}")
        for name in ("slo_ttft", "slo_tbt"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name} must be a number of seconds, not {getattr(self, name)}")
        check_classes(self.slo_class)
        check_front(self.tls_cert, self.tls_key, self.cors_origin)
        _one_of("roles", self.roles, ROLES)
        for name in ("nodes", "max_tokens_per_step", "max_sequences", "max_queue", "tp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.port < 65536:
            raise ConfigError(f"port must be between 1 and 65535, not {self.port}")
        if self.admission != "none" and not self.slo_ttft and not self.slo_tbt and not self.slo_class:
            raise ConfigError(
                f"admission {self.admission} refuses what would miss an objective: name one (--slo-ttft SECONDS)"
            )
        if (self.prefill == 0) != (self.decode == 0) and self.both == 0:
            missing = "decode" if self.decode == 0 else "prefill"
            raise ConfigError(f"no worker would {missing}: add --{missing} 1 (or use --both N)")
        if self.dram_bytes > memory_bytes():
            raise ConfigError(
                f"dram_bytes is {self.dram_bytes}, and this machine has {memory_bytes()} bytes of memory: ask for less"
            )
        check_ssd(self.ssd_dir, self.ssd_bytes)
        if len(self.placement()) > 256 or self.nodes > 256:
            raise ConfigError("more than 256 workers or nodes on one machine: a mistake, surely")
        if self.nodes > len(self.placement()):
            raise ConfigError(
                f"{self.nodes} nodes for {len(self.placement())} workers: some would have none; use fewer --nodes"
            )

    def _check_backends(self) -> None:
        for name in ("backend", "prefill_backend", "decode_backend"):
            if getattr(self, name):
                _one_of(name, getattr(self, name), tuple(BACKENDS))
        for name in ("dtype", "prefill_dtype", "decode_dtype"):
            if getattr(self, name):
                _one_of(name, getattr(self, name), ("auto", *DTYPES))
        roles = {role for _, role in self.placement()}
        for role in (Role.PREFILL, Role.DECODE):
            for what in ("backend", "dtype", "tp"):
                if getattr(self, f"{role.value}_{what}") and role not in roles:
                    raise ConfigError(
                        f"{role.value}_{what} is for {role.value} workers, and there are none: add --{role.value} 1,"
                        f" or name a {what} for all (--{what})"
                    )
        backends = {self.backend_of(role) for role in roles}
        if "fake" in backends and len(backends) > 1:
            raise ConfigError("the fake backend computes no model, so no other can use its KV: give all workers fake")
        for backend in sorted(backends):
            if reason := lacking(backend):
                raise ConfigError(reason)
        if any(self.tp_of(role) > 1 for role in roles):
            if "fake" in backends:
                raise ConfigError("the fake backend has no layers that could be spread: leave out --tp")
            if self.convert_kv:
                raise ConfigError("convert_kv is for workers of one process: leave out --convert-kv or --tp")
        dtypes = self.dtype_of(Role.PREFILL), self.dtype_of(Role.DECODE)
        if self.convert_kv:
            if Role.BOTH in roles:
                raise ConfigError("convert_kv is for prefill and decode workers apart: leave out --both")
            if "auto" in dtypes:
                raise ConfigError(
                    "convert_kv needs the dtypes by name, as they name what is cached: add --prefill-dtype float32"
                    " --decode-dtype bfloat16, say"
                )
        elif Role.PREFILL in roles and "auto" not in dtypes and dtypes[0] != dtypes[1]:
            raise ConfigError(
                f"prefill workers keep KV in {dtypes[0]}, decode workers in {dtypes[1]}: give both one --dtype, or add"
                " --convert-kv, which rounds"
            )

    def backend_of(self, role: Role) -> str:
        """Who computes for workers of this role."""
        return {Role.PREFILL: self.prefill_backend, Role.DECODE: self.decode_backend}.get(role) or self.backend

    def dtype_of(self, role: Role) -> str:
        """In which dtype workers of this role compute, or "auto"."""
        return {Role.PREFILL: self.prefill_dtype, Role.DECODE: self.decode_dtype}.get(role) or self.dtype

    def tp_of(self, role: Role) -> int:
        """Over how many processes or devices workers of this role spread each layer."""
        return {Role.PREFILL: self.prefill_tp, Role.DECODE: self.decode_tp}.get(role) or self.tp

    @property
    def converted(self) -> tuple[str, str] | None:
        """Dtypes of KV at prefill and decode workers, if the one is converted to the other."""
        dtypes = self.dtype_of(Role.PREFILL), self.dtype_of(Role.DECODE)
        return dtypes if self.convert_kv and dtypes[0] != dtypes[1] else None

    def placement(self) -> list[tuple[str, Role]]:
        """(name, role) of every worker, in placement order."""
        counts = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.BOTH: self.both}
        if not any(counts.values()):
            counts[Role.PREFILL] = counts[Role.DECODE] = 1
        return [(f"{role.value}-{index}", role) for role, count in counts.items() for index in range(count)]

    def derived(self) -> ServeConfig:
        """The same with every "derive it" filled in for this machine."""
        workers = len(self.placement())
        return msgspec.structs.replace(
            self,
            dram_bytes=self.dram_bytes or default_pool_bytes(),
            kv_bytes=self.kv_bytes or default_pool_bytes(),
            threads=self.threads or max(1, (os.cpu_count() or 1) // workers),
        )


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process.

    worker: its name, unique in the cluster. role: what it accepts. node: id of its daemon.
    daemon_socket: path of that daemon's unix socket. conductor: ZeroMQ endpoint of the conductor.
    work_endpoint: ZeroMQ endpoint this worker binds and gateways connect to. secret_file: the cluster secret.
    model, backend, dtype, tp, state_dir, log_json: as in ServeConfig.
    converted: dtypes of KV at prefill and at decode workers, where the first is converted to the second. This worker's
    own is one of them.
    kv_bytes: budget for device pages of all its processes together, bytes; pages: their number, 0: derived by
    `device_pages`.
    max_tokens_per_step: tokens one step computes at most. 512: a step stays short enough for the decodes beside it.
    max_sequences: sequences that run at once. max_queue: requests accepted and not yet running.
    pinned: it keeps its role, also where the conductor shifts roles.
    threads: threads of the backend, of all its processes together; 0: the backend's own choice.
    """

    worker: str
    role: Role
    node: str
    daemon_socket: str
    conductor: str
    work_endpoint: str
    secret_file: str
    model: str
    backend: str
    dtype: str = "auto"
    converted: tuple[str, str] | None = None
    tp: int = 1
    state_dir: str
    kv_bytes: int = 0
    pages: int = 0
    max_tokens_per_step: int = MAX_TOKENS
    max_sequences: int = MAX_SEQUENCES
    max_queue: int = 1024
    pinned: bool = False
    threads: int = 0
    log_json: bool = False

    def check(self) -> None:
        """Raises ConfigError for what cannot work, with what to do."""
        if re.fullmatch(r"tcp://(\*|0\.0\.0\.0|\[?::\]?):.*|tcp://.*:(\*|0)", self.work_endpoint):
            raise ConfigError(
                f"work_endpoint is {self.work_endpoint!r}: gateways connect to it as it is written, so name "
                "this machine's address and a port, as tcp://10.0.0.2:7610"
            )

    def device_pages(self, block_bytes: int, block_tokens: int, max_positions: int) -> int:
        """Pages to allocate: `pages`, else what fits `kv_bytes`, but not more than all sequences can ever fill."""
        if self.pages:
            return self.pages
        wanted = self.max_sequences * -(-max_positions // block_tokens)
        fitting = (self.kv_bytes or default_pool_bytes()) // block_bytes
        if fitting < 1:
            raise ConfigError(f"kv_bytes is {self.kv_bytes}, and one block takes {block_bytes} bytes: give more")
        return min(wanted, fitting)


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What `transferd --config` reads (TOML).

    listen: "host:port" for peers (port 0: any). transport: how blocks travel to them. socket: path for local workers.
    conductor: "host:port" of its endpoint for daemons. dram_bytes: size of the arena.
    tls: what travels by TCP is encrypted, to peers and to the conductor.
    ssd_dirs: directories that keep blocks; ssd_bytes: what they may take together.
    drain_seconds: what is held is waited for so long when it ends. 1: its launcher has ended all workers before it, so
        nobody is left to ask for more, and only pushes and reads that are nearly over are worth the wait.
    log_json: its log is one JSON object a line.
    """

    node: str
    dram_bytes: int
    listen: str
    transport: str = "auto"
    socket: str
    conductor: str
    secret_file: str
    tls: bool = False
    ssd_dirs: tuple[str, ...] = ()
    ssd_bytes: int = 0
    drain_seconds: int = 1
    log_json: bool = False

    def toml(self) -> str:
        # A TOML basic string is a JSON string, for everything a path or an address can hold; so is an array of them.
        return "".join(
            f"{name} = {msgspec.json.encode(value).decode()}\n"
            for name, value in msgspec.structs.asdict(self).items()
            if value or not name.startswith(("ssd_", "log_"))
        )


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway process.

    gateway: its name, unique in the cluster. host, port: where it listens. conductor: ZeroMQ endpoint. secret_file: the
    cluster secret, of which it derives the session and the hash key only.
    keys_file, audit_log, tls_cert, tls_key, cors_origin: as in ServeConfig; no keys_file: nobody is asked for a key.
    patience: seconds a request waits for an absent conductor or worker before 503 (design: 5 s).
    request_timeout: seconds from arrival after which a request is worthless. 600: a long answer on a slow machine.
    slo_ttft, slo_tbt, slo_class: as in ServeConfig.
    max_requests: requests held at once, beyond it 429; 4096 streams cost a few hundred MiB at most.
    max_body_bytes: size of a request body. 16 MiB: a million-token prompt, with room.
    otlp_endpoint, log_json: as in ServeConfig. siblings: names of all gateways that listen at its address, itself among
    them; none: it is alone. siblings_dir: directory, private to them, where they meet and count together.
    dashboard_port: where the first of them listens alone, as a page and its socket must come to one process; the others
    send who wants the dashboard there. `pyengine serve` sets all three.
    """

    gateway: str = "gateway-0"
    host: str = "127.0.0.1"
    port: int = 8000
    conductor: str
    secret_file: str
    keys_file: str = ""
    audit_log: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    cors_origin: tuple[str, ...] = ()
    patience: float = 5.0
    request_timeout: float = 600.0
    slo_ttft: float = 0.0
    slo_tbt: float = 0.0
    slo_class: tuple[SloClass, ...] = ()
    max_requests: int = 4096
    max_body_bytes: int = 16 << 20
    otlp_endpoint: str = ""
    log_json: bool = False
    siblings: tuple[str, ...] = ()
    siblings_dir: str = ""
    dashboard_port: int = 0

    def check(self) -> None:
        """Raises ConfigError for what cannot work, with what to do."""
        check_classes(self.slo_class)
        check_front(self.tls_cert, self.tls_key, self.cors_origin)
        check_traces(self.otlp_endpoint)
        if self.siblings and (self.gateway not in self.siblings or not self.siblings_dir):
            raise ConfigError(f"siblings: {self.gateway} must be one of them, and siblings_dir says where they meet")

    def slo(self, tier: str | None) -> Slo | None:
        """Objectives of requests with this `service_tier`; None: there is no such class."""
        if tier is None or tier in DEFAULT_TIERS:
            return Slo(self.slo_ttft or None, self.slo_tbt or None)
        return next((known.slo() for known in self.slo_class if known.name == tier), None)


def check_traces(endpoint: str) -> None:
    """Raises ConfigError if traces cannot be sent there."""
    if not endpoint:
        return
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", endpoint):
        raise ConfigError(f"otlp_endpoint is {endpoint!r}: give the collector's address, as http://127.0.0.1:4318")
    try:
        there = find_spec("opentelemetry.exporter.otlp.proto.http") and find_spec("opentelemetry.sdk")
    except ImportError:
        there = None
    if there is None:
        raise ConfigError(
            "otlp_endpoint: traces need OpenTelemetry: install the extra `otel` "
            "(opentelemetry-sdk, opentelemetry-exporter-otlp-proto-http), or leave it out"
        )


def check_ssd(directory: str, size: int) -> None:
    """Raises ConfigError if KV cannot be kept there, as far as can be told without touching it."""
    if not directory and not size:
        return
    if not directory:
        raise ConfigError(
            f"ssd_bytes is {size}, and no directory is named for them: add --ssd-dir DIRECTORY (ssd_dir=)"
        )
    if not size:
        raise ConfigError(
            f"ssd_dir is {directory}, and nothing says how much it may take: add --ssd-bytes 10GiB (ssd_bytes=), say"
        )
    if size < SSD_MINIMUM:
        raise ConfigError(f"ssd_bytes is {size}, and a node's SSD space holds nothing below {SSD_MINIMUM}: give more")
    path = Path(directory).absolute()
    if any(path.is_relative_to(place) for place in NO_DISKS):
        raise ConfigError(f"ssd_dir is {directory}, which is no disk: nothing there survives; name a directory on one")


def check_front(cert: str, key: str, origins: tuple[str, ...]) -> None:
    """Raises ConfigError for a certificate that cannot be used, or an origin that no browser sends."""
    if bool(cert) != bool(key):
        raise ConfigError("a certificate needs its key and the reverse: give both --tls-cert FILE and --tls-key FILE")
    if cert:
        try:
            # An empty password: who is asked for one is nobody's terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=str)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"cannot use the certificate {cert} with the key {key}: {reason}; both are to be PEM files, the key"
                " without a password and of this certificate"
            ) from error
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(f"cors_origin {origin!r} is no origin: write it as https://example.org, with no path")


def check_classes(classes: tuple[SloClass, ...]) -> None:
    """Raises ConfigError for classes that no request could mean."""
    if len(classes) > MAX_CLASSES:
        raise ConfigError(f"{len(classes)} classes of objectives: name at most {MAX_CLASSES} ([[slo_class]])")
    names = [known.name for known in classes]
    for known in classes:
        if not known.name or known.name in DEFAULT_TIERS or names.count(known.name) > 1:
            raise ConfigError(
                f"slo_class {known.name!r}: give each class a name of its own, other than {', '.join(DEFAULT_TIERS)},"
                " which mean slo_ttft and slo_tbt"
            )
        for name in ("ttft", "tbt", "deadline"):
            value = getattr(known, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"slo_class {known.name!r}: {name} must be a number of seconds, not {value}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        close = difflib.get_close_matches(value, known, n=1)
        raise ConfigError(
            f"unknown {name} {value!r}; " + (f"did you mean {close[0]}?" if close else f"known are: {', '.join(known)}")
        )
