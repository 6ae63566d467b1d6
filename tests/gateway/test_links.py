"""Goal: a gateway's link comes back whatever has answered at its peer's address meanwhile. Method: one `Link` on
loopback; the test is the peer, and ticks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import zmq

from pyengine.gateway import links as module
from pyengine.gateway.links import Link
from pyengine.scheduler.links import bind
from pyengine.scheduler.messages import Codec, ConductorToGateway, GatewayAlive, GatewayHello
from tests.stranger import GREETINGS, PATIENCE, Stranger

KEY = bytes(32)


@pytest.mark.parametrize("greeting", GREETINGS)
async def test_a_link_outlives_a_stranger_at_its_peers_port(greeting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # However slow the machine: no handshake is given up, nor said to be late.
    for patience in ("DEAD_AFTER", "DIAL_PATIENCE"):
        monkeypatch.setattr(module, patience, PATIENCE)
    context: zmq.Context[Any] = zmq.Context()
    peer = bind(context.socket(zmq.ROUTER), "tcp://127.0.0.1:*", KEY)
    endpoint = peer.getsockopt_string(zmq.LAST_ENDPOINT)
    changes: list[bool] = []
    link = Link(
        context,
        endpoint,
        KEY,
        Codec(ConductorToGateway),
        on_messages=lambda _: None,
        on_change=changes.append,
        greeting=GatewayHello(gateway="g", incarnation=1),
        beat=GatewayAlive(gateway="g"),
    )

    async def until(up: bool) -> None:
        async with asyncio.timeout(PATIENCE):
            while link.up is not up:
                link.tick(asyncio.get_running_loop().time())
                await asyncio.sleep(0.01)

    try:
        await until(True)
        peer.close(0)
        await until(False)
        stranger = Stranger(int(endpoint.rpartition(":")[2]), GREETINGS[greeting])
        await asyncio.to_thread(stranger.leave)
        assert not link.up
        link.tick(asyncio.get_running_loop().time() + PATIENCE + 1)
        peer = bind(context.socket(zmq.ROUTER), endpoint, KEY)
        await until(True)
        assert changes == [True, False, True]
    finally:
        link.close()
        peer.close(0)
        context.term()
