"""Turns a form into a `GenerationRequest`, which is sent to the engine, checked as far as this process can."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rooftile.engine.chat.tools.use import ToolUse
from rooftile.engine.settings.table import FLAGS
from rooftile.errors import InvalidInput, Unsupported
from rooftile.runtime.words import rename
from rooftile.server import limits
from rooftile.server.engine.messages import Ready
from rooftile.server.http.openai.conversation import read_messages
from rooftile.server.http.openai.fields import read_part
from rooftile.server.http.openai.forms import ChatForm, CompletionForm, Sampling, StreamOptions
from rooftile.server.http.openai.grammars import grammar_of
from rooftile.server.http.openai.prompts import PromptForms
from rooftile.server.http.openai.template_options import template_options
from rooftile.server.http.openai.tools import tools_of
from rooftile.server.refusals import Refusal

if TYPE_CHECKING:
    from rooftile.server.http.texts import Texts

# fields of a form that `SamplingParams` has under the same name
_SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "allowed_token_ids", "bad_words", "truncate_prompt_tokens", "prompt_logprobs", "seed", "max_tokens", "min_tokens",
    "thinking_token_budget", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "beam_width", "length_penalty",
    "early_stopping", "priority", "speculative",
)  # fmt: skip
# a plain word may be a field of a request, too
_FLAGS = {name: flag for name, flag in FLAGS.items() if "_" in name}
_FLOATS = {
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty",
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """A checked form: prompts, and how to answer them."""

    chat: bool
    prompts: list[str | list[int]] = field(default_factory=list)
    messages: list[dict[str, Any]] | None = None
    template: dict[str, Any] = field(default_factory=dict)
    """How the chat template writes the messages: keywords of `Tokenizer.chat`."""
    tools: ToolUse | None = None
    """The functions that a chat's answers may call."""
    thoughts: bool = True
    """Whether the client wants the thoughts of a chat's answers."""
    params: dict[str, Any]
    salt: str
    n: int
    """Answers per prompt that the client gets."""
    sampled: int
    """Answers per prompt that are computed: best_of, or the beams of a search, may be more than n."""
    logprobs: int | None = None
    special: bool = True
    """Whether a prompt's text gets the tokens that the checkpoint puts around texts; a chat template writes them itself."""
    returns_ids: bool = False
    """Whether the client wants the token ids of prompts and answers."""
    adapter: str | None = None
    """The adapter that the client has named as its model."""
    names: dict[str, str] = field(default_factory=dict)
    """The fields that the client has sent, by the library's names for them."""
    echo: bool = False
    echoes: list[str] = field(default_factory=list)
    """The prompts' texts, which come before the answers."""
    prompt_logprobs: int | None = None
    prompt_only: bool = False
    """Whether max_tokens is 0: a prompt is read, and nothing is answered."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False

    @property
    def forms(self) -> PromptForms:
        """The forms in which the prompts' logprobs are asked for."""
        echoed = self.logprobs if self.echo else None
        return PromptForms(echoed, self.prompt_logprobs, self.params.get("skip_special_tokens", True))

    async def tokens(self, texts: Texts) -> list[list[int]]:
        """Returns the tokens of each prompt that are read; with `echo` it also makes the prompts' texts."""
        if self.messages is not None:
            found = [await texts.chat(self.messages, special=self.special, **self.template)]
        else:
            special = self.special
            found = [await texts.encode(each, special=special) if isinstance(each, str) else each for each in self.prompts]
        cut = self.params.get("truncate_prompt_tokens")
        found = [each if cut is None else each[-cut:] for each in found]
        if self.echo:
            # a text comes back as it was sent, unless its tokens have places in what they decode to
            verbatim, skip = cut is None and self.logprobs is None, self.forms.skip_special
            self.echoes = [
                given if verbatim and isinstance(given, str) else await texts.prompt_text(ids, skip_special=skip)
                for given, ids in zip(self.prompts, found, strict=True)
            ]
        return found


