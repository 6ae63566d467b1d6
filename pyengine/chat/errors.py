"""What is wrong with what was asked for."""

from __future__ import annotations


class Unservable(ValueError):
    """Nobody can answer this request; the message says why. param: which part of it is wrong, as the API calls it."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param
