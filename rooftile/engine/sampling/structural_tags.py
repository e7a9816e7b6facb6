"""Writes structural tags as a grammar: free text, in which what follows a trigger must be one of the tags.

A tag is a beginning, JSON of a schema, and an end. Its beginning starts with one of the triggers:

    {"structures": [{"begin": "<function=roof>", "schema": {...}, "end": "</function>"}], "triggers": ["<function="]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rooftile.errors import InvalidInput

# between two parts of JSON; without a bound a model may write spaces until its answer is full
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"

MOST_TAGS = 128
# characters of a beginning, an end or a trigger
LONGEST = 256


def check_tags(given: Any) -> None:
    """Raises InvalidInput if structural tags are none."""
    if not isinstance(given, Mapping) or given.keys() != {"structures", "triggers"}:
        raise InvalidInput("structural_tag must be a dictionary with structures and triggers")
    structures, triggers = given["structures"], given["triggers"]
    for name, several in (("structures", structures), ("triggers", triggers)):
        if not isinstance(several, list | tuple) or not 0 < len(several) <= MOST_TAGS:
            raise InvalidInput(f"structural_tag.{name} must be a list of 1 to {MOST_TAGS}")
    if not all(isinstance(trigger, str) and 0 < len(trigger) <= LONGEST for trigger in triggers):
        raise InvalidInput(f"structural_tag.triggers must be texts of 1 to {LONGEST} characters")
    for place, tag in enumerate(structures):
        where = f"structural_tag.structures[{place}]"
        if not isinstance(tag, Mapping) or tag.keys() != {"begin", "schema", "end"}:
            raise InvalidInput(f"{where} must have begin, schema and end")
        if not all(isinstance(tag[name], str) and len(tag[name]) <= LONGEST for name in ("begin", "end")):
            raise InvalidInput(f"{where} must have a begin and an end that are texts of at most {LONGEST} characters")
        if not isinstance(tag["schema"], dict | bool):
            raise InvalidInput(f"{where}.schema is of type {type(tag['schema']).__name__}; must be an object")
        if not any(tag["begin"].startswith(trigger) for trigger in triggers):
            raise InvalidInput(f"{where}.begin begins with none of the triggers")


def lark_of_tags(given: Mapping[str, Any], whitespace: str, token_id: Callable[[str], int | None]) -> str:
    """Returns structural tags as a grammar in Lark's form.

    Args:
        given: see `check_tags`.
        whitespace: the pattern of white space in JSON.
        token_id: returns the added token that a text spells, if it does; free text has none of those.
    """
    return "\n".join(_lines(given, whitespace, token_id))


def _lines(given: Mapping[str, Any], whitespace: str, token_id: Callable[[str], int | None]) -> Iterator[str]:
    tags: dict[str, list[str]] = {}
    for tag in given["structures"]:
        # the longest is what the text has when the tag begins
        trigger = max((each for each in given["triggers"] if tag["begin"].startswith(each)), key=len)
        schema = {} if tag["schema"] is True else tag["schema"]
        schema = schema | {"x-guidance": {"whitespace_pattern": whitespace}} if isinstance(schema, dict) else schema
        parts = [tag["begin"][len(trigger) :], None, tag["end"]]
        body = [f"%json {json.dumps(schema)}" if part is None else _spelled(part, token_id) for part in parts if part != ""]
        tags.setdefault(trigger, []).append(" ".join(body))
    yield f"start: ({' | '.join(f't{n}' for n in range(len(tags)))})* TEXT"
    yield r"TEXT: /(.|\n)*/"
    for n, (trigger, bodies) in enumerate(tags.items()):
        if token_id(trigger) is not None:
            yield f"h{n}: TEXT {_spelled(trigger, token_id)}"
        else:
            yield f"h{n}[lazy]: TEXT {json.dumps(trigger, ensure_ascii=False)}"
        yield f"t{n}: h{n} ({' | '.join(f'b{n}_{m}' for m in range(len(bodies)))})"
        for m, written in enumerate(bodies):
            yield f"b{n}_{m}: {written}"


def _spelled(text: str, token_id: Callable[[str], int | None]) -> str:
    """Returns a text, or the token that it spells, in Lark's form."""
    id = token_id(text)
    return json.dumps(text, ensure_ascii=False) if id is None else f"<[{id}]>"
