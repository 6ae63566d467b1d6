"""Several gateways behind one address: whichever is asked, it tells what all have counted.

Each listens on a unix socket of its name in a directory that they share, and tells whoever connects what it knows. What
it tells it has written to a file before, from which its next life goes on: so no counter that was ever shown is smaller
later, whoever dies. What a gateway counted in the last SAVE_EVERY seconds of its life, and told nobody, is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pyengine.gateway.metrics import Families, counters, summed

log = logging.getLogger("pyengine.gateway")

#: Seconds between two savings.
SAVE_EVERY = 1.0
#: Seconds in which a sibling answers; what it saved last stands for it then.
PATIENCE = 0.5
#: Bytes of one that is told: hundreds of models and thousands of tenants.
MAX_BYTES = 64 << 20


class Told(msgspec.Struct, frozen=True):
    """families: samples of /metrics. active: requests under way."""

    families: Families = {}
    active: int = 0


class Siblings:
    """folder: private to the gateways. names: all of them; own: this one's. tell: what this life of it knows.

    Used on one loop.
    """

    def __init__(self, folder: Path, names: Sequence[str], own: str, tell: Callable[[], Told]) -> None:
        self._folder = folder
        self._others = [name for name in names if name != own]
        self._name = own
        self._tell = tell
        self._past: Families = {}
        #: The last saving has failed.
        self._unsaved = False
        self._server: asyncio.Server | None = None
        self._saver: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Goes on where an earlier life has ended. Raises OSError."""
        self._past = self._saved(self._name)
        path = self._folder / self._name
        # An earlier life was killed, and left it.
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._answer, path)
        self._saver = asyncio.create_task(self._save_for_ever())

    async def close(self) -> None:
        """Idempotent."""
        if self._saver is not None:
            self._saver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._saver
            self.own()
        if self._server is not None:
            self._server.close()
        self._saver = self._server = None

    def own(self) -> Told:
        """With what earlier lives have counted. It is saved, so that a later life knows it."""
        told = self._tell()
        told = Told(summed(told.families, self._past), told.active)
        file = self._folder / f"{self._name}.counters"
        new = file.with_suffix(".new")
        try:
            new.write_bytes(msgspec.msgpack.encode(counters(told.families)))
            new.rename(file)
        except OSError as error:
            # The next saving may do; until then a death would lose what was counted since the last one.
            if not self._unsaved:
                log.error("what this gateway has counted cannot be saved: %s", error)
            self._unsaved = True
        else:
            self._unsaved = False
        return told

    async def all(self) -> Told:
        """Of all gateways together; of one that does not answer, what it has counted."""
        whole = self.own()
        for told in await asyncio.gather(*map(self._ask, self._others)):
            whole = Told(summed(whole.families, told.families), whole.active + told.active)
        return whole

    async def _ask(self, name: str) -> Told:
        try:
            async with asyncio.timeout(PATIENCE):
                reader, writer = await asyncio.open_unix_connection(self._folder / name, limit=MAX_BYTES)
                try:
                    return msgspec.msgpack.decode(await reader.read(), type=Told)
                finally:
                    writer.close()
        except (OSError, TimeoutError, msgspec.MsgspecError):
            return Told(self._saved(name))

    def _saved(self, name: str) -> Families:
        try:
            return msgspec.msgpack.decode((self._folder / f"{name}.counters").read_bytes(), type=Families)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            log.error("what gateway %s has counted cannot be read: %s; it counts from 0", name, error)
            return {}

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(msgspec.msgpack.encode(self.own()))
            await writer.drain()
        writer.close()

    async def _save_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY)
            self.own()
