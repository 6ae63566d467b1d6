"""What `pyengine doctor` looks at: each check reads the machine and finds it ok, worth a warning, or failing.

What is read below /proc, /sys and /dev is read below a root that tests choose.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import socket
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec

from pyengine.config import GIB, default_pool_bytes

Status = Literal["ok", "warn", "fail"]
DISTRIBUTION = "pyengine-llm"
#: What a gateway may hold at once (GatewayConfig.max_requests), and its other descriptors.
DESCRIPTORS = 4096 + 256
#: Below it neither the model that comes along nor a pool has room.
LEAST_MEMORY = 2 * GIB
#: Clock sources that are read without asking the kernel, or nearly so. Others cost a microsecond and more each time.
QUICK_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:>=\s*([0-9.]+))?")


class Finding(msgspec.Struct, frozen=True):
    """found: what there is. advice: what to do about it; "" where it is ok."""

    name: str
    status: Status
    found: str
    advice: str = ""


class Machine:
    """root: where /proc, /sys and /dev are. state_dir: of this installation. port: where a gateway is to listen."""

    def __init__(self, state_dir: Path, port: int = 8000, root: Path = Path("/")) -> None:
        self.state_dir, self.port, self.root = state_dir, port, root

    def text(self, path: str) -> str:
        """A small file; "" if it is not there, or not for us."""
        try:
            return (self.root / path).read_text(errors="replace")
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        try:
            return sorted(each.name for each in (self.root / path).iterdir())
        except OSError:
            return []

    def limit(self, name: str) -> tuple[float, float]:
        """Soft and hard limit of this process; inf: none. Missing: 0."""
        match = re.search(rf"^{re.escape(name)}\s+(\S+)\s+(\S+)", self.text("proc/self/limits"), re.MULTILINE)
        soft, hard = match.groups() if match else ("0", "0")
        return (float("inf") if soft == "unlimited" else float(soft)), (
            float("inf") if hard == "unlimited" else float(hard)
        )


def examine(machine: Machine) -> list[Finding]:
    """All checks, in the order of the report. One that itself fails is a finding, and the others go on."""
    found = []
    for check in CHECKS:
        try:
            found.append(check(machine))
        except Exception as error:  # noqa: BLE001 (a doctor that falls ill over one organ is of no use)
            name = check.__name__.replace("_", " ")
            found.append(Finding(name, "warn", f"cannot be told: {type(error).__name__}: {error}", "report this"))
    return found


def python(machine: Machine) -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 11) or sys.platform != "linux":
        return Finding("python", "fail", f"{version} on {sys.platform}", "use CPython 3.11 or newer on Linux")
    return Finding("python", "ok", version)


def engine(machine: Machine) -> Finding:
    try:
        import pyengine._native
    except ImportError as error:
        return Finding("engine", "fail", f"the Rust extension does not load: {error}", "build it: make serve, or pip")
    return Finding("engine", "ok", f"loads ({Path(pyengine._native.__file__).name})")


def packages(machine: Machine) -> Finding:
    try:
        wanted = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return Finding("packages", "warn", f"{DISTRIBUTION} is not installed", "install it: pip install -e .")
    wrong, count = [], 0
    for requirement in wanted:
        match = _REQUIREMENT.match(requirement)
        if match is None or "extra ==" in requirement:
            continue
        count += 1
        have = version_of(match[1])
        if have is None:
            wrong.append(f"{match[1]} is missing")
        elif match[2] and _numbers(have) < _numbers(match[2]):
            wrong.append(f"{match[1]} is {have}, below {match[2]}")
    if wrong:
        return Finding("packages", "fail", "; ".join(wrong), f"pip install --upgrade {DISTRIBUTION}'s requirements")
    return Finding("packages", "ok", f"{count} required ones, new enough")


def frameworks(machine: Machine) -> Finding:
    have = [f"{name} {version}" for name in ("torch", "jax") if (version := version_of(name)) is not None]
    if not have:
        return Finding("frameworks", "fail", "neither PyTorch nor JAX", "install one: the extra [torch] or [jax]")
    return Finding("frameworks", "ok", ", ".join(have))


def cores(machine: Machine) -> Finding:
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)", machine.text("proc/self/status"), re.MULTILINE)
    count = float(sum(_range(part) for part in match[1].split(","))) if match else float(os.cpu_count() or 1)
    quota = machine.text("sys/fs/cgroup/cpu.max").split()
    limited = ""
    if len(quota) == 2 and quota[0] != "max" and int(quota[0]) / int(quota[1]) < count:
        count = int(quota[0]) / int(quota[1])
        limited = " (limited by the cgroup)"
    if count < 2:
        advice = "prefill and decode take turns on one core: serve with --both 1, or give more cores"
        return Finding("cores", "warn", f"{count:g}{limited}", advice)
    return Finding("cores", "ok", f"{count:g}{limited}")


def memory(machine: Machine) -> Finding:
    match = re.search(r"^MemAvailable:\s*(\d+) kB", machine.text("proc/meminfo"), re.MULTILINE)
    if match is None:
        return Finding("memory", "warn", "/proc/meminfo does not tell", "is /proc mounted?")
    free = int(match[1]) * 1024
    limit = machine.text("sys/fs/cgroup/memory.max").strip()
    used = machine.text("sys/fs/cgroup/memory.current").strip()
    limited = ""
    if limit.isdecimal() and used.isdecimal() and int(limit) - int(used) < free:
        free, limited = int(limit) - int(used), " (limited by the cgroup)"
    shown = f"{free / GIB:.1f} GiB available{limited}"
    if free < LEAST_MEMORY:
        return Finding("memory", "fail", shown, f"end something, or give more: {LEAST_MEMORY / GIB:g} GiB at least")
    # A node's pool and the pages of two workers, as serve takes them by default.
    need = 3 * default_pool_bytes()
    if free < need:
        advice = f"serve takes {need / GIB:.1f} GiB by default: say less (--dram-bytes 512MiB --kv-bytes 512MiB)"
        return Finding("memory", "warn", shown, advice)
    return Finding("memory", "ok", shown)


def huge_pages(machine: Machine) -> Finding:
    match = re.search(r"\[(\w+)\]", machine.text("sys/kernel/mm/transparent_hugepage/enabled"))
    mode = match[1] if match else "not there"
    if mode in ("always", "madvise"):
        return Finding("huge pages", "ok", f"transparent: {mode}")
    advice = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: weights and pools walk fewer page tables"
    return Finding("huge pages", "warn", f"transparent: {mode}", advice)


def locked_memory(machine: Machine) -> Finding:
    soft, _ = machine.limit("Max locked memory")
    shown = "no limit" if soft == float("inf") else f"{soft / 1024:.0f} KiB"
    if soft < default_pool_bytes() and machine.names("sys/class/infiniband"):
        advice = "RDMA pins the pool: raise the limit (ulimit -l unlimited, LimitMEMLOCK=infinity, --ulimit memlock=-1)"
        return Finding("locked memory", "fail", shown, advice)
    return Finding("locked memory", "ok", shown)


def shared_memory(machine: Machine) -> Finding:
    """Arenas are memfds, which /dev/shm does not bound; PyTorch's processes of one worker (--tp) use it."""
    try:
        found = os.statvfs(machine.root / "dev/shm")
    except OSError:
        return Finding("shared memory", "warn", "there is no /dev/shm", "mount it: only --tp with torch needs it")
    size = found.f_frsize * found.f_blocks
    shown = f"/dev/shm has {size / GIB:.2f} GiB"
    if size < GIB // 4:
        return Finding("shared memory", "warn", shown, "only for --tp with torch: give 1 GiB (docker --shm-size 1g)")
    return Finding("shared memory", "ok", shown)


