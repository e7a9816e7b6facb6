"""Says how answers with tools are constrained: what `SamplingParams.calls` has."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

from rooftile.engine.chat.tools.grammar import call_grammar
from rooftile.engine.chat.tools.syntax import Syntax
from rooftile.engine.chat.tools.use import ToolUse
from rooftile.errors import InvalidInput


def constraint_of(
    syntax: Syntax, use: ToolUse, token_id: Callable[[str], int | None], *, structured: bool = False, search: bool = False
) -> dict[str, Any] | None:  # fmt: skip
    """Returns what `SamplingParams.calls` has for answers with tools; None where they are not constrained.

    Args:
        syntax: how the model writes calls.
        use: the tools, and which calls there must or may be.
        token_id: returns the added token that a text spells, if it does.
        structured: whether the answers must have another form, which leaves no place for a call.
        search: whether the answers come from a beam search, which follows no grammar.

    Raises:
        InvalidInput: a call must be made, or at most one, and nothing would keep the answer to it.
    """
    if use.required and structured:
        raise InvalidInput("tool_choice asks for a call, and structured for another form; give one of them")
    if structured:
        return None
    why = f"answers in the syntax {syntax.name} are not constrained" if syntax.form is None else None
    why = "a beam search follows no grammar" if search else why
    if why is not None and use.required:
        raise InvalidInput(f'tool_choice asks for a call, and {why}; write tool_choice="auto"')
    if why is not None and not use.several:
        raise InvalidInput(f"parallel_tool_calls is false, and {why}; leave it out")
    if why is not None or syntax.form is None:
        return None
    form, strict = syntax.form, any(tool.strict for tool in use.allowed)
    may_be_free = not use.required and use.several and not strict
    if may_be_free and _lacks_grammars():
        return None
    found = {
        "grammar": call_grammar(form, use, token_id), "required": use.required, "several": use.several and form.repeats,
        "marks": form.marks, "anchors": form.anchors, "openings": form.openings(use.allowed),
        "in_headers": form.in_headers,
    }  # fmt: skip
    if may_be_free:
        # a schema that no grammar follows is no reason to refuse a chat in which nothing has to be called
        found["looser"] = call_grammar(form, use, token_id, loose=True)
    return found


@cache
def _lacks_grammars() -> bool:
    """Tells whether the package is missing that grammars need, and says so once."""
    if find_spec("llguidance") is not None:
        return False
    logging.getLogger(__name__).warning("calls of functions are not constrained without llguidance: pip install llguidance")
    return True
