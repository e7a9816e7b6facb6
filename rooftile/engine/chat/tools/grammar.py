"""The grammar of an answer that must be a call: in the model's own syntax, of the functions' schemas."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rooftile.engine.chat.tools.use import ToolUse
from rooftile.engine.sampling.structural_tags import WHITESPACE


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model writes calls whose arguments are JSON.

    Args:
        begin, end: the texts around a call.
        arguments: the name of its arguments.
        between: the text between two calls; None where there is one.
    """

    begin: str
    end: str
    arguments: str = "arguments"
    between: str | None = None


HERMES = CallForm("<tool_call>\n", "\n</tool_call>", between="\n")
LLAMA_JSON = CallForm("", "", arguments="parameters")


def call_grammar(form: CallForm, use: ToolUse) -> str:
    """Returns a grammar in Lark's form for one call, or for several where the caller and the model's syntax have several."""
    tools = use.allowed
    repeats = use.several and use.named is None and form.between is not None
    lines = [f"start: call ({json.dumps(form.between)} call)*" if repeats else "start: call"]
    lines.append("call: " + " | ".join(f"call_{n}" for n in range(len(tools))))
    for n, tool in enumerate(tools):
        head = f'{form.begin}{{"name": {json.dumps(tool.name)}, {json.dumps(form.arguments)}: '
        lines.append(f"call_{n}: {json.dumps(head)} arguments_{n} {json.dumps('}' + form.end)}")
        # a schema alone would allow white space without an end
        schema = {**tool.parameters, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        lines.append(f"arguments_{n}: %json {json.dumps(schema, ensure_ascii=False)}")
    return "\n".join(lines)
