"""The description of the routes for programs, as OpenAPI."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel

from rooftile.server.http.adapters import LoadAdapterForm, UnloadAdapterForm
from rooftile.server.http.anthropic.forms import CountForm, MessagesForm
from rooftile.server.http.embedding.forms import EmbeddingForm, RerankForm, ScoreForm
from rooftile.server.http.openai.forms import ChatForm, CompletionForm, DetokenizeForm, TokenizeForm
from rooftile.server.http.responses.forms import ResponseForm
from rooftile.server.refusals import CODES

_FORMS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("/v1/completions", "Continues prompts.", CompletionForm), ("/v1/chat/completions", "Answers a conversation.", ChatForm),
    ("/v1/responses", "Answers an input of items.", ResponseForm), ("/v1/messages", "Answers a conversation.", MessagesForm),
    ("/v1/messages/count_tokens", "Counts the tokens of a conversation.", CountForm),
    ("/v1/embeddings", "Returns the vectors of texts.", EmbeddingForm),
    ("/v1/rerank", "Returns documents, those first that answer a query best.", RerankForm),
    ("/score", "Returns the scores of pairs of texts.", ScoreForm),
    ("/v1/load_lora_adapter", "Loads an adapter.", LoadAdapterForm),
    ("/v1/unload_lora_adapter", "Unloads an adapter.", UnloadAdapterForm),
    ("/tokenize", "Returns token ids.", TokenizeForm), ("/detokenize", "Returns text.", DetokenizeForm),
)  # fmt: skip
_PLAIN = (
    ("/v1/models", "Lists the model and its adapters."), ("/v1/responses/{id}", "Returns a response that is kept."),
    ("/health", "Says whether requests are answered."), ("/ping", "The same, also to POST."),
    ("/version", "Says which version answers."), ("/load", "Returns how many prompts wait or run."),
    ("/metrics", "Returns Prometheus's series."),
    ("/openapi.json", "This description."), ("/", "A page to try the model."),
)  # fmt: skip


@cache
def document() -> dict[str, Any]:
    """Returns the description."""
    from rooftile import __version__

    errors = {
        str(status): {"description": ", ".join(code for code, each in CODES.items() if each == status)}
        for status in sorted(set(CODES.values()))
    }
    paths: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for path, said, form in _FORMS:
        found = form.model_json_schema(ref_template="#/components/schemas/{model}")
        definitions |= found.pop("$defs", {})
        definitions[form.__name__] = found
        body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{form.__name__}"}}}
        paths[path] = {
            "post": {
                "summary": said, "requestBody": {"required": True, "content": body},
                "responses": {"200": {"description": "the answer"}} | errors,
            }
        }  # fmt: skip
    for path, said in _PLAIN:
        paths[path] = {"get": {"summary": said, "responses": {"200": {"description": "the answer"}} | errors}}
    return {
        "openapi": "3.1.0", "info": {"title": "Rooftile", "version": __version__}, "paths": paths,
        "components": {
            "schemas": definitions, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }  # fmt: skip
