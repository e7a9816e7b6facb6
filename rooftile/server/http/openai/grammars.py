"""Reads what a request says about the form of its answer."""

from __future__ import annotations

from typing import Any

import msgspec

from rooftile.server import limits
from rooftile.server.http.openai.fields import read_part
from rooftile.server.http.openai.forms import Sampling, StructuredOutputs
from rooftile.server.http.openai.schemas import schema_text
from rooftile.server.http.openai.tags import tags_of
from rooftile.server.refusals import Refusal

ANY_OBJECT = {"json": '{"type":"object"}'}
# the older names of fields of structured_outputs, which vLLM had
OLDER = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
# the fields of a form that ask for a grammar
FIELDS = ("response_format", "structured_outputs", *OLDER)


def grammar_of(form: Sampling) -> tuple[dict[str, Any] | None, str]:
    """Returns the grammar that an answer must follow, as `SamplingParams` takes it (None for free text), and its field's name.

    Raises:
        Refusal: there are two grammars, an unknown one, or one that is too large.
    """
    given = [name for name in FIELDS if getattr(form, name) is not None]
    if len(given) > 1:
        raise _bad(given[1], f"{given[0]} and {given[1]} are both given; give one of them")
    if not given:
        return None, "structured_outputs"
    name = given[0]
    value = getattr(form, name)
    if name == "response_format":
        return _of_format(value), name
    outputs = read_part(StructuredOutputs, value if name == "structured_outputs" else {OLDER[name]: value}, name)
    assert outputs is not None
    return _of_outputs(outputs, name), name


def _of_outputs(outputs: StructuredOutputs, param: str) -> dict[str, Any]:
    found = {"json": outputs.json_, "json_object": outputs.json_object or None} | {
        name: getattr(outputs, name) for name in ("regex", "choice", "grammar", "structural_tag")
    }
    given = {name: value for name, value in found.items() if value is not None}
    if len(given) != 1:
        names = ", ".join(given) or "nothing"
        raise _bad(param, f"{param} has {names}; must have one of {', '.join(found)}")
    if "json_object" in given:
        return dict(ANY_OBJECT)
    if "json" in given:
        given["json"] = schema_text(_parsed(given["json"], "the schema", param), param)
    if "structural_tag" in given:
        given["structural_tag"] = tags_of(_parsed(given["structural_tag"], "the structural tag", param), param)
    for name, most in (("regex", limits.REGEX_BYTES), ("grammar", limits.GRAMMAR_BYTES)):
        if name in given and len(given[name].encode(errors="replace")) > most:
            raise _bad(param, f"the {name} is too long; may have at most {most:,} bytes")
    if outputs.choice is not None and not 0 < len(outputs.choice) <= limits.CHOICES:
        raise _bad(param, f"choice has {len(outputs.choice):,} texts; must have from 1 to {limits.CHOICES:,}")
    if outputs.choice is not None and "" in outputs.choice:
        raise _bad(param, "choice has an empty text; must have none")
    return given


def _parsed(given: Any, what: str, param: str) -> Any:
    """Returns JSON that is given as a text or as itself."""
    if not isinstance(given, str):
        return given
    if len(given.encode(errors="replace")) > limits.SCHEMA_BYTES:
        raise Refusal("invalid_grammar", f"{what} has more than {limits.SCHEMA_BYTES:,} bytes", param=param)
    try:
        return msgspec.json.decode(given)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Refusal("invalid_grammar", f"{what} is a text that is no JSON: {str(error)[:120]}", param=param) from None


def _of_format(given: Any) -> dict[str, Any] | None:
    if not isinstance(given, dict):
        raise _bad("response_format", "response_format must be an object with a type")
    kind = given.get("type")
    if kind == "text" and given.keys() == {"type"}:
        return None
    if kind == "json_object" and given.keys() == {"type"}:
        return dict(ANY_OBJECT)
    if kind == "structural_tag":
        return {"structural_tag": tags_of(given, "response_format")}
    wrapped = given.get("json_schema")
    if kind != "json_schema" or given.keys() != {"type", "json_schema"} or not isinstance(wrapped, dict):
        raise _bad("response_format", "response_format must have the type text, json_object, json_schema or structural_tag")
    unknown = wrapped.keys() - {"name", "description", "schema", "strict"}
    if unknown:
        why = f"response_format.json_schema has {min(unknown)[:80]!r}; has name, description, schema, strict"
        raise _bad("response_format", why)
    schema = wrapped.get("schema")
    if schema is None:
        raise _bad("response_format", "response_format.json_schema has no schema")
    return {"json": schema_text(schema, "response_format")}


def _bad(param: str, message: str) -> Refusal:
    return Refusal("invalid_value", message, param=param)
