"""`RequestMiddleware`: around every request its id, its line in the log, and an answer to unforeseen errors."""

from __future__ import annotations

import json
import re
import secrets
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rooftile.server import limits
from rooftile.server.http.body import ClientGone
from rooftile.server.http.guard import Headers, Origins, check_host
from rooftile.server.observe.log import AccessRecord, log, log_request
from rooftile.server.refusals import Refusal
from rooftile.server.service import Service

_WORD = re.compile(rf"[A-Za-z0-9._-]{{1,{limits.NAME_CHARACTERS}}}")
# what browsers must not guess, frame or keep
_HEADERS = (
    (b"x-content-type-options", b"nosniff"), (b"x-frame-options", b"DENY"), (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)  # fmt: skip


class RequestMiddleware:
    """The outermost application.

    Args:
        app: the routes.
        service: the server.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._origins = Origins(service.settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        access = AccessRecord(given if _WORD.fullmatch(given) else secrets.token_hex(12), scope["method"], scope["path"][:128])
        scope.setdefault("state", {})["access"] = access
        began = time.monotonic()
        exchange = _Exchange(access, receive, send, closes=b"expect" in headers, more=self._origins.headers(headers))
        try:
            self._check(scope, given)
            preflight = self._origins.preflight(scope["method"], headers)
            if preflight is not None:
                await exchange.answer(204, preflight)
                return
            await self._app(scope, exchange.receive, exchange.send)
        except ClientGone:
            access.end = access.end or "gone"
        except Refusal as refusal:
            await self._refuse(refusal, access, exchange.send)
        except Exception:
            log.exception("request %s: a mistake of the server", access.id)
            if not exchange.complete:
                await self._refuse(mistake(access.id), access, exchange.send)
        finally:
            access.seconds = time.monotonic() - began
            self._finish(access)

    def _check(self, scope: Scope, id: str) -> None:
        """Refuses a request by headers that no route looks at."""
        if len(id) > limits.NAME_CHARACTERS:
            why = f"X-Request-Id has {len(id):,} characters; may have at most {limits.NAME_CHARACTERS}"
            raise Refusal("invalid_value", why)
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1:
            raise Refusal("invalid_request", f"the request has {len(hosts)} Host headers; must have one")
        check_host(hosts[0].decode("latin-1") if hosts else "", self._service.settings)

    async def _refuse(self, refusal: Refusal, access: AccessRecord, send: Send) -> None:
        if access.status:
            # the answer has begun, so its end is cut off
            raise ConnectionError(refusal.message)
        access.end = refusal.code
        body = json.dumps(refusal.body).encode()
        headers: list[Any] = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.lower().encode(), value.encode()) for name, value in refusal.headers.items()]
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _finish(self, access: AccessRecord) -> None:
        if access.status >= 400:
            self._service.metrics.note_refusal(access.end or "other")
        if access.prompt_tokens:
            self._service.metrics.note_request(access)
        # an orchestra of probes asks every second
        if access.path not in ("/health", "/metrics") or access.status >= 400:
            log_request(access)


class _Exchange:
    """The messages of one request between the application and its client, and what is noted of them.

    Args:
        access: what the log will say about the request.
        receive, send: the client's end.
        closes: whether the client asks before it sends its body. Unless it is told to, it sends none, and its next request would
            be read as the body.
        more: headers of the answer.
    """

    def __init__(self, access: AccessRecord, receive: Receive, send: Send, *, closes: bool, more: Headers) -> None:
        self.complete = False
        self._access = access
        self._receive = receive
        self._send = send
        self._closes = closes
        self._more = more

    async def receive(self) -> Message:
        """Returns the client's next message."""
        self._closes = False
        return await self._receive()

    async def answer(self, status: int, headers: Headers) -> None:
        """Sends an answer without a body."""
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": b""})

    async def send(self, message: Message) -> None:
        """Sends a message to the client."""
        self.complete = message["type"] == "http.response.body" and not message.get("more_body", False)
        if message["type"] == "http.response.start":
            self._access.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self._access.id.encode()), *_HEADERS, *self._more]
            message["headers"] = [*headers, *([(b"connection", b"close")] if self._closes else ())]
        await self._send(message)


def mistake(id: str) -> Refusal:
    """Returns the answer to an unforeseen error: it shows no path, no address and no stack."""
    return Refusal("server_error", f"the server has made a mistake; its log has it under {id}")
