"""The fields of /v1/messages, in Anthropic's words."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rooftile.server.http.openai.forms import Number


class CountForm(BaseModel):
    """`POST /v1/messages/count_tokens`."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = Field(default=None, max_length=128)
    messages: Any = Field(json_schema_extra={"type": "array", "items": {"type": "object"}, "maxItems": 1024})
    system: Any = Field(default=None, json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array"}]})
    tools: Any = Field(default=None, json_schema_extra={"type": "array", "items": {"type": "object"}})
    tool_choice: Any = None
    thinking: Any = Field(default=None, json_schema_extra={"type": "object"})
    output_config: Any = Field(default=None, json_schema_extra={"type": "object"})
    context_management: Any = Field(default=None, json_schema_extra={"type": "object"})
    # what may be cached is cached without being asked
    cache_control: Any = None
    thread: Any = Field(default=None, description="Refused: no conversation is kept.", json_schema_extra={"type": "object"})


class MessagesForm(CountForm):
    """`POST /v1/messages`."""

    max_tokens: int
    stop_sequences: Any = Field(default=None, json_schema_extra={"type": "array", "items": {"type": "string"}})
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    stream: bool | None = None
    # taken, and without any effect
    metadata: Any = Field(default=None, json_schema_extra={"type": "object"})
    service_tier: str | None = None


class ThinkingForm(BaseModel):
    """Whether the model thinks, and for how long."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputForm(BaseModel):
    """The answer's form."""

    model_config = ConfigDict(extra="forbid")
    effort: str | None = None
    format: Any = None
