"""One question to a conductor, as a gateway would ask it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import zmq

from .links import LinkError, dial
from .messages import (
    HEARTBEAT_EVERY,
    Clear,
    ClearOutcome,
    ClusterState,
    Codec,
    ConductorToGateway,
    Explain,
    Explained,
    GatewayAlive,
    GatewayHello,
)

A = TypeVar("A", ClearOutcome, Explained)
Question: TypeAlias = Clear | Explain


def ask(
    conductor: str,
    session_key: bytes,
    question: Question | Callable[[ClusterState], Question],
    kind: type[A],
    timeout: float,
) -> A:
    """The answer of this kind with the question's number. question: or what makes it of who is there.

    Raises TimeoutError, LinkError, and what that raises.
    """
    # Whoever asks from another machine has another one.
    name = f"conductor command {os.getpid()} {time.time_ns()}"
    codec = Codec(ConductorToGateway)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = dial(context.socket(zmq.DEALER), conductor, session_key)
    try:
        message = None if callable(question) else question
        hello = GatewayHello(gateway=name, incarnation=time.time_ns())
        socket.send(codec.encode([hello] if message is None else [hello, message]))
        spoken = time.monotonic()
        until = spoken + timeout
        while (now := time.monotonic()) < until:
            # It takes a gateway that says nothing for dead, however much it tells it meanwhile.
            if now - spoken >= HEARTBEAT_EVERY:
                socket.send(codec.encode([GatewayAlive(gateway=name)]))
                spoken = now
            if socket.poll(math.ceil(min(until - now, spoken + HEARTBEAT_EVERY - now) * 1000)):
                for answer in codec.decode(socket.recv()):
                    if message is None and callable(question) and isinstance(answer, ClusterState):
                        message = question(answer)
                        socket.send(codec.encode([message]))
                    elif message is not None and isinstance(answer, kind) and answer.number == message.number:
                        return answer
    except zmq.ZMQError as error:
        raise LinkError(f"{conductor}: {error.strerror}") from error
    finally:
        socket.close(linger=0)
        context.term()
    raise TimeoutError(f"no answer from {conductor} within {timeout:g} s: is the conductor there, with this secret?")
