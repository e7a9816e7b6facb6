"""`Refusal`: an answer in the form of OpenAI's errors. Every error that a client sees is one of these."""

from __future__ import annotations

from typing import Any

# the status of each code; the page docs/how-to/run-a-server.md lists them
CODES = {
    "invalid_value": 400, "unknown_field": 400, "invalid_json": 400, "unsupported": 400, "invalid_grammar": 400,
    "invalid_request": 400,
    "invalid_api_key": 401, "host_not_allowed": 403, "model_not_found": 404, "not_found": 404, "method_not_allowed": 405,
    "read_timeout": 408, "body_too_large": 413, "request_line_too_long": 414, "not_json": 415, "headers_too_large": 431,
    "queue_full": 429, "key_limit": 429,
    "server_error": 500,
    "model_loading": 503, "engine_down": 503, "shutting_down": 503,
    "deadline_exceeded": 504,
}  # fmt: skip
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """A request that is not answered, or not to the end.

    Args:
        code: one of CODES.
        message: one sentence: what came, what is due, what to do.
        param: the field that it is about.
        headers: headers of the answer.
    """

    def __init__(self, code: str, message: str, *, param: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.headers = headers or {}

    @property
    def status(self) -> int:
        """The HTTP status."""
        return CODES[self.code]

    @property
    def body(self) -> dict[str, Any]:
        """The answer's body."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def retry_later(code: str, message: str, seconds: int) -> Refusal:
    """Returns a refusal that says when to come again."""
    return Refusal(code, message, headers={"Retry-After": str(seconds)})
