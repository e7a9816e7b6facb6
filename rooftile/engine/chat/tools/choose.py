"""Chooses how a model writes calls, by the text of its chat template or by a name."""

from __future__ import annotations

from rooftile.engine.chat.harmony.reader import HarmonyReader
from rooftile.engine.chat.tools.grammar import HERMES, LLAMA_JSON, call_grammar
from rooftile.engine.chat.tools.hermes import HermesReader
from rooftile.engine.chat.tools.llama_json import LlamaJsonReader
from rooftile.engine.chat.tools.mistral import MistralReader
from rooftile.engine.chat.tools.syntax import Syntax
from rooftile.engine.chat.tools.use import ToolUse
from rooftile.engine.text.harmony_messages import SIGN
from rooftile.errors import InvalidInput

AUTO, NONE = "auto", "none"


def _shows_objects(template: str) -> bool:
    """Tells whether calls are objects with a name: others write tags of their own into the same pair of tags."""
    return '{"name": ' in template.replace("\\", "") and not any(
        tag in template for tag in ("<function=", "<arg_key>", "<tool_calls>")
    )


# in this order: the first that fits a template counts
_ALL = (
    Syntax("harmony", HarmonyReader, lambda template: SIGN in template),
    Syntax("mistral", MistralReader, lambda template: "[TOOL_CALLS]" in template),
    Syntax("hermes", HermesReader, lambda template: "<tool_call>" in template and _shows_objects(template), HERMES),
    Syntax("llama3_json", LlamaJsonReader, lambda template: '"name": function name, "parameters"' in template, LLAMA_JSON),
)
SYNTAXES = {each.name: each for each in _ALL}


def why_no_syntax(name: str) -> str:
    """Returns why there are no calls for a request with tools, as a sentence."""
    if name == NONE:
        return "tools are given, and tool_call_parser is none, so that no calls are read; leave tools out"
    known = ", ".join(SYNTAXES)
    return f"tools are given, and how this model writes calls is not known; start it with tool_call_parser, one of {known}"


def required_grammar(syntax: Syntax, use: ToolUse) -> str | None:
    """Returns the grammar of an answer that must be a call; None if it need not be.

    Raises:
        InvalidInput: answers are not constrained in this syntax.
    """
    if not use.required:
        return None
    if syntax.form is None:
        raise InvalidInput(
            f'tool_choice asks for a call, and answers in the syntax {syntax.name} are not constrained; write tool_choice="auto"'
        )
    return call_grammar(syntax.form, use)


def check_call_parser(setting: str, name: object) -> None:
    """Raises InvalidInput for a name that is none of a syntax, nor auto or none."""
    if not isinstance(name, str) or name not in (AUTO, NONE, *SYNTAXES):
        raise InvalidInput(f"{setting} is {str(name)[:80]!r}; must be auto, none, or a syntax of calls: {', '.join(SYNTAXES)}")


def choose_syntax(template: str | None, name: str = AUTO) -> Syntax | None:
    """Returns how a model writes calls; None if it writes none, or in a way that is not known.

    Args:
        template: the chat template.
        name: a syntax, "auto" for the one that fits the template, or "none".

    Raises:
        InvalidInput: there is no syntax of this name.
    """
    check_call_parser("tool_call_parser", name)
    if name == AUTO:
        return None if template is None else next((each for each in _ALL if each.fits(template)), None)
    return SYNTAXES.get(name)
