"""Reads what a `to_json` wrote."""

from __future__ import annotations

import json
from typing import Any

from rooftile.errors import InvalidInput


def values_of(written: str, form: str) -> dict[str, Any]:
    """Returns the values of a JSON object with this "form", without it.

    Raises:
        InvalidInput: the text is something else.
    """
    if not isinstance(written, str):
        raise InvalidInput(f"this is {type(written).__name__}; pass the text that to_json wrote")
    try:
        values = json.loads(written)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"this is not JSON ({error}); pass the text that to_json wrote") from None
    found = values.pop("form", None) if isinstance(values, dict) else None
    if found != form:
        raise InvalidInput(f"the JSON has the form {found!r}; must be {form!r}, as to_json writes it")
    return dict(values)
