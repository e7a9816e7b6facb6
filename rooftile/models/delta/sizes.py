"""The sizes of layers with a gated delta net."""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.errors import InvalidInput
from rooftile.runtime.arguments import check_count, check_flag
from rooftile.runtime.words import answers_words


@answers_words
@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """The sizes of a model's layers with a gated delta net.

    Args:
        key_heads, key_dim: heads of queries and keys, and their size.
        value_heads, value_dim: heads of values, and their size; key_heads is a divisor of value_heads.
        kernel: taps of the convolution.
        double_beta: whether beta is twice a sigmoid, so that a state may also turn a key's value around (OLMo Hybrid).
        by_key_head: whether the projection's rows are key head by key head (Qwen3-Next), or all queries, all keys, and so on.
        norm_eps: is added to the variance in the norm before the gate.

    Raises:
        InvalidInput: the sizes do not go together.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    double_beta: bool = False
    by_key_head: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "kernel"):
            check_count(name, getattr(self, name))
        for name in ("double_beta", "by_key_head"):
            check_flag(name, getattr(self, name))
        if self.value_heads % self.key_heads:
            raise InvalidInput(
                f"value_heads is {self.value_heads} and key_heads {self.key_heads}; the second must divide the first"
            )
        if self.kernel < 2:
            raise InvalidInput(f"kernel is {self.kernel}; must be at least 2")
        if not self.norm_eps >= 0:
            raise InvalidInput(f"norm_eps is {self.norm_eps}; must be at least 0")

    @property
    def keys(self) -> int:
        """The numbers of a token's keys, and as many of its queries."""
        return self.key_heads * self.key_dim

    @property
    def width(self) -> int:
        """The numbers of a token's values, and as many of its gates."""
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """The numbers of a token that the convolution reads: queries, keys and values."""
        return 2 * self.keys + self.width

    @property
    def projected(self) -> int:
        """The numbers of a token that the first projection gives: queries, keys, values, gates, beta and decays."""
        return self.convolved + self.width + 2 * self.value_heads
