"""The sizes of an encoder, beside those that it shares with a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rooftile.errors import InvalidInput
from rooftile.runtime.arguments import check_count
from rooftile.runtime.words import answers_words


@answers_words
@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """The head of a cross-encoder: a pooled vector, a projection, an activation, a norm or none, and one score per label.

    Args:
        labels: scores of a text, at least 1.
        activation: "tanh", or the name of a feed-forward's activation.
        norm: whether a norm follows the activation (ModernBERT).
        bias: whether the projection has a bias; the last one always has.
        pooling: the first token's vector ("cls"), or the mean of all.

    Raises:
        InvalidInput: there is no label.
    """

    labels: int
    activation: str = "tanh"
    norm: bool = False
    bias: bool = True
    pooling: Literal["cls", "mean"] = "cls"

    def __post_init__(self) -> None:
        check_count("labels", self.labels)


@answers_words
@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSizes:
    """The sizes of an encoder beside those in `ModelConfig`.

    Args:
        token_types: rows of the table of token types; 0 for no such table.
        first_position: the row of learned positions that a text's first token has (RoBERTa begins at 2).
        norms_sums: each norm is of the residual stream after an addition, and the stream goes on as its result (BERT); without
            it norms are before the parts of a layer, but for the first, which reads the embedding's norm (ModernBERT).
        norm_bias: whether norms have a bias.
        head: the head of a cross-encoder; None for a model that gives vectors.

    Raises:
        InvalidInput: a number is below 0.
    """

    token_types: int = 0
    first_position: int = 0
    norms_sums: bool = True
    norm_bias: bool = True
    head: HeadSizes | None = None

    def __post_init__(self) -> None:
        for name in ("token_types", "first_position"):
            if getattr(self, name) < 0:
                raise InvalidInput(f"{name} is {getattr(self, name)}; must be at least 0")
