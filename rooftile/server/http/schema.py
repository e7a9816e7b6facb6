"""The description of the routes for programs, as OpenAPI."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel

from rooftile.server.http.openai.forms import ChatForm, CompletionForm, DetokenizeForm, TokenizeForm
from rooftile.server.refusals import CODES

_FORMS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("/v1/completions", "Continues prompts.", CompletionForm), ("/v1/chat/completions", "Answers a conversation.", ChatForm),
    ("/tokenize", "Returns token ids.", TokenizeForm), ("/detokenize", "Returns text.", DetokenizeForm),
)  # fmt: skip
_PLAIN = (
    ("/v1/models", "Lists the one model."), ("/health", "Says whether requests are answered."),
    ("/metrics", "Returns Prometheus's series."), ("/openapi.json", "This description."), ("/", "A page to try the model."),
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
