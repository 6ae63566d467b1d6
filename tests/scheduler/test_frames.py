"""Goal: a frame is read as it was written, and whatever else arrives is refused with a sentence that says why."""

from __future__ import annotations

import msgspec
import pytest

from pyengine.scheduler.messages import (
    PROTOCOL,
    Codec,
    GatewayAlive,
    Message,
    ProtocolError,
    Route,
    RouteEnded,
    SetRole,
    ToConductor,
)
from pyengine.scheduler.types import Role, Slo

ROUTE = Route(
    request=2**64 - 1,
    attempt=1,
    model="model",
    namespace=bytes(32),
    keys=bytes(range(32)),
    prompt_tokens=37,
    max_tokens=8,
    slo=Slo(ttft=1.0),
)
encode = msgspec.msgpack.encode


def test_a_frame_has_any_number_of_messages_in_their_order() -> None:
    codec = Codec(ToConductor)
    several: list[list[Message]] = [[], [ROUTE], [GatewayAlive(gateway="g"), ROUTE, RouteEnded(request=-1, attempt=0)]]
    for messages in several:
        assert codec.decode(codec.encode(messages)) == messages
    alone = Codec(SetRole)
    assert alone.decode(alone.encode([SetRole(role=Role.BOTH)])) == [SetRole(role=Role.BOTH)]


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (encode([PROTOCOL + 1, {"type": "Unknown"}]), f"peer speaks protocol {PROTOCOL + 1}"),
        (encode([PROTOCOL + 1]), f"peer speaks protocol {PROTOCOL + 1}"),
        (encode([-1, ROUTE]), "peer speaks protocol -1"),
        (encode([PROTOCOL, {"type": "Unknown"}]), "Unknown"),
        (encode([PROTOCOL, GatewayAlive(gateway="g"), 7]), "a number is no message"),
        (encode([ROUTE]), "it has no number"),
        (encode([ROUTE, PROTOCOL]), "it has no number"),
        (encode([True, ROUTE]), "bool"),
        (encode([]), "not enough"),
        (encode({"type": "Route"}), "array"),
        (encode([PROTOCOL, ROUTE])[:-1], "truncated"),
        (encode([PROTOCOL, SetRole(role=Role.BOTH)]), "SetRole"),
        (b"", "truncated"),
        (bytes(range(128, 256)), "not a frame"),
    ],
)
def test_what_is_no_frame_is_refused(frame: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        Codec(ToConductor).decode(frame)
