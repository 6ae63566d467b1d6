"""Goal: who never looks at the dashboard pays nothing for it, and who lacks its packages is told. Method: the
middleware before an application that notes what reaches it; a process that only makes a gateway's application.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from pyengine.dashboard import lazy
from pyengine.gateway.errors import ApiError


async def test_without_nicegui_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "available", lambda: False)
    heard: list[str] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        heard.append(scope["path"])

    app_with = lazy.WithDashboard(inner, lazy.Pages(None))  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="pip install") as refused:
        await app_with({"type": "http", "path": "/dashboard"}, None, None)  # type: ignore[arg-type]
    assert refused.value.status == 501
    await app_with({"type": "http", "path": "/dashboards"}, None, None)  # type: ignore[arg-type]
    assert heard == ["/dashboards"]


def test_a_gateway_that_nobody_looks_at_has_not_imported_nicegui() -> None:
    code = "import sys, pyengine.gateway.server; print('nicegui' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"
