"""Types of JSON schemas, for syntaxes whose values are no JSON: a text is what its function's schema says that it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# keys of a schema that say what a value means, and nothing about which ones there may be
SILENT = frozenset(
    ("type", "title", "description", "default", "examples", "enum", "const", "properties", "required", "items", "$defs",
     "definitions", "$ref", "$schema", "$id", "$comment", "anyOf", "oneOf", "additionalProperties", "deprecated", "x-guidance")
)  # fmt: skip
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
# references that refer to one another
_DEEPEST = 16


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema, or the one in the same document that it refers to; any other value is a schema that says nothing."""
    for _ in range(_DEEPEST):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for part in reference[2:].split("/"):
            schema = schema.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Returns the types of a schema's values; empty if they may be any.

    Example:
        >>> sorted(types_of({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {}))
        ['integer', 'null']
    """
    found = resolved(schema, root)
    kind = found.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    values = [found["const"]] if "const" in found else found.get("enum")
    if isinstance(values, list):
        return frozenset(_TYPES.get(type(value), "string") for value in values)
    several = found.get("anyOf") or found.get("oneOf")
    if isinstance(several, list) and depth < _DEEPEST:
        each = [types_of(one, root, depth + 1) for one in several]
        return frozenset() if frozenset() in each else frozenset().union(*each)
    return frozenset()


def takes_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Tells whether a schema's values may be strings, so that any text is one."""
    types = types_of(schema, root)
    return not types or "string" in types


def value_of(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """Returns a text as JSON of the type that a schema has; a string where it fits no other.

    Python's True, False and None are taken, too: templates write them.

    Example:
        >>> value_of("2", {"type": "integer"}, {}), value_of("2", {"type": "string"}, {})
        ('2', '"2"')
    """
    types = types_of(schema, root)
    if types != {"string"}:
        plain = text.strip()
        plain = {"True": "true", "False": "false", "None": "null"}.get(plain, plain)
        try:
            value = json.loads(plain, parse_constant=_refuse)
        except (ValueError, RecursionError):
            pass
        else:
            kind = _TYPES[type(value)]
            if not types or kind in types or (kind == "integer" and "number" in types):
                return plain
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")
