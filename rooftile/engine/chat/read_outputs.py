"""Reads the answers to a conversation that `LLM.chat` has generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from rooftile.engine.chat.parts import read_whole
from rooftile.engine.chat.reading import reader_of
from rooftile.engine.chat.thought_formats import ThoughtFormat
from rooftile.engine.chat.tools.constraint import constraint_of
from rooftile.engine.chat.tools.syntax import Syntax
from rooftile.engine.chat.tools.use import ToolUse
from rooftile.engine.requests.output import RequestOutput
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.text.tokenizer import Tokenizer


def read_answers(
    output: RequestOutput, tokenizer: Tokenizer, form: ThoughtFormat | None, syntax: Syntax | None, use: ToolUse | None
) -> None:  # fmt: skip
    """Sets `reasoning`, `content` and `tool_calls` of each answer to a conversation.

    Args:
        output: the answers, with the special tokens that are marks in their texts.
        tokenizer: the model's tokenizer.
        form: the model's marks around thoughts; None if it has none.
        syntax: the model's way of writing calls.
        use: the tools that it may call; None for none.
    """
    for answer in output.outputs:
        found = read_whole(reader_of(tokenizer, output.prompt_token_ids, form, syntax, use), answer.text)
        answer.reasoning, answer.content, answer.tool_calls = found.thought or None, found.content, found.calls


def answering(
    params: SamplingParams | Sequence[SamplingParams], marks: Sequence[str], tokenizer: Tokenizer, syntax: Syntax | None,
    use: ToolUse | None, *, thinks: bool,
) -> SamplingParams | list[SamplingParams]:  # fmt: skip
    """Returns sampling parameters under which texts have some special tokens, and calls follow their functions' schemas.

    Args:
        params: the parameters that were given.
        marks: special tokens that are text.
        tokenizer: the model's tokenizer.
        syntax: the model's way of writing calls.
        use: the tools that it may call, or must; None for none.
        thinks: whether an answer may have a thought, behind which a grammar begins.

    Raises:
        InvalidInput: a call is required, and an answer must have another form, too.
    """
    if not isinstance(params, SamplingParams):
        # `generate` refuses what is no SamplingParams
        each = [
            answering(one, marks, tokenizer, syntax, use, thinks=thinks) if isinstance(one, SamplingParams) else one
            for one in params
        ]
        return cast("list[SamplingParams]", each)
    calls = None
    if syntax is not None and use is not None:
        structured, search = params.structured is not None, params.beam_width is not None
        calls = constraint_of(syntax, use, tokenizer.added_id, structured=structured, search=search)
    shown = (*params.shown_special_tokens, *marks)
    return replace(params, shown_special_tokens=shown, thinks=params.thinks or thinks, calls=calls)
