"""Reads structural tags in the two forms in which clients of vLLM send them.

The older one has structures and triggers. The newer one has a format, of which triggered tags with JSON are taken; they are
the same thing.
"""

from __future__ import annotations

from typing import Any

from rooftile.engine.sampling.structural_tags import check_tags
from rooftile.errors import InvalidInput
from rooftile.server.http.openai.schemas import schema_text
from rooftile.server.refusals import Refusal

_DUE = "has structures and triggers, or a format of type triggered_tags"


def tags_of(given: Any, param: str) -> dict[str, Any]:
    """Returns structural tags as `SamplingParams` takes them.

    Args:
        given: what a client has sent.
        param: its field.

    Raises:
        Refusal: it is none, or larger than a schema may be.
    """
    if not isinstance(given, dict) or given.get("type", "structural_tag") != "structural_tag":
        raise _bad(param, f"the structural tag is no object of type structural_tag; {_DUE}")
    given = {name: value for name, value in given.items() if name != "type"}
    found = _of_format(given["format"], param) if given.keys() == {"format"} else given
    if found.keys() != {"structures", "triggers"}:
        unknown = min(found.keys() - {"structures", "triggers", "format"}, default=None)
        has = "" if unknown is None else f" has {unknown[:40]!r}, which is not taken, and"
        raise _bad(param, f"the structural tag{has} is incomplete; it {_DUE}")
    schema_text(found, param)
    try:
        check_tags(found)
    except InvalidInput as error:
        raise _bad(param, str(error)) from None
    return found


def _of_format(form: Any, param: str) -> dict[str, Any]:
    kind = form.get("type") if isinstance(form, dict) else None
    if kind != "triggered_tags":
        raise _bad(param, f"the structural tag's format has the type {str(kind)[:40]!r}; triggered_tags is taken")
    # what is true of these tags anyway
    more = {name: value for name, value in form.items() if name not in ("type", "triggers", "tags")}
    for name, value in more.items():
        if name not in ("at_least_one", "stop_after_first") or value is not False:
            raise _bad(param, f"the structural tag's format has {name[:40]}, which is not supported")
    tags = form.get("tags")
    if not isinstance(tags, list) or not all(isinstance(tag, dict) for tag in tags):
        raise _bad(param, "the structural tag's format has no list of tags")
    return {"structures": [_tag(tag, param) for tag in tags], "triggers": form.get("triggers")}


def _tag(tag: dict[str, Any], param: str) -> dict[str, Any]:
    content = tag.get("content")
    if not isinstance(content, dict) or content.keys() != {"type", "json_schema"} or content["type"] != "json_schema":
        raise _bad(param, "the content of a tag must have the type json_schema, and json_schema")
    if not tag.keys() <= {"type", "begin", "content", "end"}:
        raise _bad(param, "a tag of the structural tag's format must have begin, content and end")
    return {"begin": tag.get("begin"), "schema": content["json_schema"], "end": tag.get("end")}


def _bad(param: str, message: str) -> Refusal:
    return Refusal("invalid_value", message, param=param)
