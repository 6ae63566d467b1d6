"""The bundle of `pyengine doctor --bundle`: what helps to understand a fault, and nothing that is private.

What goes in is chosen, not what is left out. Of a log: lines of our own form, up to the first quotation mark, brace or
bracket, and the frames of tracebacks without their source; nothing else, so neither a prompt that an error
quotes nor a curl command. Of metrics: numbers, with tenants numbered. Of the configuration: values, with folders of the
user cut. Behind all that, what looks like a key or is one that this process knows is taken out once more.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from pyengine.commands.checks import Finding
from pyengine.commands.private import open_private
from pyengine.origins import Setting
from pyengine.scheduler.types import Role

#: Of a log's end.
LOG_BYTES = 1 << 20
#: Metrics of a large cluster are some hundred kilobytes.
METRICS_BYTES = 8 << 20
REMOVED = "<removed>"

_LINE = re.compile(
    r"^[\w.\- ]{1,40} (?:DEBUG|INFO|WARNING|ERROR|CRITICAL) [\w.]+: |^\S*Z?\s+(?:DEBUG|INFO|WARN|ERROR) [\w:]+: "
)
_FRAME = re.compile(r'^\s+File "([^"]+)", line (\d+), in (\w+|<\w+>)$')
#: What the launcher says of its parts (launch.py), to the last word: any other indented line may be somebody's text.
_NAME = rf"(?:conductor|gateway|(?:transferd|{'|'.join(role.value for role in Role)})-\d+)"
_PART = re.compile(
    rf"  (?:{_NAME} +ready(?: again)? after [\d.]+ s(?:  \(.*\))?"
    rf"|{_NAME} (?:was killed by SIG\w+|ended with status \d+): restarting it in [\d.]+ s"
    rf"|{_NAME}(?:, {_NAME})* did not end in time: killed)",
    re.ASCII,
)
#: From the first mark of a quotation on: pairs cannot be trusted, since what is quoted may hold such a mark.
_QUOTED = re.compile(r"['\"`{\[(\u2018\u201c].*")
_SECRET = re.compile(r"pye-[\w\-]+|(?i:bearer)\s+\S+|\b[0-9a-fA-F]{32,}\b|-----BEGIN.*|//[^/\s@]+@")
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(\{.*\})? ([0-9.eE+\-]+|NaN|[+-]Inf)$")
_TENANT = re.compile(r'((?:tenant|user|key|salt)\w*)="((?:[^"\\]|\\.)*)"')


def write_bundle(
    path: Path,
    findings: Sequence[Finding],
    settings: Sequence[Setting],
    versions: Mapping[str, str],
    metrics: str | None,
    logs: Mapping[str, str],
    secrets: Iterable[str] = (),
) -> list[str]:
    """Writes a .tar.gz for its user's eyes only; returns the names of what is in it. secrets: never to be in it.

    Raises OSError.
    """
    secrets = tuple(secret for secret in secrets if secret)
    shown = [{"setting": each.name, "value": msgspec.to_builtins(each.value), "from": each.origin} for each in settings]
    files = {
        "doctor.json": json.dumps(msgspec.to_builtins(list(findings)), indent=1),
        "versions.json": json.dumps(dict(versions), indent=1),
        "config.json": json.dumps(shown, indent=1),
    }
    if metrics is not None:
        files["metrics.txt"] = clean_metrics(metrics)
    files |= {f"logs/{number}-{Path(name).name}": clean_log(text) for number, (name, text) in enumerate(logs.items())}
    with open_private(path) as out, tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, text in files.items():
            data = clean(text, secrets).encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return list(files)


def clean(text: str, secrets: Iterable[str] = ()) -> str:
    """Without what is a secret or looks like one, and without the name of the user's folder."""
    for secret in secrets:
        text = text.replace(secret, REMOVED)
    home = os.path.expanduser("~")
    text = text.replace(home + "/", "~/") if len(home) > 1 else text
    return _SECRET.sub(REMOVED, text)


def clean_log(text: str) -> str:
    """Lines of our own form, without what they quote; frames without their source; of other lines, how many."""
    kept: list[str] = []
    left = 0
    for line in text[-LOG_BYTES:].splitlines():
        frame = _FRAME.match(line)
        if frame is not None:
            kept.append(f'  File "{"/".join(Path(frame[1]).parts[-3:])}", line {frame[2]}, in {frame[3]}')
        elif line == "Traceback (most recent call last):":
            kept.append(line)
        elif (head := _LINE.match(line)) is not None:
            kept.append(head[0] + _QUOTED.sub(REMOVED, line[head.end() :]))
        elif _PART.fullmatch(line):
            kept.append(_QUOTED.sub(REMOVED, line))
        else:
            left += 1
    return "\n".join([*kept, f"({left} lines of another form were left out)"]) + "\n"


def clean_metrics(text: str) -> str:
    """Samples, with tenants and the like numbered in the order of their coming."""
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        return f'{match[1]}="{numbers.setdefault(match[2], len(numbers) + 1)}"'

    found = (_SAMPLE.match(line) for line in text[:METRICS_BYTES].splitlines())
    return "".join(f"{match[1]}{_TENANT.sub(number, match[2] or '')} {match[3]}\n" for match in found if match)