def rdma(machine: Machine) -> Finding:
    devices = machine.names("sys/class/infiniband")
    if not devices:
        return Finding("rdma", "ok", "no devices: blocks travel by shm and tcp")
    ports = {
        f"{device}/{port}": machine.text(f"sys/class/infiniband/{device}/ports/{port}/state").strip()
        for device in devices
        for port in machine.names(f"sys/class/infiniband/{device}/ports")
    }
    shown = ", ".join(f"{port}: {state or '?'}" for port, state in ports.items()) or ", ".join(devices)
    if not any(name.startswith("uverbs") for name in machine.names("dev/infiniband")):
        return Finding(
            "rdma", "fail", shown, "no /dev/infiniband/uverbs*: modprobe ib_uverbs, pass it into the container"
        )
    if not any("ACTIVE" in state for state in ports.values()):
        return Finding("rdma", "warn", shown, "no port is active: look at cable and switch (ibstat, rdma link)")
    return Finding("rdma", "ok", shown)


def gpus(machine: Machine) -> Finding:
    cards = machine.names("proc/driver/nvidia/gpus")
    if not cards:
        return Finding("gpus", "ok", "none: workers compute on the cores")
    torch = version_of("torch")
    shown = f"{len(cards)} NVIDIA"
    if torch is not None and "+cpu" in torch:
        return Finding("gpus", "warn", f"{shown}, and torch {torch}", "install PyTorch with CUDA: this one sees no GPU")
    if not (machine.root / "dev/nvidiactl").exists():
        return Finding("gpus", "fail", f"{shown}, and no /dev/nvidiactl", "pass them into the container (--gpus all)")
    return Finding("gpus", "ok", shown)


