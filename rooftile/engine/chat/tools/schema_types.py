"""Types of JSON schemas, for syntaxes whose values are no JSON: a text is what its function's schema says that it is."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

# keys of a schema that say what a value means, and nothing about which ones there may be
SILENT = frozenset(
    ("type", "title", "description", "default", "examples", "enum", "const", "properties", "required", "items", "$defs",
     "definitions", "$ref", "$schema", "$id", "$comment", "anyOf", "oneOf", "additionalProperties", "deprecated", "x-guidance")
)  # fmt: skip
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
# longer texts and lists are not counted by a grammar
MOST_COUNTED = 500
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


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Returns the types of a schema's values; empty if they may be any.

    Example:
        >>> sorted(types_of({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {}))
        ['integer', 'null']
    """
    types, left, seen = set[str](), [resolved(schema, root)], set[int]()
    while left:
        found = left.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        kind, values, several = found.get("type"), constants_of(found), found.get("anyOf") or found.get("oneOf")
        if isinstance(kind, str):
            types.add(kind)
        elif isinstance(kind, list):
            types.update(each for each in kind if isinstance(each, str))
        elif values:
            types.update(_TYPES.get(type(value), "string") for value in values)
        elif isinstance(several, list):
            left += [resolved(one, root) for one in several]
        else:
            return frozenset()
    return frozenset(types)


def counted(bound: Any) -> bool:
    """Tells whether a bound of a length is one that grammars count up to."""
    return type(bound) is int and 0 <= bound <= MOST_COUNTED


def first_unknown(schema: Any, root: Mapping[str, Any], known: Collection[str]) -> str | None:
    """Returns a key that says which values a schema has, and is no known bound of a length; None if there is none."""
    left, seen = [resolved(schema, root)], set[int]()
    while left:
        found = left.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        unknown = next((key for key in found if key not in SILENT and (key not in known or not counted(found[key]))), None)
        if unknown is not None:
            return unknown
        properties, several = found.get("properties"), found.get("anyOf") or found.get("oneOf")
        inner = [*(properties.values() if isinstance(properties, Mapping) else ()), found.get("items")]
        left += [resolved(one, root) for one in (*inner, *(several if isinstance(several, list) else ()))]
    return None


def constants_of(schema: Mapping[str, Any]) -> list[Any]:
    """Returns the only values that a schema has; empty where it names none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else []


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
