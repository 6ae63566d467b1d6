"""`pyengine config`: what a command would run with, and where each value came from. Exit status as in cli.py."""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from pyengine import env, origins
from pyengine.config import ConfigError, GatewayConfig, ServeConfig, WorkerConfig
from pyengine.origins import Setting
from pyengine.scheduler.report.table import table

IMPOSSIBLE = 2
KINDS: dict[str, type[msgspec.Struct]] = {"serve": ServeConfig, "gateway": GatewayConfig, "worker": WorkerConfig}
DERIVED = "derived"
REFERENCE_HEAD = """\
# Configuration reference

Made from the code by `pyengine config --reference`; a test compares.

A setting has one name everywhere: `dram_bytes = "2GiB"` in a TOML file (`--config FILE`, or the variable
`PYENGINE_CONFIG`), `PYENGINE_DRAM_BYTES=2GiB` in the environment, `--dram-bytes 2GiB` on the command line. A flag
overrides the environment, the environment the file, the file the default. What is no setting is refused, with the
nearest name. `pyengine config` prints what a command would run with and where each value came from:

```
PYENGINE_PORT=9000 pyengine config serve --dram-bytes 2GiB
```

Sizes are bytes, or have a unit: `512MiB`, `2GiB`, `50GB`. In the environment a list is JSON, or words with commas
between, truth is `true` or `false`, and an empty variable is none. Settings without a flag are for files and the
environment.
What Kubernetes adds for a Service whose name begins with pyengine (`PYENGINE_SERVICE_HOST`,
`PYENGINE_PORT=tcp://...`) is passed over.
`pyengine serve` tells its processes by files: they take no settings from the environment.

## The environment beside settings

| variable | is |
|---|---|
| `PYENGINE_CONFIG` | the file of settings where `--config` names none |
| `PYENGINE_STATE_DIR` | the setting `state_dir`, for every command (default `~/.local/state/pyengine`) |
| `PYENGINE_LOG_LEVEL` | `debug`, `info` (default), `warning` or `error`, of all processes |
| `PYENGINE_API_KEY` | the key that `pyengine chat` and `pyengine bench` show to a gateway |
"""
TITLES = {
    "serve": "`pyengine serve`: everything on one machine",
    "gateway": "`pyengine gateway`: one gateway of a deployment",
    "worker": "`pyengine worker`: one worker of a deployment",
}


def config(
    *words: Annotated[str, Parameter(allow_leading_hyphen=True)],
    json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    reference: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Shows what a command would run with, and where each value came from.

    Parameters
    ----------
    words
        A command (serve, which is the default, gateway or worker), and flags as it takes them.
    json
        As one JSON object: by name, its value and origin.
    reference
        Instead, all settings there are, as Markdown.
    """
    if reference:
        sys.stdout.write(reference_text())
        return 0
    try:
        found = effective(*_command(words))
    except ConfigError as error:
        sys.stderr.write(f"pyengine config: error: {error}\n")
        return IMPOSSIBLE
    if json:
        shown = {each.name: {"value": msgspec.to_builtins(each.value), "origin": each.origin} for each in found}
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(shown), indent=1) + b"\n")
    else:
        rows = [(each.name, _shown(each.value), each.origin) for each in found]
        sys.stdout.write(table(("setting", "value", "from"), rows, left=3) + "\n")
    return 0


def _command(words: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    if not words or words[0].startswith("-"):
        return "serve", words
    if words[0] not in KINDS:
        near = difflib.get_close_matches(words[0], KINDS, n=1)
        raise ConfigError(
            f"{words[0]} has no settings; " + (f"did you mean {near[0]}?" if near else f"known are: {', '.join(KINDS)}")
        )
    return words[0], words[1:]


def effective(command: str, flags: tuple[str, ...] = ()) -> list[Setting]:
    """What `pyengine COMMAND FLAGS` would run with, checked as it would be. Raises ConfigError, and CycloptsError for
    flags that the command does not take.
    """
    kind = KINDS[command]
    given, path = _parsed(command, flags)
    made, found = origins.trace(kind, path, given)
    if isinstance(made, ServeConfig | GatewayConfig | WorkerConfig):
        made.check()
    if not isinstance(made, ServeConfig):
        return found
    whole = made.derived()
    if not whole.state_dir:
        whole = msgspec.structs.replace(whole, state_dir=str(env.read().state_dir))
    return [
        each
        if getattr(whole, each.name) == getattr(made, each.name)
        else Setting(each.name, getattr(whole, each.name), DERIVED)
        for each in found
    ]


def _parsed(command: str, flags: tuple[str, ...]) -> tuple[dict[str, Any], Path | None]:
    """Flags by the names of settings, and the file that they name."""
    # Not at the top: cli.py names this module, and a process that only serves needs none of it.
    from pyengine.cli import app

    _, bound, _ = app.parse_args([command, *flags], exit_on_error=False)
    given = dict(bound.arguments)
    path = given.pop("file", None)
    return {name: value for name, value in given.items() if name in KINDS[command].__struct_fields__}, path


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode() if not isinstance(value, str) else value or '""'


def reference_text() -> str:
    """docs/configuration.md."""
    return "\n".join([REFERENCE_HEAD, *(_section(command) for command in KINDS)])


def _section(command: str) -> str:
    kind = KINDS[command]
    flags = _flags(command)
    about = descriptions(kind)
    lines = [f"## {TITLES[command]}", "", "| setting | type | default | flag | what it is |", "|---|---|---|---|---|"]
    for field in msgspec.structs.fields(kind):
        default = "required" if field.required else f"`{_shown(field.default)}`"
        flag = f"`{origins.flag(field.name)}`" if field.name in flags else ""
        lines.append(f"| `{field.name}` | {_type_name(field)} | {default} | {flag} | {about[field.name]} |")
    if command == "serve":
        lines += [
            "",
            "Each of `slo_class` (in TOML: `[[slo_class]]`) has a `name`, and `ttft`, `tbt`, `deadline` in seconds.",
        ]
    return "\n".join(lines) + "\n"


def _flags(command: str) -> set[str]:
    from pyengine.cli import app

    return {argument.field_info.name for argument in app[command].assemble_argument_collection()}


def _type_name(field: msgspec.structs.FieldInfo) -> str:
    name = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    if field.name.endswith("_bytes"):
        return "size"
    if name.startswith("tuple") or "SloClass" in name:
        return "list"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "truth", "Role": "role"}.get(name, "text")


def descriptions(kind: type[msgspec.Struct]) -> dict[str, str]:
    """What the docstring says of each field, which it names in front of a colon, several with commas between.

    Raises ValueError for a field that it does not tell of.
    """
    text = re.sub(r"\s+", " ", kind.__doc__ or "")
    for command, other in KINDS.items():
        text = text.replace(other.__name__, f"`pyengine {command}`")
    fields = "|".join(sorted(kind.__struct_fields__, key=len, reverse=True))
    heads = list(re.finditer(rf"(?:^|(?<=[.;)] ))((?:{fields})(?:, (?:{fields}))*): ", text))
    found: dict[str, str] = {}
    for head, after in zip(heads, [*heads[1:], None], strict=True):
        said = text[head.end() : after.start() if after else None].strip()
        for name in head[1].split(", "):
            found.setdefault(name, said.replace("|", "\\|").rstrip(";"))
    if missing := set(kind.__struct_fields__) - set(found):
        raise ValueError(f"the docstring of {kind.__name__} says nothing of {', '.join(sorted(missing))}")
    return found
