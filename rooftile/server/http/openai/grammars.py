"""Reads what a request says about the form of its answer."""

from __future__ import annotations

import json
from typing import Any

from rooftile.server import limits
from rooftile.server.http.body import check_depth
from rooftile.server.http.openai.forms import StructuredOutputs
from rooftile.server.refusals import Refusal


def grammar_of(response_format: Any, outputs: StructuredOutputs | None) -> dict[str, Any] | None:
    """Returns the grammar that an answer must follow, as `SamplingParams` takes it; None for free text.

    Raises:
        Refusal: there are two grammars, an unknown one, or one that is too large.
    """
    grammar = _of_format(response_format) if response_format is not None else None
    if outputs is None:
        return grammar
    if grammar is not None:
        raise _bad("structured_outputs", "response_format and structured_outputs are both given; give one of them")
    found = {"json": outputs.json_, "regex": outputs.regex, "choice": outputs.choice}
    given = {name: value for name, value in found.items() if value is not None}
    if len(given) != 1:
        names = ", ".join(given) or "nothing"
        raise _bad("structured_outputs", f"structured_outputs has {names}; must have json, regex or choice")
    if "json" in given:
        given["json"] = _schema_of(given["json"], "structured_outputs")
    if outputs.regex is not None and len(outputs.regex.encode(errors="replace")) > limits.REGEX_BYTES:
        raise _bad("structured_outputs", f"the regex is too long; may have at most {limits.REGEX_BYTES:,} bytes")
    if outputs.choice is not None and not 0 < len(outputs.choice) <= limits.CHOICES:
        raise _bad("structured_outputs", f"choice has {len(outputs.choice):,} texts; must have from 1 to {limits.CHOICES:,}")
    if outputs.choice is not None and "" in outputs.choice:
        raise _bad("structured_outputs", "choice has an empty text; must have none")
    return given


def _of_format(given: Any) -> dict[str, Any] | None:
    if not isinstance(given, dict):
        raise _bad("response_format", "response_format must be an object with a type")
    kind = given.get("type")
    if kind == "text" and given.keys() == {"type"}:
        return None
    if kind == "json_object" and given.keys() == {"type"}:
        return {"json": '{"type":"object"}'}
    wrapped = given.get("json_schema")
    if kind != "json_schema" or given.keys() != {"type", "json_schema"} or not isinstance(wrapped, dict):
        raise _bad("response_format", "response_format must have the type text, json_object, or json_schema with json_schema")
    unknown = wrapped.keys() - {"name", "description", "schema", "strict"}
    if unknown:
        why = f"response_format.json_schema has {min(unknown)[:80]!r}; has name, description, schema, strict"
        raise _bad("response_format", why)
    schema = wrapped.get("schema")
    if schema is None:
        raise _bad("response_format", "response_format.json_schema has no schema")
    return {"json": _schema_of(schema, "response_format")}


def _schema_of(schema: Any, param: str) -> str:
    """Returns a schema as a text, in which numbers of any size cross to the engine.

    Raises:
        Refusal: it is none, too deep or too large.
    """
    if not isinstance(schema, dict | bool):
        raise _bad(param, f"the schema is of type {type(schema).__name__}; must be an object")
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


def _bad(param: str, message: str) -> Refusal:
    return Refusal("invalid_value", message, param=param)
