"""The fields of the routes that embed, rank and score texts: OpenAI's, Jina's and Cohere's, and vLLM's."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
_KINDS: list[Any] = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]


class Embedding(BaseModel):
    """The fields that all have."""

    texts: ClassVar[str]
    """The field with the texts."""
    model_config = ConfigDict(extra="forbid")
    model: str | None = Field(default=None, max_length=128)
    truncate_prompt_tokens: int | None = None
    # taken, and without any effect
    user: str | None = None


class EmbeddingForm(Embedding):
    """`POST /v1/embeddings`."""

    texts: ClassVar[str] = "input"
    input: Any = Field(json_schema_extra={"anyOf": [*_KINDS, _IDS, {"type": "array", "items": _IDS}]})
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    prompt_name: str | None = None


class RerankForm(Embedding):
    """`POST /v1/rerank`."""

    texts: ClassVar[str] = "documents"
    query: str
    documents: Any = Field(json_schema_extra={"type": "array", "items": {"type": "string"}})
    top_n: int | None = None
    return_documents: bool | None = None


class ScoreForm(Embedding):
    """`POST /score`."""

    texts: ClassVar[str] = "text_1"
    text_1: Any = Field(json_schema_extra={"anyOf": _KINDS})
    text_2: Any = Field(json_schema_extra={"anyOf": _KINDS})
