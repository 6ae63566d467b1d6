"""How many bytes of requests' bodies may be under way at once, over all connections."""

from __future__ import annotations

from types import TracebackType

from pyengine.gateway.request import ErrorKind, RequestError

#: Bytes of each body that are nobody's business: the server's own buffer for a connection is as large. So who holds the
#: whole budget with large bodies keeps no small one out.
FREE = 64 << 10


class Budget:
    """Of one gateway; used on its loop. size: bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0

    def share(self) -> Share:
        return Share(self)


class Share:
    """Of one body, given back when the context is left."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._taken = 0

    def __enter__(self) -> Share:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._budget.taken -= self._taken
        self._taken = 0

    def grow(self, size: int) -> None:
        """The body has so many bytes by now. Raises RequestError (unavailable) beyond the budget."""
        more = max(0, size - FREE) - self._taken
        if more <= 0:
            return
        if self._budget.taken + more > self._budget.size:
            text = f"bodies under way have {self._budget.taken} bytes, of {self._budget.size}: send this one again soon"
            raise RequestError(ErrorKind.UNAVAILABLE, text, 1.0)
        self._budget.taken += more
        self._taken += more
