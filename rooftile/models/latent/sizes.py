"""The sizes of layers with multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.errors import InvalidInput
from rooftile.runtime.arguments import check_count, check_flag
from rooftile.runtime.words import answers_words


@answers_words
@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """The sizes of a model's layers with multi-head latent attention.

    Args:
        rank: numbers of a token's latent, from which keys and values of all heads are projected.
        query_rank: numbers that a token's queries are projected from; None where they are projected from the token.
        unrotated: numbers of a head's query and key that do not rotate.
        rotated: numbers that do, which all heads of keys share; the dim of `ModelConfig.rotary`.
        value_dim: numbers of a head's value.
        interleaved: whether numbers 2 d and 2 d + 1 rotate as a pair, or d and d + rotated / 2.
        bias: whether the projections from and to the stream have biases.
        norm_eps: is added to the variance in the norms of latents.

    Raises:
        InvalidInput: a size makes no sense.
    """

    rank: int
    query_rank: int | None
    unrotated: int
    rotated: int
    value_dim: int
    interleaved: bool = True
    bias: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("rank", "unrotated", "rotated", "value_dim"):
            check_count(name, getattr(self, name))
        if self.query_rank is not None:
            check_count("query_rank", self.query_rank)
        for name in ("interleaved", "bias"):
            check_flag(name, getattr(self, name))
        for name in ("rank", "rotated"):
            if getattr(self, name) % 2:
                raise InvalidInput(f"{name} is {getattr(self, name)}; must be even")
        if not self.norm_eps >= 0:
            raise InvalidInput(f"norm_eps is {self.norm_eps}; must be at least 0")

    @property
    def head_dim(self) -> int:
        """The numbers of a head's query and key."""
        return self.unrotated + self.rotated

    @property
    def kept(self) -> int:
        """The numbers that a cache keeps of a token: its latent, and the part of its keys that rotates."""
        return self.rank + self.rotated

    def first_queries(self, heads: int) -> int:
        """Returns the rows of the first projection that are for queries."""
        return heads * self.head_dim if self.query_rank is None else self.query_rank

    def rows(self, heads: int) -> int:
        """Returns the rows of the largest projection."""
        return max(heads * self.head_dim, self.first_queries(heads) + self.kept, heads * (self.unrotated + self.value_dim))
