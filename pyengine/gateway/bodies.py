"""A request's body: strict JSON of a type. Whatever is wrong with it is named, and whatever was not understood.

JSON that parsers disagree on (a key twice, NaN, half a surrogate pair) is refused: what stands before and behind this
server must not read one body in two ways. Reference: RFC 8259, sections 4, 6 and 8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from functools import cache
from typing import Any, NoReturn, TypeVar

import msgspec

from pyengine.gateway.errors import ApiError

T = TypeVar("T", bound=msgspec.Struct)

#: Unknown fields that are told to the client, and the length of each: a header line has room for no more.
MAX_TOLD, MAX_NAME = 16, 64


#: What one body may have: a prompt of a million token ids, with room, takes 0.13 s to parse; so many lists 20 ms, where
#: 16 MiB of them took 2 s. A conversation of thousands of messages has some ten thousand objects.
MAX_VALUES, MAX_CONTAINERS = 1_100_000, 100_000

#: Bounds in words, as msgspec writes them, and what there are so many of.
_SIGNS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_UNITS = {"str": " characters", "array": " entries", "object": " entries"}


class _Refused(ValueError):
    """JSON that is not to be understood; the message says why."""


def decode(
    body: bytes,
    kind: type[T],
    unsupported: Mapping[str, tuple[Any, ...]] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> tuple[T, list[str]]:
    """The request, and the paths of the fields that `kind` does not know, in their order.

    unsupported: fields that are refused, but for the values that change nothing (null changes nothing either).
    renamed: what is to be sent instead of some of them.
    Raises ApiError 400 naming the field and what was expected.
    """
    value = _json(body)
    try:
        request = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _field_error(error) from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply: send plain values", code="invalid_json") from error
    shape = _shape(kind)
    unknown: list[str] = []
    _collect(value, shape, "", unknown, unsupported or {})
    for name, neutral in (unsupported or {}).items():
        sent = value.get(name)
        if sent is not None and name not in shape and sent not in neutral:
            instead = f"send {renamed[name]}" if renamed and name in renamed else "leave it out"
            raise ApiError(400, f"{name}: is not supported by this version; {instead}", param=name)
    return request, unknown


def _bound(body: bytes) -> None:
    """Raises ApiError 400 for what would hold up everybody: the parser makes one object after the other, and lets
    nothing else run meanwhile. As a parser that made nothing would count, and the less the longer its strings are.
    """
    # Nearly always there are fewer than that of these bytes, whatever they are.
    if body.count(b",") <= MAX_VALUES and body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    at = commas = containers = strings = 0
    while at >= 0:
        quote = plain.find(b'"', at)
        end = len(plain) if quote < 0 else quote
        commas += plain.count(b",", at, end)
        containers += plain.count(b"[", at, end) + plain.count(b"{", at, end)
        strings += 1
        if containers > MAX_CONTAINERS:
            text = f"the body has more than {MAX_CONTAINERS} lists and objects: send fewer"
            raise ApiError(400, text, code="too_large")
        # No valid body has more strings, as values and as names, and this is to end soon whatever it is given.
        if commas > MAX_VALUES or strings > 2 * MAX_VALUES + 3:
            raise ApiError(400, f"the body has more than {MAX_VALUES} values: send fewer", code="too_large")
        # Behind the string; one that does not end is the parser's to refuse.
        at = -1 if quote < 0 else plain.find(b'"', quote + 1) + 1 or -1


def _json(body: bytes) -> Any:
    _bound(body)
    try:
        text = body.decode()
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_constant)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} of it", code="invalid_json") from error
    except UnicodeEncodeError as error:
        text = "the body has half of a surrogate pair (\\ud800 to \\udfff), which is no character: send whole ones"
        raise ApiError(400, text, code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply: send plain values", code="invalid_json") from error
    except ValueError as error:
        what = "a number of thousands of digits" if "integer string conversion" in str(error) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {what}", code="invalid_json") from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    known = dict(pairs)
    if len(known) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _Refused(f"the key {twice[:MAX_NAME]!r} is there twice; send it once")
    return known


def _constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is no JSON number")


def _field_error(error: msgspec.ValidationError) -> ApiError:
    """`Expected `int`, got `str` - at `$.max_tokens`` -> `max_tokens: expected `int`, got `str``, param max_tokens."""
    text = str(error)
    if (missing := re.search(r"missing required field `(\w+)`", text)) and " - at `$." not in text:
        return ApiError(400, f"{missing[1]}: is required; send it", param=missing[1], code="missing_required_parameter")
    what, _, path = text.partition(" - at `$.")
    if not path:
        return ApiError(400, f"the body must be a JSON object: {text}", code="invalid_type")
    path = path.rstrip("`")
    param = re.split(r"[.\[]", path)[0]
    if bound := re.fullmatch(r"Expected `(\w+)` (of length )?(>=|<=|>|<) (\S+)", what):
        kind, length, sign, limit = bound.groups()
        verb, unit = ("have", _UNITS[kind]) if length else ("be", "")
        what = f"must {verb} {_SIGNS[sign]} {limit.removesuffix('.0')}{unit}"
        return ApiError(400, f"{path}: {what}", param=param, code="invalid_value")
    what = what[:1].lower() + what[1:]
    return ApiError(400, f"{path}: {what}; send what is expected", param=param, code="invalid_type")


# -- fields that no type knows -----------------------------------------------------------------------------------------

#: What may be under a name: the shape of an object (or of a list of them), or None, where everything is understood.
Shape = Mapping[str, Any]


@cache
def _shape(kind: type[msgspec.Struct]) -> Shape:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return {field.encode_name: _shape_of(field.type) for field in info.fields}


def _shape_of(info: msgspec.inspect.Type) -> Shape | None:
    if isinstance(info, msgspec.inspect.StructType):
        return _shape(info.cls)
    if isinstance(info, msgspec.inspect.ListType):
        return _shape_of(info.item_type)
    if isinstance(info, msgspec.inspect.UnionType):
        return next((shape for each in info.types if (shape := _shape_of(each)) is not None), None)
    return None


def _collect(value: Any, shape: Shape | None, path: str, unknown: list[str], known: Container[str] = ()) -> None:
    """Each path once, without the positions in lists: a thousand messages have the same field."""
    if shape is None or len(unknown) >= MAX_TOLD:
        return
    if isinstance(value, list):
        for item in value:
            _collect(item, shape, path, unknown)
    elif isinstance(value, dict):
        for name, inner in value.items():
            here = f"{path}.{name[:MAX_NAME]}" if path else name[:MAX_NAME]
            if name in shape:
                _collect(inner, shape[name], here, unknown)
            elif here not in unknown and here not in known and len(unknown) < MAX_TOLD:
                unknown.append(here)
