"""Random JSON schemas, and whether a value is of one."""

from __future__ import annotations

import json
import re

from hypothesis import strategies as st


def follows(value: object, schema: dict) -> bool:
    """Tells whether a value is one of these schemas."""
    if "anyOf" in schema:
        return any(follows(value, each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        # in JSON, true is not 1
        return json.dumps(value) in [json.dumps(each) for each in schema.get("enum", [schema.get("const")])]
    kind = schema["type"]
    if kind == "object":
        same = isinstance(value, dict) and set(value) == set(schema["properties"])
        return same and all(follows(value[k], v) for k, v in schema["properties"].items())
    if kind == "array":
        fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(follows(each, schema["items"]) for each in value)
    if kind == "string":
        fits = isinstance(value, str) and len(value) <= schema.get("maxLength", 9)
        return fits and re.search(schema.get("pattern", ""), value) is not None
    if kind == "integer":
        return type(value) is int and schema.get("minimum", value) <= value <= schema["maximum"]
    return type(value) is {"boolean": bool, "null": type(None)}[kind]


SCALARS = st.sampled_from(
    [
        {"type": "boolean"}, {"type": "null"}, {"enum": ["a", 1, None]}, {"const": "tile"},
        {"type": "integer", "minimum": -5, "maximum": 20}, {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "^[ab]{1,3}$"},
    ]
)  # fmt: skip


def composed(inner):
    def made(parts: dict) -> dict:
        return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}

    arrays = inner.map(lambda each: {"type": "array", "items": each, "minItems": 1, "maxItems": 2})
    unions = st.lists(inner, min_size=1, max_size=2).map(lambda each: {"anyOf": each})
    return arrays | unions | st.dictionaries(st.sampled_from(["a", "b", "é"]), inner, max_size=3).map(made)


SCHEMAS = st.recursive(SCALARS, composed, max_leaves=4)
