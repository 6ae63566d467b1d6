"""Settings from where users write them: flag, environment, file, default. The first that has one wins.

One name everywhere: `--dram-bytes 2GiB`, PYENGINE_DRAM_BYTES=2GiB, `dram_bytes = "2GiB"`.
"""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

import msgspec

from pyengine import env, keys
from pyengine.config import ConfigError, GatewayConfig, ServeConfig, WorkerConfig, parse_size

#: All that are read from the environment. One environment may serve several processes: what is no setting of this one
#: is one of another, or a mistake.
KINDS = (ServeConfig, WorkerConfig, GatewayConfig)
DEFAULT = "default"

S = TypeVar("S", bound=msgspec.Struct)


class Setting(msgspec.Struct, frozen=True):
    """One setting as it was found. origin: "default", a file's path, the name of a variable or of a flag."""

    name: str
    value: Any
    origin: str


def load(kind: type[S], path: Path | None, flags: Mapping[str, Any]) -> S:
    """The config that a process runs with. path: None: PYENGINE_CONFIG, if that is set. flags: None: not given.

    Raises ConfigError naming flag, variable or file, and what is wrong with it.
    """
    config, _ = trace(kind, path, flags)
    return config


def trace(kind: type[S], path: Path | None, flags: Mapping[str, Any]) -> tuple[S, list[Setting]]:
    """The config, and where each of its settings came from, in the order of its fields. Raises ConfigError."""
    found: dict[str, Setting] = {}
    # One source after the other: so that what is wrong in a file is said of the file, though a flag overrides it.
    path = path if path is not None else env.config_file()
    if path is not None:
        found |= _settings(kind, read_file(path), dict.fromkeys(kind.__struct_fields__, str(path)), str(path))
    named = {name: text for name, text in env.settings().items() if _is_known(kind, name)}
    values = {name: _from_text(kind, name, text) for name, text in named.items()}
    found |= _settings(kind, values, {name: env.variable(name) for name in values}, "environment")
    given = {name: value for name, value in flags.items() if value is not None}
    found |= _settings(kind, given, {name: flag(name) for name in given}, "command line")
    where = str(path) if path is not None else "command line"
    config = _convert(kind, {name: setting.value for name, setting in found.items()}, where)
    return config, [found.get(name, Setting(name, getattr(config, name), DEFAULT)) for name in kind.__struct_fields__]


def flag(name: str) -> str:
    """How the command line calls a setting."""
    return "--" + name.replace("_", "-")


def read_file(path: Path) -> dict[str, Any]:
    """Settings of a TOML or JSON file. Raises ConfigError when it cannot be read."""
    try:
        data = path.read_bytes()
        settings = msgspec.json.decode(data) if path.suffix == ".json" else tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror}; name a file that can be read"
            f" (--config or {env.variable('config')})"
        ) from error
    except (tomllib.TOMLDecodeError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold named settings")
    return settings


def state_dir() -> Path:
    """Of this installation: where `pyengine serve` keeps its secret if no flag says otherwise. Raises ConfigError."""
    at, text = _named("state_dir")
    # The variable and the default are the environment's own; only a file can say something else.
    return Path(text) if text and at == env.config_file() else env.read().state_dir


def keys_file() -> Path:
    """Where gateways on this machine look for API keys if no flag says otherwise. Raises ConfigError."""
    _, text = _named("keys_file")
    return Path(text) if text else state_dir() / keys.NAME


def _named(name: str) -> tuple[Path | None, str]:
    """One setting by itself: the file that has it, None: the environment, and its text, "": nowhere.

    For commands beside a server, whose file may be that of any kind of process. Raises ConfigError.
    """
    path = env.config_file()
    if text := env.settings().get(name):
        return None, text
    if path is None:
        return None, ""
    text = read_file(path).get(name, "")
    if not isinstance(text, str):
        raise ConfigError(f"{path}: {name} is text, in quotation marks")
    return path, text


def _settings(
    kind: type[msgspec.Struct], values: Mapping[str, Any], origins: Mapping[str, str], where: str
) -> dict[str, Setting]:
    """What one source has. Raises ConfigError for an unknown name, or a value that the setting cannot have."""
    found = {}
    for name, value in values.items():
        if name not in kind.__struct_fields__:
            raise ConfigError(f"{where}: unknown setting {name}; {_nearest(name, kind.__struct_fields__)}")
        found[name] = Setting(name, _checked(kind, name, value, where), origins[name])
    return found


def _checked(kind: type[msgspec.Struct], name: str, value: Any, where: str) -> Any:
    if name.endswith("_bytes"):
        try:
            value = parse_size(value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {name}: {error}") from None
    try:
        return msgspec.convert(value, _types(kind)[name])
    except msgspec.ValidationError as error:
        # As the field of an object would be called: `Expected `int`, got `str` - at `$.port``.
        text, _, inside = str(error).partition(" - at `$")
        raise ConfigError(f"{where}: {text} - at `$.{name}{inside.rstrip('`')}`") from None


def _convert(kind: type[S], settings: Mapping[str, Any], where: str) -> S:
    sized = {name: parse_size(value) if name.endswith("_bytes") else value for name, value in settings.items()}
    try:
        return msgspec.convert(sized, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


@functools.cache
def _types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_known(kind: type[msgspec.Struct], name: str) -> bool:
    """Whether a variable is a setting of this process. Raises ConfigError if it is one of no process."""
    if name in kind.__struct_fields__:
        return True
    known = dict.fromkeys((*env.OTHERS, *(field for each in KINDS for field in each.__struct_fields__)))
    if name in known:
        return False
    near = _nearest(name, known, env.variable)
    raise ConfigError(f"environment: unknown variable {env.variable(name)}; {near}")


def _from_text(kind: type[msgspec.Struct], name: str, text: str) -> Any:
    """The value that a variable's text means: numbers and truth as in TOML, lists as JSON or with commas between."""
    where, wanted = env.variable(name), _types(kind)[name]
    if name == "state_dir":
        # As all other processes take this variable.
        return str(env.read().state_dir)
    if get_origin(wanted) is tuple:
        if not text.lstrip().startswith("["):
            return tuple(part.strip() for part in text.split(",") if part.strip())
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{where} is no JSON: {error}; write [...] with commas between") from None
    if name.endswith("_bytes") or wanted not in (int, float, bool):
        return text
    try:
        return msgspec.convert(text, wanted, strict=False)
    except msgspec.ValidationError:
        examples = {int: "a whole number", float: "a number", bool: "true or false"}
        raise ConfigError(f"{where} is {text!r}; {name} is {examples[wanted]}") from None


def _nearest(name: str, known: Iterable[str], spelled: Callable[[str], str] = str) -> str:
    known = list(known)
    close = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.5)
    return f"did you mean {spelled(close[0])}?" if close else f"known are: {', '.join(map(spelled, known))}"
