"""The fields that each route takes, in OpenAI's words, with vLLM's words for fields that OpenAI lacks.

A field that is null counts as not given. Numbers are checked by `SamplingParams`, so that a client and a program that uses the
library read the same sentence.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Number = int | float


def _listed(kind: str, description: str = "") -> Any:
    """Returns a field that the schema shows as a list, and that later checks read: pydantic reports every wrong element."""
    return Field(default=None, description=description, json_schema_extra={"type": "array", "items": {"type": kind}})


def _object(schema: dict[str, Any] | None = None) -> Any:
    """Returns a field that the schema shows as an object, and that later checks read, for the same reason."""
    return Field(default=None, json_schema_extra={"type": "object"} | (schema or {}))


class StreamOptions(BaseModel):
    """Settings of a stream."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputs(BaseModel):
    """A grammar that the answer must follow; exactly one of these."""

    model_config = ConfigDict(extra="forbid")
    json_: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Any = Field(default=None, json_schema_extra={"anyOf": [{"type": "object"}, {"type": "string"}]})
    json_object: bool | None = None


class Sampling(BaseModel):
    """The fields that completions and chats share."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = Field(default=None, max_length=128)
    n: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: Any = Field(default=None, json_schema_extra={"type": "object", "additionalProperties": {"type": "number"}})
    allowed_token_ids: Any = _listed("integer")
    bad_words: Any = _listed("string")
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    speculative: bool | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    thinking_token_budget: int | None = None
    stop: Any = Field(
        default=None,
        json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 16}]},
    )
    stop_token_ids: Any = _listed("integer")
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    beam_width: int | None = None
    length_penalty: Number | None = None
    early_stopping: bool | None = None
    cache_salt: str | None = Field(default=None, max_length=128)
    stream: bool | None = None
    stream_options: Any = _object(StreamOptions.model_json_schema())
    response_format: Any = _object()
    structured_outputs: Any = _object(StructuredOutputs.model_json_schema())
    # older names of structured_outputs
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Any = _listed("string")
    guided_grammar: str | None = None
    # taken, and without any effect
    user: str | None = None
    metadata: Any = _object()
    service_tier: str | None = None
    store: Literal[False] | None = None


class CompletionForm(Sampling):
    """`POST /v1/completions`."""

    prompt: Any = Field(
        json_schema_extra={
            "anyOf": [
                {"type": "string"}, {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    )  # fmt: skip
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None


class Message(BaseModel):
    """One message of a conversation."""

    role: str
    content: Any = Field(
        default=None,
        json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
    )
    name: str | None = None
    tool_calls: Any = _listed("object")
    tool_call_id: Any = Field(default=None, json_schema_extra={"type": "string"})
    reasoning_content: str | None = None
    reasoning: str | None = None


class Templated(BaseModel):
    """The fields that say how the chat template writes messages."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Any = _object()
    enable_thinking: bool | None = None
    reasoning_effort: str | None = Field(default=None, max_length=16)


class ChatForm(Sampling, Templated):
    """`POST /v1/chat/completions`."""

    messages: Any = Field(json_schema_extra={"type": "array", "items": Message.model_json_schema(), "maxItems": 1024})
    max_completion_tokens: int | None = None
    include_reasoning: bool | None = None
    tools: Any = _listed("object", "Functions that the model may call.")
    tool_choice: Any = Field(default=None, json_schema_extra={"anyOf": [{"type": "string"}, {"type": "object"}]})
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeForm(Templated):
    """`POST /tokenize`: a prompt or a conversation."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = Field(default=None, max_length=128)
    prompt: str | None = None
    messages: Any = Field(default=None, json_schema_extra={"type": "array", "items": Message.model_json_schema()})
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeForm(BaseModel):
    """`POST /detokenize`: token ids."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = Field(default=None, max_length=128)
    tokens: Any = Field(json_schema_extra={"type": "array", "items": {"type": "integer"}})
    skip_special_tokens: bool = False
