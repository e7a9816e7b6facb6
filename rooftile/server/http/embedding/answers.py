"""Answers with vectors and scores, in the words of OpenAI, of Jina and Cohere, and of vLLM. They are made in a thread."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rooftile.server.http.embedding.forms import EmbeddingForm, RerankForm

Vectors = np.ndarray[Any, np.dtype[np.float32]]


def embeddings(vectors: Vectors, form: EmbeddingForm, tokens: int, model: str, *, normalises: bool) -> bytes:
    """Returns vectors (n, width) in OpenAI's form; cut ones have the length 1 again where the model's have."""
    if form.dimensions is not None and form.dimensions < vectors.shape[1]:
        vectors = np.ascontiguousarray(vectors[:, : form.dimensions])
        vectors = _normalised(vectors) if normalises else vectors
    if form.encoding_format == "base64":
        each: list[Any] = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    else:
        each = vectors.tolist()
    data = [{"object": "embedding", "index": place, "embedding": vector} for place, vector in enumerate(each)]
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": _usage(tokens)})


def ranking(scores: Sequence[float], documents: list[str], form: RerankForm, tokens: int, model: str, id: str) -> bytes:
    """Returns documents, the best first, in the form that Jina and Cohere share."""
    order = sorted(range(len(scores)), key=lambda place: -scores[place])[: form.top_n]
    shows = form.return_documents is not False
    results = [
        {"index": place, "relevance_score": scores[place]} | ({"document": {"text": documents[place]}} if shows else {})
        for place in order
    ]
    return msgspec.json.encode({"id": id, "model": model, "usage": _usage(tokens), "results": results})


def scored(scores: Sequence[float], tokens: int, model: str, id: str, created: int) -> bytes:
    """Returns scores in vLLM's form."""
    data = [{"index": place, "object": "score", "score": score} for place, score in enumerate(scores)]
    return msgspec.json.encode(
        {"id": id, "object": "list", "created": created, "model": model, "data": data, "usage": _usage(tokens)}
    )


def cosines(first: Vectors, second: Vectors) -> list[float]:
    """Returns the cosine of each of n vectors with one, or with its own of n."""
    found: list[float] = (_normalised(first) * _normalised(second)).sum(axis=1).tolist()
    return found


def _normalised(vectors: Vectors) -> Vectors:
    found: Vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return found


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
