"""Goal: sockets are closed to strangers and tell when a link stands or falls. Method: real sockets on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from pyengine.scheduler.links import LinkError, bind, curve_pair, dial, link_is_up, monitor

KEY = bytes(range(32))
#: Milliseconds: far longer than any event on loopback takes.
PATIENCE = 10_000


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    # Nothing blocks for ever: a send that finds no link raises Again in the end.
    context.setsockopt(zmq.SNDTIMEO, PATIENCE)
    context.setsockopt(zmq.RCVTIMEO, PATIENCE)
    yield context
    context.destroy(linger=0)


def next_link(watcher: zmq.Socket[Any]) -> bool:
    assert watcher.poll(PATIENCE)
    return link_is_up(int(recv_monitor_message(watcher)["event"]))


def test_key_pairs_follow_from_the_session_key() -> None:
    assert curve_pair(KEY, "server") == curve_pair(KEY, "server")
    assert curve_pair(KEY, "server") != curve_pair(KEY, "client")
    assert curve_pair(KEY, "server") != curve_pair(bytes(32), "server")


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_messages_pass_and_disconnects_are_events(context: zmq.Context[Any], kind: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    server = bind(context.socket(zmq.ROUTER), f"ipc://{tmp_path}/s" if kind == "ipc" else "tcp://127.0.0.1:*", KEY)
    endpoint = server.getsockopt_string(zmq.LAST_ENDPOINT)
    client = context.socket(zmq.DEALER)
    watcher = monitor(client)
    dial(client, endpoint, KEY)
    assert next_link(watcher)
    client.send(b"hello")
    assert server.poll(PATIENCE)
    assert server.recv_multipart()[1] == b"hello"
    server.close()
    assert not next_link(watcher)
    again = bind(context.socket(zmq.ROUTER), endpoint, KEY)
    assert next_link(watcher)
    assert not again.closed


def test_a_stranger_cannot_connect(context: zmq.Context[Any]) -> None:
    server = bind(context.socket(zmq.ROUTER), "tcp://127.0.0.1:*", KEY)
    endpoint = server.getsockopt_string(zmq.LAST_ENDPOINT)
    stranger = dial(context.socket(zmq.DEALER), endpoint, bytes(32))
    naked = dial(context.socket(zmq.DEALER), endpoint, None)
    friend = context.socket(zmq.DEALER)
    watcher = monitor(friend)
    for socket in (stranger, naked):
        # Who was turned away already has nowhere to send to.
        with contextlib.suppress(zmq.Again):
            socket.send(b"let me in", zmq.NOBLOCK)
    dial(friend, endpoint, KEY)
    assert next_link(watcher)
    friend.send(b"it is me")
    assert server.poll(PATIENCE)
    assert server.recv_multipart()[1] == b"it is me"
    assert not server.poll(0)


def test_endpoints_that_must_not_be_used_are_refused(context: zmq.Context[Any], tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="--secret-file"):
        bind(context.socket(zmq.ROUTER), "tcp://0.0.0.0:*", None)
    tmp_path.chmod(0o755)
    with pytest.raises(LinkError, match="chmod 700"):
        bind(context.socket(zmq.ROUTER), f"ipc://{tmp_path}/s", KEY)
    with pytest.raises(LinkError, match="cannot be used"):
        bind(context.socket(zmq.ROUTER), f"ipc://{tmp_path}/missing/s", KEY)
    server = bind(context.socket(zmq.ROUTER), "tcp://127.0.0.1:*", None)
    with pytest.raises(LinkError, match="another instance"):
        bind(context.socket(zmq.ROUTER), server.getsockopt_string(zmq.LAST_ENDPOINT), None)
    with pytest.raises(LinkError, match="is not an endpoint"):
        dial(context.socket(zmq.DEALER), "nonsense", None)
