"""Before the gateway's application: requests for /dashboard go to the pages, which are made with the first of them.

NiceGUI takes a second and 50 MB to import, and its own tasks: who never looks pays nothing. ASGI 3.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pyengine.gateway.errors import ApiError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from pyengine.gateway.service import Service

log = logging.getLogger(__name__)

PATH = "/dashboard"
LACKING = "the dashboard needs NiceGUI: pip install 'pyengine-llm[dashboard]', then start the gateway again"


def available() -> bool:
    """Whether NiceGUI is installed."""
    return importlib.util.find_spec("nicegui") is not None


class Pages:
    """The pages of one gateway, or what is said in their place."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._made: asyncio.Future[FastAPI] | None = None
        self._living: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    @property
    def port(self) -> int:
        """Where they are, if not at the address of all gateways; 0: there."""
        return self._service.config.dashboard_port

    async def close(self) -> None:
        self._closing.set()
        if self._living is not None:
            await asyncio.gather(self._living, return_exceptions=True)

    async def app(self) -> FastAPI:
        """The application that has them; whoever comes while it is made waits for it."""
        if self._made is None:
            self._made = asyncio.ensure_future(self._make())
        try:
            return await asyncio.shield(self._made)
        except BaseException:
            if self._made is not None and self._made.done():
                self._made = None
            raise

    async def _make(self) -> FastAPI:
        # The import holds up nobody's stream.
        await asyncio.to_thread(importlib.import_module, "nicegui")
        from pyengine.dashboard.pages import build

        app = build(self._service)
        begun = asyncio.Event()
        self._living = asyncio.create_task(self._live(app, begun))
        waiting = asyncio.ensure_future(begun.wait())
        await asyncio.wait((self._living, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._living.done():
            self._living.result()
        return app

    async def _live(self, app: FastAPI, begun: asyncio.Event) -> None:
        async with app.router.lifespan_context(app):
            begun.set()
            await self._closing.wait()


class WithDashboard:
    """ASGI middleware, behind the door: who may not watch has been turned away."""

    def __init__(self, app: ASGIApp, pages: Pages) -> None:
        self._app = app
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] not in ("http", "websocket") or not (path == PATH or path.startswith(f"{PATH}/")):
            await self._app(scope, receive, send)
        elif not available():
            if scope["type"] == "http":
                raise ApiError(501, LACKING, code="no_dashboard")
            await self._app(scope, receive, send)
        elif self._elsewhere(scope):
            await RedirectResponse(self._there(scope))(scope, receive, send)
        elif path == PATH:
            await RedirectResponse(f"{PATH}/")(scope, receive, send)
        else:
            app = await self._pages.app()
            await app(scope, receive, send)

    def _elsewhere(self, scope: Scope) -> bool:
        """Of several gateways one has the pages, at a port of its own (see GatewayConfig)."""
        port = self._pages.port
        return bool(port) and scope["type"] == "http" and (scope.get("server") or ("", port))[1] != port

    def _there(self, scope: Scope) -> str:
        host = urlsplit(f"//{Headers(scope=scope).get('host', 'localhost')}").hostname or "localhost"
        name = f"[{host}]" if ":" in host else host
        return f"{scope['scheme']}://{name}:{self._pages.port}{PATH}/"
