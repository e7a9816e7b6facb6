"""`Tool`: a function that a model may call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function, as the model and the grammar see it.

    Args:
        name: its name, 1 to 64 letters, digits, underscores and hyphens.
        parameters: the JSON schema of its arguments, of type object.
        strict: whether a schema that a grammar cannot follow to the letter is refused.
        given: the whole tool in OpenAI's form, which the chat template gets.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    given: Mapping[str, Any]
