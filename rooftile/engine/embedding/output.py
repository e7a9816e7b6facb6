"""Results of `LLM.embed` and `LLM.score`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """The vector of a text.

    Args:
        embedding: (width,) fp32, on the CPU.
        prompt_tokens: the tokens that the model has read.
    """

    embedding: Tensor
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """How well a document answers a query.

    Args:
        score: of a cross-encoder from 0 to 1, unless its folder says otherwise; of vectors their cosine, from -1 to 1.
        prompt_tokens: the tokens that the model has read.
    """

    score: float
    prompt_tokens: int
