"""The token ids of prompts and answers, in vLLM's words, for a request with `return_token_ids`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rooftile.server.engine.messages import Scored
    from rooftile.server.http.responder import Responder


def answer_ids(responder: Responder, logprobs: list[list[Scored]] | None) -> dict[str, Any]:
    """Returns the field with the tokens of an answer, or of its growth; `logprobs` has the tokens that the engine has sent."""
    if not responder.generation.returns_ids:
        return {}
    return {"token_ids": [token.id for token, *_ in logprobs or ()]}


def prompt_ids(responder: Responder, place: int) -> dict[str, Any]:
    """Returns the field with the tokens of a prompt: chats have it beside the choices, completions in them."""
    return {"prompt_token_ids": responder.tokens[place]} if responder.generation.returns_ids else {}
