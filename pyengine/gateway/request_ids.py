"""Every answer says which request it is of: the client's X-Request-Id, or one made here.

Outermost of all, so that no answer is without. Reference: ASGI 3.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyengine.gateway.errors import ApiError

HEADER = b"x-request-id"
#: What a client may call its request: it goes into logs, headers and other systems as it is.
VALID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")


class RequestIds:
    """Puts `request_id` (str) into the state of a request's scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = {value for name, value in scope["headers"] if name == HEADER}
        given = next(iter(sent), b"")
        valid = len(sent) == 1 and VALID.fullmatch(given) is not None
        number = given if valid else secrets.token_hex(12).encode()
        # What stands outside may have put its own into the state: it stays.
        scope.setdefault("state", {}).update(request_id=number.decode())

        async def identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (HEADER, number)]
            await send(message)

        if sent and not valid:
            await _refuse(identified)
            return
        await self._app(scope, receive, identified)


async def _refuse(send: Any) -> None:
    text = "X-Request-Id: send one, of 1 to 128 letters, digits and ._:/+=@-, beginning with a letter or digit"
    error = ApiError(400, text, param="X-Request-Id", code="invalid_header")
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body(), "more_body": False})
