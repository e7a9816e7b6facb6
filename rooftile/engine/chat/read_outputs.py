"""Reads the answers to a conversation that `LLM.chat` has generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rooftile.engine.chat.parts import PlainReader, read_whole
from rooftile.engine.chat.thinking import ThoughtReader
from rooftile.engine.chat.thought_formats import ThoughtFormat, stage_of
from rooftile.engine.requests.output import RequestOutput
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.text.tokenizer import Tokenizer


def read_thoughts(output: RequestOutput, tokenizer: Tokenizer, form: ThoughtFormat) -> None:
    """Sets `reasoning` and `content` of each answer to a conversation.

    Args:
        output: the answers, with the special tokens that are marks in their texts.
        tokenizer: the model's tokenizer.
        form: the model's marks around thoughts.
    """
    stage = stage_of(tokenizer, output.prompt_token_ids, form)
    for answer in output.outputs:
        found = read_whole(ThoughtReader(form, stage, PlainReader()), answer.text)
        answer.reasoning, answer.content = found.thought or None, found.content


def with_special_tokens(params: SamplingParams | Sequence[SamplingParams]) -> SamplingParams | list[SamplingParams]:
    """Returns sampling parameters under which texts have special tokens."""
    if isinstance(params, SamplingParams):
        return replace(params, skip_special_tokens=False)
    return [replace(each, skip_special_tokens=False) for each in params]
