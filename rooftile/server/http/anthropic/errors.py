"""Refusals in Anthropic's form."""

from __future__ import annotations

from typing import Any

from rooftile.server.refusals import Refusal

# the kinds of errors by status; others have the kind of a mistake of the server, or of a request
_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def anthropic_body(refusal: Refusal) -> dict[str, Any]:
    """Returns the body of an answer that refuses a request of /v1/messages."""
    kind = _KINDS.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": refusal.message}
    if refusal.param == "thread":
        # by this code clients know that they must send the whole conversation, and do
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": error}