def port(machine: Machine) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", machine.port))
        except OSError as error:
            advice = f"another server is there (pyengine itself?): end it, or serve with --port {machine.port + 1}"
            return Finding("port", "warn", f"{machine.port}: {error.strerror}", advice)
    return Finding("port", "ok", f"{machine.port} is free")


def file_descriptors(machine: Machine) -> Finding:
    soft, hard = machine.limit("Max open files")
    if hard < DESCRIPTORS:
        advice = f"raise the hard limit to {DESCRIPTORS} or more (LimitNOFILE=, /etc/security/limits.conf)"
        return Finding("file descriptors", "warn", f"{soft:g}, at most {hard:g}", advice)
    if soft < DESCRIPTORS:
        advice = f"a gateway holds 4096 requests: ulimit -n {DESCRIPTORS} before it is started"
        return Finding("file descriptors", "warn", f"{soft:g}, at most {hard:g}", advice)
    return Finding("file descriptors", "ok", f"{soft:g}")


def clock(machine: Machine) -> Finding:
    source = machine.text("sys/devices/system/clocksource/clocksource0/current_clocksource").strip()
    if source and source not in QUICK_CLOCKS:
        return Finding("clock", "warn", source, "reading it asks the kernel: boot with clocksource=tsc if it is stable")
    return Finding("clock", "ok", source or "the kernel does not say")


def numa(machine: Machine) -> Finding:
    nodes = [name for name in machine.names("sys/devices/system/node") if re.fullmatch(r"node\d+", name)]
    if len(nodes) > 1:
        advice = "keep a worker and its daemon on one: start each node's with numactl --cpunodebind=N --membind=N"
        return Finding("numa", "warn", f"{len(nodes)} nodes", advice)
    return Finding("numa", "ok", "one node")


def disk_ring(machine: Machine) -> Finding:
    if machine.text("proc/sys/kernel/io_uring_disabled").strip() in ("1", "2"):
        advice = "only the SSD tier is slower by it: sysctl kernel.io_uring_disabled=0"
        return Finding("io_uring", "warn", "disabled", advice)
    return Finding("io_uring", "ok", "allowed")


def state_directory(machine: Machine) -> Finding:
    path = machine.state_dir
    near = next(each for each in (path, *path.parents) if each.exists())
    if not os.access(near, os.W_OK):
        return Finding("state directory", "fail", f"{near} cannot be written", "name another: PYENGINE_STATE_DIR=DIR")
    for name in ("secret", "keys.json"):
        file = path / name
        if file.exists() and stat.S_IMODE(file.stat().st_mode) & 0o077:
            return Finding("state directory", "fail", f"others may read {file}", f"chmod 600 {file}")
    free = os.statvfs(near).f_bavail * os.statvfs(near).f_frsize
    if free < GIB:
        advice = "converted models go there: free some, or PYENGINE_STATE_DIR=DIR elsewhere"
        return Finding("state directory", "warn", f"{path}, {free / GIB:.1f} GiB free", advice)
    return Finding("state directory", "ok", f"{path}, {free / GIB:.0f} GiB free")


CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    python,
    engine,
    packages,
    frameworks,
    cores,
    memory,
    huge_pages,
    locked_memory,
    shared_memory,
    rdma,
    gpus,
    port,
    file_descriptors,
    clock,
    numa,
    disk_ring,
    state_directory,
)


def versions() -> dict[str, str]:
    """Of everything that matters to this program and is installed."""
    wanted: Iterable[str] = ("torch", "jax", "flax", "cyclopts", "rich", DISTRIBUTION)
    try:
        named = [_REQUIREMENT.match(each) for each in importlib.metadata.requires(DISTRIBUTION) or []]
        wanted = {*wanted, *(match[1] for match in named if match)}
    except importlib.metadata.PackageNotFoundError:
        pass
    return {name: have for name in sorted(wanted, key=str.lower) if (have := version_of(name)) is not None}


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def _range(part: str) -> int:
    first, _, last = part.partition("-")
    return int(last or first) - int(first) + 1
