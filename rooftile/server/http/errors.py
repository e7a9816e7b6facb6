"""Answers errors of the routes in OpenAI's form."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rooftile.errors import InvalidInput, Unsupported
from rooftile.server.http.anthropic.errors import anthropic_body
from rooftile.server.http.body import ClientGone
from rooftile.server.http.middleware import mistake
from rooftile.server.http.openai.generation import refusal_of
from rooftile.server.observe.log import AccessRecord
from rooftile.server.refusals import Refusal


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns an answer of JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def _answer_with(request: Request, refusal: Refusal) -> Response:
    access: AccessRecord = request.state.access
    access.end = refusal.code
    if request.scope["path"].startswith("/v1/messages"):
        return json_answer(anthropic_body(refusal) | {"request_id": access.id}, refusal.status, refusal.headers)
    return json_answer(refusal.body, refusal.status, refusal.headers)


async def _refused(request: Request, error: Any) -> Response:
    return _answer_with(request, error)


async def _wrong(request: Request, error: Any) -> Response:
    return _answer_with(request, refusal_of(error, ()))


async def _no_route(request: Request, error: Any) -> Response:
    if error.status_code == 405:
        # the router has a set of them, in any order
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        why = f"the method is {request.method[:16]}; this path has {allowed}"
        refusal = Refusal("method_not_allowed", why, headers={"Allow": allowed})
    else:
        path = request.scope["path"][:80]
        refusal = Refusal("not_found", f"the path {path!r} is none of this server's; /openapi.json lists them")
    return _answer_with(request, refusal)


async def _gone(request: Request, error: Any) -> Response:
    request.state.access.end = "gone"
    return Response(status_code=499)


async def _mistaken(request: Request, error: Any) -> Response:
    return _answer_with(request, mistake(request.state.access.id))


HANDLERS = (
    (Refusal, _refused), (HTTPException, _no_route), (ClientGone, _gone), (InvalidInput, _wrong), (Unsupported, _wrong),
    (Exception, _mistaken),
)  # fmt: skip
