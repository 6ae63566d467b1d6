"""Cluster files: TOML in and out, every field checked before anything is simulated."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from pyengine._native import EVICTION_POLICIES

from ..types import Role, Slo
from .baselines import DISCIPLINES
from .compute import ModelError, StepTime
from .spec import MAX_WORKERS, ClusterSpec, NodeSpec, WorkerSpec

CLUSTERS = Path(__file__).parent / "clusters"
#: Far above any cluster file; a file that is larger is another kind of file.
MAX_BYTES = 1 << 20

#: Bytes of a block; with those of the longest prompt, in blocks of a token, sums of them are still exact.
MOST_BLOCK_BYTES = 1 << 36
#: Device pages, and slots of pools, of a whole cluster: of either some 20 GB of this process's memory.
MOST_PAGES = MOST_SLOTS = 1 << 28
#: No other count is as large, and sums of them are still exact.
MOST = 1 << 40

#: Numbers that may be zero: nothing of it, or no delay.
_MAY_BE_ZERO = {"count", "ssd_tokens", "link_delay", "message_delay", "handoff_delay", "step_overhead"}


class SpecError(ValueError):
    """A cluster that cannot be; the text names the file and the field, and says what to do."""


def names() -> list[str]:
    """Of the clusters that come with the package."""
    return sorted(path.stem for path in CLUSTERS.glob("*.toml"))


def load_cluster(name: str) -> ClusterSpec:
    """One that comes with the package, or a TOML file (with a suffix or a folder in its path). Raises SpecError.

    Paths of cost models in a file are relative to it.
    """
    path = Path(name)
    if "/" not in name and path.suffix != ".toml":
        if name not in names():
            raise SpecError(f"there is no cluster {name!r}: give the path of a .toml file; {nearest(name, names())}")
        path = CLUSTERS / f"{name}.toml"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise SpecError(f"{name} is larger than {MAX_BYTES} bytes: that is no cluster file")
        spec = parse_cluster(data.decode(), path.parent)
    except OSError as error:
        raise SpecError(f"cannot read the cluster file {name}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise SpecError(f"{name} is not text: a cluster file is TOML") from None
    except SpecError as error:
        raise SpecError(f"cluster file {name}: {error}") from None
    return spec


def parse_cluster(text: str, folder: Path) -> ClusterSpec:
    """Raises SpecError."""
    try:
        found = tomllib.loads(text)
        _known_keys(found, ClusterSpec, "")
        _known_roles(found)
        spec = msgspec.convert(found, ClusterSpec)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"is not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise SpecError(str(error)) from None
    workers = tuple(msgspec.structs.replace(worker, model=_resolved(worker.model, folder)) for worker in spec.workers)
    spec = msgspec.structs.replace(spec, workers=workers)
    check_cluster(spec)
    return spec


def check_cluster(spec: ClusterSpec) -> None:
    """Raises SpecError: numbers that are none, roles nobody has, cost models there are not."""
    _numbers(spec, "")
    _numbers(spec.node, "node.")
    check_slo(spec.slo)
    for i, worker in enumerate(spec.workers):
        _numbers(worker, f"workers[{i}].")
        try:
            StepTime.load(worker.model)
        except ModelError as error:
            raise SpecError(f"workers[{i}].model: {error}") from None
        if worker.discipline not in DISCIPLINES:
            known = nearest(worker.discipline, DISCIPLINES)
            raise SpecError(f"workers[{i}].discipline: there is no {worker.discipline!r}: {known}")
    if spec.node.evict not in EVICTION_POLICIES:
        raise SpecError(f"node.evict: there is no {spec.node.evict!r}: {nearest(spec.node.evict, EVICTION_POLICIES)}")
    count = sum(worker.count for worker in spec.workers)
    if count > MAX_WORKERS:
        raise SpecError(f"{count:,} workers are more than can be simulated: at most {MAX_WORKERS:,}")
    _sizes(spec)
    roles = [worker.role for worker in spec.workers if worker.count]
    for name, able in (
        ("prefill", any(role.prefills for role in roles)),
        ("decode", any(role.decodes for role in roles)),
    ):
        if not able:
            raise SpecError(f'it has 0 {name} workers: add [[workers]] with role = "{name}" (or "both") and a count')


def _sizes(spec: ClusterSpec) -> None:
    """Raises SpecError for pools without room for a block, and for what no simulation has room for."""
    node, block = spec.node, spec.block_tokens
    if spec.kv_bytes < 4:
        raise SpecError(f"kv_bytes must be 4 at least, a number in 16 bits for key and value, not {spec.kv_bytes}")
    if block * spec.kv_bytes > MOST_BLOCK_BYTES:
        raise SpecError(f"kv_bytes {spec.kv_bytes:,}: a block of {block} tokens has {MOST_BLOCK_BYTES:,} bytes at most")
    if node.dram_tokens < 2 * block:
        raise SpecError(f"node.dram_tokens must be {2 * block:,} at least, two blocks of it, not {node.dram_tokens:,}")
    nodes = sum(worker.count * worker.stages for worker in spec.workers)
    slots = nodes * (node.dram_tokens // block + node.ssd_tokens // block)
    if slots > MOST_SLOTS:
        raise SpecError(
            f"{nodes:,} nodes of {node.dram_tokens:,} dram_tokens and {node.ssd_tokens:,} ssd_tokens have"
            f" {slots:,} blocks, more than can be simulated: at most {MOST_SLOTS:,}"
        )
    pages = sum(worker.count * worker.stages * worker.pages for worker in spec.workers)
    if pages > MOST_PAGES:
        raise SpecError(f"all workers have {pages:,} pages, more than can be simulated: at most {MOST_PAGES:,}")


def check_slo(slo: Slo) -> None:
    """Raises SpecError."""
    for name in slo.__struct_fields__:
        value = getattr(slo, name)
        if value is not None and not 0 < value < math.inf:
            raise SpecError(f"slo.{name} must be a number of seconds above 0, not {value:g}")


def to_toml(spec: ClusterSpec) -> str:
    """A file that `parse_cluster` reads as the same."""
    tables: list[tuple[str, msgspec.Struct]] = [("", spec), ("[slo]", spec.slo), ("[node]", spec.node)]
    tables += [("[[workers]]", worker) for worker in spec.workers]
    return "\n".join(f"{header}\n{_fields(fields)}".lstrip() for header, fields in tables)


def _fields(value: msgspec.Struct) -> str:
    lines = []
    for name in value.__struct_fields__:
        field = getattr(value, name)
        if field is None or isinstance(field, msgspec.Struct | tuple):
            continue
        # A TOML basic string is a JSON string, but for one character; numbers are the same.
        shown = field.value if isinstance(field, Role) else field
        lines.append(f"{name} = {msgspec.json.encode(shown).decode()}\n".replace("\x7f", "\\u007f"))
    return "".join(lines)


def _resolved(model: str, folder: Path) -> str:
    """A path in a cluster file is seen from that file."""
    if "/" in model or model.endswith(".toml"):
        return str(folder / model)
    return model


def _numbers(value: msgspec.Struct, where: str) -> None:
    for name in value.__struct_fields__:
        field = getattr(value, name)
        if isinstance(field, bool) or not isinstance(field, int | float):
            continue
        if not math.isfinite(field) or field < 0 or (field == 0 and name not in _MAY_BE_ZERO):
            least = "0 or more" if name in _MAY_BE_ZERO else "above 0"
            raise SpecError(f"{where}{name} must be {least}, not {field:g}")
        if isinstance(field, int) and field > MOST:
            raise SpecError(f"{where}{name} must be at most {MOST}, not {field}")


def _known_keys(found: dict[str, Any], kind: type[msgspec.Struct], where: str) -> None:
    """Raises SpecError for the first key that is none, with the nearest that is."""
    for key in found:
        if key not in kind.__struct_fields__:
            raise SpecError(f"there is no {where}{key}: {nearest(key, kind.__struct_fields__)}")
    inner: tuple[tuple[str, type[msgspec.Struct]], ...] = (("node", NodeSpec), ("slo", Slo))
    for name, struct in inner if kind is ClusterSpec else ():
        if isinstance(found.get(name), dict):
            _known_keys(found[name], struct, f"{name}.")
    if kind is ClusterSpec and isinstance(found.get("workers"), list):
        for i, worker in enumerate(found["workers"]):
            if isinstance(worker, dict):
                _known_keys(worker, WorkerSpec, f"workers[{i}].")


def _known_roles(found: dict[str, Any]) -> None:
    """Raises SpecError for the first role that is none."""
    workers = found.get("workers")
    roles = [role.value for role in Role]
    for i, worker in enumerate(workers if isinstance(workers, list) else []):
        role = worker.get("role") if isinstance(worker, dict) else None
        if isinstance(role, str) and role not in roles:
            raise SpecError(f"workers[{i}].role: there is no {role!r}: {nearest(role, roles)}")


def nearest(word: str, known: Iterable[str]) -> str:
    """For an error: what is known, and what was probably meant."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, 1, 0.5)
    return f"known are {', '.join(known)}" + (f"; did you mean {near[0]!r}?" if near else "")