def completion_request(form: CompletionForm, ready: Ready) -> GenerationRequest:
    """Reads the form of /v1/completions.

    Raises:
        Refusal: a value is out of its bounds, or two contradict each other.
    """
    best_of = form.best_of
    n = 1 if form.n is None else form.n
    if best_of is not None and not n <= best_of <= limits.BEST_OF:
        raise _bad("best_of", f"best_of is {best_of}; must be from n, which is {n}, to {limits.BEST_OF}")
    if best_of is not None and best_of > n and (form.stream or form.beam_width is not None):
        raise _bad("best_of", "best_of is given with stream or beam_width; the best answers are known when all are complete")
    prompt_only = form.max_tokens == 0
    if prompt_only:
        if form.min_tokens:
            raise _bad("min_tokens", f"min_tokens is {form.min_tokens} and max_tokens 0; it must not be more")
        # the engine samples one token behind each prompt that it has read; it is left out
        form.max_tokens = 1
    generation = _request_of(form, ready, chat=False, logprobs=form.logprobs, sampled=best_of)
    generation.prompt_only = prompt_only
    generation.prompts = list_prompts(form.prompt, ready)
    generation.echo = bool(form.echo)
    _add_prompt_logprobs(generation, form)
    _check_answers(generation)
    return generation


def chat_request(form: ChatForm, ready: Ready) -> GenerationRequest:
    """Reads the form of /v1/chat/completions.

    Raises:
        Refusal: a value is out of its bounds, or two contradict each other.
    """
    if form.max_completion_tokens is not None:
        if form.max_tokens not in (None, form.max_completion_tokens):
            raise _bad("max_tokens", "max_tokens and max_completion_tokens are both given; they mean the same")
        form.max_tokens = form.max_completion_tokens
    if form.top_logprobs is not None and not form.logprobs:
        raise _bad("top_logprobs", f"top_logprobs is {form.top_logprobs} without logprobs; set logprobs to true")
    generation = _request_of(form, ready, chat=True, logprobs=(form.top_logprobs or 0) if form.logprobs else None, sampled=None)
    if form.max_tokens is None:
        # a chat answers until it is done, and a completion 16 tokens, as in OpenAI's API
        generation.params["max_tokens"] = None
    generation.messages = read_messages(form.messages)
    generation.tools = tools_of(form)
    generation.template = template_options(form)
    if generation.tools is not None:
        generation.template["tools"] = [tool.given for tool in generation.tools.tools]
    generation.thoughts = form.include_reasoning is not False
    _add_prompt_logprobs(generation, form)
    return generation


def _add_prompt_logprobs(generation: GenerationRequest, form: Sampling) -> None:
    """Asks the engine for the logprobs of the prompts where an echo or prompt_logprobs wants them."""
    generation.prompt_logprobs = form.prompt_logprobs
    if generation.stream and generation.prompt_logprobs is not None:
        raise _bad("prompt_logprobs", "prompt_logprobs is given with stream; they come with whole answers: leave stream out")
    most = generation.forms.most
    if most is not None:
        generation.params["prompt_logprobs"] = most


def _request_of(form: Sampling, ready: Ready, *, chat: bool, logprobs: int | None, sampled: int | None) -> GenerationRequest:
    given = {name: value for name in _SAME if (value := getattr(form, name)) is not None}
    params = (ready.defaults if form.beam_width is None else {}) | given
    names = _names_of(form, chat=chat, sampled=sampled)
    if form.include_stop_str_in_output is not None:
        params["include_stop"] = form.include_stop_str_in_output
    if form.logit_bias is not None:
        params["logit_bias"] = _biases(form.logit_bias)
    if sampled is not None:
        params["n"] = sampled
    if form.return_token_ids and form.beam_width is not None:
        raise _bad("return_token_ids", "return_token_ids is given with beam_width; a search gives its answers' texts alone")
    # the engine names the tokens of an answer beside their logprobs
    if logprobs is not None or form.return_token_ids or (sampled is not None and sampled > (form.n or 1)):
        params["logprobs"] = 0 if logprobs is None else logprobs
    grammar, names["structured"] = grammar_of(form)
    if grammar is not None:
        params["structured"] = grammar
    check_params(params, type(form).model_fields, ready.vocabulary, names)
    # a whole number may be larger than a message to the engine holds
    params |= {name: float(params[name]) for name in _FLOATS & params.keys()}
    if form.metadata is not None and not isinstance(form.metadata, dict):
        raise _bad("metadata", "metadata must be an object")
    options = read_part(StreamOptions, form.stream_options, "stream_options")
    if options is not None and not form.stream:
        raise _bad("stream_options", "stream_options are given without stream; set stream to true")
    return GenerationRequest(
        chat=chat, params=params, salt=form.cache_salt or "", n=form.n or 1,
        sampled=form.beam_width or sampled or form.n or 1, logprobs=logprobs, stream=bool(form.stream),
        special=not chat if form.add_special_tokens is None else form.add_special_tokens,
        returns_ids=form.return_token_ids is True, names=names,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
    )  # fmt: skip


