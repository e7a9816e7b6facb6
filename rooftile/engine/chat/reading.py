"""How a model's answers in a chat are read: by its format of thoughts, and its syntax of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rooftile.engine.chat.harmony.header import MARKS, last_turn
from rooftile.engine.chat.harmony.reader import HarmonyReader
from rooftile.engine.chat.parts import PlainReader, Reader
from rooftile.engine.chat.thinking import ThoughtReader
from rooftile.engine.chat.thought_formats import AUTO, HARMONY, ThoughtFormat, choose_format, stage_of
from rooftile.engine.chat.tools.choose import choose_syntax
from rooftile.engine.chat.tools.syntax import Syntax
from rooftile.engine.chat.tools.use import ToolUse
from rooftile.errors import InvalidInput

if TYPE_CHECKING:
    from rooftile.engine.text.tokenizer import Tokenizer


def choose_reading(
    tokenizer: Tokenizer | None, thoughts: str = AUTO, calls: str = AUTO
) -> tuple[ThoughtFormat | None, Syntax | None]:  # fmt: skip
    """Returns how a model marks its thoughts and writes calls; None for what it does not.

    Args:
        tokenizer: the model's tokenizer, whose chat template decides where the names are auto; None if there is none.
        thoughts: the format of thoughts (see `choose_format`).
        calls: the syntax of calls (see `choose_syntax`).

    Raises:
        InvalidInput: there is no such name, or the two do not go together.
    """
    if tokenizer is None:
        return None, None
    form, syntax = choose_format(tokenizer.template, thoughts), choose_syntax(tokenizer.template, calls)
    if form is not None and syntax is not None and (form is HARMONY) != (syntax.reader is HarmonyReader):
        due = "harmony has both: leave both at auto, or write none for one"
        raise InvalidInput(f"thoughts are read as {form.name} and calls as {syntax.name}, which do not go together; {due}")
    return form, syntax


def marks_of(form: ThoughtFormat | None, syntax: Syntax | None, use: ToolUse | None) -> tuple[str, ...]:
    """Returns the marks that readers look for; a text must have them though they may be special tokens."""
    if form is HARMONY:
        return MARKS
    return (*(() if form is None else form.marks), *(() if use is None or syntax is None else syntax.reader.marks()))


def reader_of(
    tokenizer: Tokenizer, prompt: Sequence[int], form: ThoughtFormat | None, syntax: Syntax | None, use: ToolUse | None
) -> Reader:
    """Returns the reader of an answer.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the prompt's tokens.
        form: the model's marks around thoughts; None if it has none.
        syntax: the model's way of writing calls.
        use: the tools that it may call; None for none.
    """
    tools = None if use is None or syntax is None else use.tools
    if form is HARMONY or (tools is not None and syntax is not None and syntax.reader is HarmonyReader):
        return HarmonyReader(tools, last_turn(tokenizer, prompt), thinks=form is HARMONY)
    rest: Reader = PlainReader() if tools is None or syntax is None else syntax.reader(tools)
    return rest if form is None else ThoughtReader(form, stage_of(tokenizer, prompt, form), rest)
