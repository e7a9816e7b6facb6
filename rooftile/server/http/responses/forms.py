"""The fields of /v1/responses, in OpenAI's words."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rooftile.server.http.openai.forms import Number


class ResponseForm(BaseModel):
    """`POST /v1/responses`."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = Field(default=None, max_length=128)
    input: Any = Field(json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=128)
    store: bool | None = None
    stream: bool | None = None
    stream_options: Any = None
    max_output_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_logprobs: int | None = None
    text: Any = Field(default=None, json_schema_extra={"type": "object"})
    tools: Any = Field(default=None, json_schema_extra={"type": "array", "items": {"type": "object"}})
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Any = Field(default=None, json_schema_extra={"type": "object"})
    include: Any = Field(default=None, json_schema_extra={"type": "array", "items": {"type": "string"}})
    truncation: Literal["disabled"] | None = None
    # taken, and without any effect
    background: Literal[False] | None = None
    metadata: Any = Field(default=None, json_schema_extra={"type": "object"})
    client_metadata: Any = Field(default=None, json_schema_extra={"type": "object"})
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class TextForm(BaseModel):
    """The form of the answer's text."""

    model_config = ConfigDict(extra="forbid")
    format: Any = None
    verbosity: Literal["medium"] | None = None


class ReasoningForm(BaseModel):
    """The model's thinking. It is given as it is, so a summary is neither made nor refused."""

    model_config = ConfigDict(extra="forbid")
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