def _names_of(form: Sampling, *, chat: bool, sampled: int | None) -> dict[str, str]:
    """Returns the fields that a client has sent by the library's names, where they differ."""
    found = {"include_stop": "include_stop_str_in_output"}
    if sampled is not None:
        found["n"] = "best_of"
    if chat:
        found["logprobs"] = "top_logprobs"
    if isinstance(form, ChatForm) and form.max_completion_tokens is not None:
        found["max_tokens"] = "max_completion_tokens"
    return found


def check_params(
    params: Mapping[str, Any], fields: Collection[str], vocabulary: int, names: Mapping[str, str] = MappingProxyType({})
) -> None:  # fmt: skip
    """Lets `SamplingParams` check its keywords, and says which field a mistake is in.

    Raises:
        Refusal: with its sentence.
    """
    from rooftile.engine.sampling.params import SamplingParams

    try:
        SamplingParams(**params).check_vocabulary(vocabulary)
    except (InvalidInput, Unsupported) as error:
        raise refusal_of(error, fields, names) from None


def refusal_of(error: Exception, fields: Collection[str], names: Mapping[str, str] = MappingProxyType({})) -> Refusal:
    """Returns an error of the library as an answer; the field is the first one that its sentence names.

    Args:
        error: the error.
        fields: the fields that a client may send.
        names: the fields that it has sent, by the library's names, where they differ.
    """
    # settings of the server are its operator's, who gives them as flags
    message = rename(rename(str(error), names), _FLAGS)
    named = next((word for word in re.findall(r"\w+", message) if word in fields or word.removesuffix("s") in fields), None)
    param = named if named in fields or named is None else named.removesuffix("s")
    code = "unsupported" if isinstance(error, Unsupported) else "invalid_value"
    return Refusal(code, message, param=param)


def list_prompts(given: Any, ready: Ready) -> list[str | list[int]]:
    """Returns the prompts of a completion: a text, texts, token ids, or lists of them.

    Raises:
        Refusal: it is none of these, or too much.
    """
    prompts = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
    if len(prompts) > limits.PROMPTS:
        raise _bad("prompt", f"prompt has {len(prompts)} prompts; may have at most {limits.PROMPTS}")
    for prompt in prompts:
        if isinstance(prompt, str):
            continue
        # in this order: a list that is too long is refused before its elements are looked at
        if isinstance(prompt, list) and (len(prompt) >= ready.max_len or not prompt):
            raise _bad("prompt", f"prompt has {len(prompt):,} tokens; must have from 1 to {ready.max_len - 1:,}")
        if not isinstance(prompt, list) or set(map(type, prompt)) != {int}:
            raise _bad("prompt", "prompt must be a text, a list of texts, a list of token ids, or a list of such lists")
        if not 0 <= min(prompt) <= max(prompt) < ready.vocabulary:
            raise _bad("prompt", f"prompt has token ids outside of 0 to {ready.vocabulary - 1}")
    return prompts


def _biases(given: Any) -> dict[int, Any]:
    if not isinstance(given, dict):
        raise _bad("logit_bias", "logit_bias must be an object of token ids and numbers")
    if len(given) > limits.BIASES:
        raise _bad("logit_bias", f"logit_bias has {len(given):,} entries; may have at most {limits.BIASES:,}")
    if not all(re.fullmatch(r"\d{1,9}", token, re.ASCII) for token in given):
        raise _bad("logit_bias", "logit_bias must have token ids as its keys, whole numbers")
    return {int(token): bias for token, bias in given.items()}


def _check_answers(generation: GenerationRequest) -> None:
    answers = len(generation.prompts) * generation.sampled
    if answers > limits.ANSWERS:
        raise _bad(
            "n",
            f"{len(generation.prompts)} prompts with {generation.sampled} answers each; a request may have {limits.ANSWERS} "
            "in all",
        )


def _bad(param: str, message: str) -> Refusal:
    return Refusal("invalid_value", message, param=param)
