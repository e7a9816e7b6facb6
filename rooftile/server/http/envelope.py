"""`Envelope`: around every request its id, its line in the log, and an answer to errors that nobody foresaw."""

from __future__ import annotations

import json
import re
import secrets
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rooftile.server import limits
from rooftile.server.http.body import ClientGone
from rooftile.server.http.guard import check_host
from rooftile.server.observe.log import Account, log, tell
from rooftile.server.refusals import Refusal
from rooftile.server.service import Service

_WORD = re.compile(rf"[A-Za-z0-9._-]{{1,{limits.NAME_CHARACTERS}}}")
# what browsers must not guess, frame or keep
_HEADERS = (
    (b"x-content-type-options", b"nosniff"), (b"x-frame-options", b"DENY"), (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)  # fmt: skip


class Envelope:
    """The outermost application.

    Args:
        app: the routes.
        service: the server.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        account = Account(given if _WORD.fullmatch(given) else secrets.token_hex(12), scope["method"], scope["path"][:128])
        scope.setdefault("state", {})["account"] = account
        began = time.monotonic()

        complete = False

        async def note(message: Message) -> None:
            nonlocal complete
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start":
                account.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", account.id.encode()), *_HEADERS]
            await send(message)

        try:
            if len(given) > limits.NAME_CHARACTERS:
                why = f"X-Request-Id has {len(given):,} characters; may have at most {limits.NAME_CHARACTERS}"
                raise Refusal("invalid_value", why)
            check_host(headers.get(b"host", b"").decode("latin-1"), self._service.settings)
            await self._app(scope, receive, note)
        except ClientGone:
            account.end = account.end or "gone"
        except Refusal as refusal:
            await self._refuse(refusal, account, note)
        except Exception:
            log.exception("request %s: a mistake of the server", account.id)
            if not complete:
                await self._refuse(mistake(account.id), account, note)
        finally:
            account.seconds = time.monotonic() - began
            self._finish(account)

    async def _refuse(self, refusal: Refusal, account: Account, send: Send) -> None:
        if account.status:
            # the answer has begun, so its end is cut off
            raise ConnectionError(refusal.message)
        account.end = refusal.code
        body = json.dumps(refusal.body).encode()
        headers: list[Any] = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.lower().encode(), value.encode()) for name, value in refusal.headers.items()]
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _finish(self, account: Account) -> None:
        if account.status >= 400:
            self._service.metrics.rejected.labels(account.end or "other").inc()
        if account.prompt_tokens:
            self._service.metrics.note_request(account)
        # an orchestra of probes asks every second
        if account.path not in ("/health", "/metrics") or account.status >= 400:
            tell(account)


def mistake(id: str) -> Refusal:
    """Returns the answer to an error that nobody foresaw: it shows no path, no address and no stack."""
    return Refusal("server_error", f"the server has made a mistake; its log has it under {id}")
