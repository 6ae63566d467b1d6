"""One rank of a replica on PyTorch, other than the leader: a process that does what it is told, in that order.

    python -m pyengine.child --parent PID --name NAME pyengine.backends.torch.rank DESCRIPTOR

It ends when its leader lets go of it, and when the leader or another rank dies.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from pathlib import Path

import msgspec
import numpy as np

from pyengine import env, logs
from pyengine.backend import Slice
from pyengine.backends.torch.backend import TorchBackend
from pyengine.backends.torch.parallel import Load
from pyengine.backends.torch.part import Part
from pyengine.group_copier import RankCopier
from pyengine.ranks import Allocate, Answer, Begin, Channel, Compute, Join, Message, Row
from pyengine.scheduler.types import SamplingParams

logger = logging.getLogger(__name__)

#: How a token is drawn is the leader's matter; that one is makes the row one of the logits.
SAMPLED = SamplingParams()


def main() -> int:
    """Exit status 0: the leader has let go. 1: something is lost or wrong, which was logged or told."""
    # Ctrl-C and a stop are for the leader, who ends this process in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        begin: Begin = channel.receive(Begin)[0]
        logs.begin(f"rank {begin.rank}", env.read().log_level, as_json=begin.log_json)
        try:
            backend = load(begin)
        except (ValueError, MemoryError) as error:
            channel.send(_refusal(error))
            return 1
        channel.send(Answer())
        return serve(channel, backend)
    except (EOFError, BrokenPipeError):
        return 0


def load(begin: Begin) -> TorchBackend:
    """This rank's part of the model. Raises ModelError."""
    told = msgspec.msgpack.decode(begin.model, type=Load, dec_hook=_path)
    part = Part(told.checkpoint.config, begin.rank, begin.ranks)
    return TorchBackend(
        told.checkpoint, block_tokens=told.block_tokens, threads=told.threads, dtype=told.dtype, part=part
    )


def serve(channel: Channel, backend: TorchBackend) -> int:
    """Does what comes, until the leader lets go: EOFError."""
    copier = RankCopier(backend, backend.namespace.kv, backend.group.part.heads)
    while True:
        message, descriptors = channel.receive(Message)
        match message:
            case Join(file):
                backend.group.meet(file)
                channel.send(Answer())
            case Allocate(pages):
                try:
                    backend.allocate(pages)
                    channel.send(Answer())
                except MemoryError as error:
                    channel.send(_refusal(error))
            case Compute(rows):
                try:
                    backend.compute([_slice(row) for row in rows])
                except RuntimeError as error:
                    logger.error("a step is lost: %s", error)
                    return 1
            case _:
                if (answer := copier.on(message, descriptors)) is not None:
                    channel.send(answer)


def _refusal(error: Exception) -> Answer:
    return Answer(refused=str(error), memory=isinstance(error, MemoryError))


def _slice(row: Row) -> Slice:
    return Slice(
        tokens=np.frombuffer(row.tokens, np.uint32),
        start=row.start,
        pages=np.frombuffer(row.pages, np.int32),
        sampling=SAMPLED if row.sampled else None,
    )


def _path(kind: type, value: object) -> object:
    return Path(str(value)) if kind is Path else value
