"""An application in this process, without an engine: what is refused before one is needed."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from rooftile.server.http.app import make_app
from rooftile.server.service import Service
from rooftile.server.settings import ServerSettings


def ask(method: str, path: str, *, service: Any = None, base: str = "http://127.0.0.1:8000", **given: Any) -> httpx.Response:
    """Returns the answer of a server with these settings, whose engine has not been started."""
    settings = {name: given.pop(name) for name in list(given) if name in ServerSettings.__dataclass_fields__}

    async def go() -> httpx.Response:
        app = make_app(service or Service(ServerSettings(model="folder/tiny", **settings)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base) as client:
            return await client.request(method, path, **given)

    return asyncio.run(go())
