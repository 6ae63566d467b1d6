"""Errors as the OpenAI API tells them: a status, and a body with message, type, param and code."""

from __future__ import annotations

import math

import msgspec

from pyengine.chat.errors import Unservable
from pyengine.gateway.request import ADMISSION_KINDS, ErrorKind, RequestError


class ApiError(Exception):
    """What the client gets instead of an answer. retry_after: seconds until it may be worth asking again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def headers(self) -> dict[str, str]:
        """Retry-After knows whole seconds only; OpenAI's clients read the other one first."""
        if self.retry_after is None:
            return {}
        wait = max(self.retry_after, 0.0)
        return {"Retry-After": str(max(1, math.ceil(wait))), "retry-after-ms": str(math.ceil(1000.0 * wait))}

    def body(self) -> bytes:
        # A client's own words may be in the message, and they need not be text that can be sent.
        message = self.message.encode("utf-8", "replace").decode()
        error = {"message": message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


_STATUS = {
    ErrorKind.BUSY: (429, "rate_limit_exceeded"),
    ErrorKind.UNAVAILABLE: (503, "service_unavailable"),
    ErrorKind.TOO_LARGE: (400, "context_length_exceeded"),
    ErrorKind.TIMEOUT: (504, "timeout"),
    ErrorKind.REFUSED: (400, "invalid_request"),
    ErrorKind.DENIED: (401, "invalid_api_key"),
    ErrorKind.BUG: (500, "internal_error"),
}


def api_error(error: RequestError | Unservable) -> ApiError:
    if isinstance(error, Unservable):
        return ApiError(400, str(error), param=error.param, code="invalid_value")
    status, code = _STATUS[error.kind]
    # Of a 429 the code says which objective would be missed, or that others come first.
    code = error.detail if error.detail in ADMISSION_KINDS else code
    return ApiError(status, error.reason, code=code, retry_after=error.retry_after)
