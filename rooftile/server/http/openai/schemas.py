"""Checks the size of a client's JSON schema."""

from __future__ import annotations

import json
from typing import Any

from rooftile.server import limits
from rooftile.server.http.body import check_depth
from rooftile.server.refusals import Refusal


def schema_text(schema: Any, param: str) -> str:
    """Returns a schema as a text, in which numbers of any size cross to the engine.

    Raises:
        Refusal: it is none, too deep or too large.
    """
    if not isinstance(schema, dict | bool):
        raise Refusal("invalid_value", f"the schema is of type {type(schema).__name__}; must be an object", param=param)
    try:
        check_depth(schema, limits.SCHEMA_DEPTH)
    except Refusal:
        raise Refusal("invalid_grammar", f"the schema is nested deeper than {limits.SCHEMA_DEPTH} levels", param=param) from None
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    size = len(text.encode())
    if size > limits.SCHEMA_BYTES:
        why = f"the schema has {size:,} bytes; may have at most {limits.SCHEMA_BYTES:,}"
        raise Refusal("invalid_grammar", why, param=param)
    return text
