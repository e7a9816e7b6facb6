"""A request that must be refused, and the bodies and paths of many tests."""

from __future__ import annotations

import re

from rooftile.server.refusals import CODES

TEXT = {"prompt": "a", "max_tokens": 1}
TALK = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def refused(server, path: str, body: object, code: str, param: str | None = None) -> str:
    """Returns the sentence with which a body is refused: with this code, about this field, and without a detail of the server."""
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (CODES[code], code), answer.text
    assert set(error) == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param, error
    assert re.search(r"/(home|tmp|usr|var)/|0x[0-9a-f]{6}|Traceback|pydantic", answer.text) is None
    return error["message"]
