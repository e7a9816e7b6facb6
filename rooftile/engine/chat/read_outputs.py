"""Reads the answers to a conversation that `LLM.chat` has generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from rooftile.engine.chat.parts import PlainReader, Reader, read_whole
from rooftile.engine.chat.thinking import ThoughtReader
from rooftile.engine.chat.thought_formats import ThoughtFormat, stage_of
from rooftile.engine.chat.tools.syntax import Syntax
from rooftile.engine.chat.tools.use import ToolUse
from rooftile.engine.requests.output import RequestOutput
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput


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
        reader: Reader = PlainReader() if syntax is None or use is None else syntax.reader(use.tools)
        if form is not None:
            reader = ThoughtReader(form, stage_of(tokenizer, output.prompt_token_ids, form), reader)
        found = read_whole(reader, answer.text)
        answer.reasoning, answer.content, answer.tool_calls = found.thought or None, found.content, found.calls


def answering(
    params: SamplingParams | Sequence[SamplingParams], marks: Sequence[str], grammar: str | None
) -> SamplingParams | list[SamplingParams]:  # fmt: skip
    """Returns sampling parameters under which texts have these special tokens, and follow a grammar.

    Raises:
        InvalidInput: a call is required, and an answer must have another form, too.
    """
    if isinstance(params, SamplingParams):
        if grammar is None:
            return replace(params, shown_special_tokens=tuple(marks))
        if params.structured is not None:
            raise InvalidInput("tool_choice asks for a call, and structured for another form; give one of them")
        return replace(params, shown_special_tokens=tuple(marks), structured={"grammar": grammar})
    return [cast("SamplingParams", answering(each, marks, grammar)) for each in params]
