"""The recipe for quantised attention: number formats, scales and transformations. It is part of a problem."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from rooftile.errors import InvalidInput
from rooftile.runtime.words import answers_words

# how the values of a `QuantisedQKV` are laid out: like v itself, or transposed into the columns that Hopper's kernel reads
ValueOrder = Literal["rows", "columns"]
_HAS = {
    "qk": ("native", "fp8", "int8"),
    "pv": ("native", "fp8"),
    "granularity": ("tensor", "head", "block", "row"),
    "incoherent": (True, False),
    "smooth_k": (True, False),
}


@answers_words
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Precision:
    """The number formats of attention's two matrix products, and how tensors are quantised to them.

    Args:
        qk: the format of queries and keys: "fp8" (e4m3), "int8", or "native", the dtype of the tensors.
        pv: the format of weights and values: "fp8" (e4m3) or "native".
        granularity: the numbers that share a scale: a whole "tensor", a "head" of a sequence, a "block" of 128 positions of a
            head, or a "row". Under "row" values have one scale per channel of a head, because a row's scale could not be taken
            out of the sum over rows.
        incoherent: multiplies queries and keys by one random orthogonal matrix (`rooftile.numerics.hadamard`), which spreads
            outliers and does not change their products. The head dim must be a multiple of 16.
        smooth_k: subtracts the mean key (in long sequences, the mean of some keys) from every key. This shifts all scores of a
            row by the same number, which softmax ignores; lse is corrected for it.

    Example:
        >>> o = attention(*torch.randn(3, 1, 40, 2, 64), CAUSAL, precision=Precision(qk="int8", granularity="row"))

    Shah et al., FlashAttention-3, arXiv:2407.08608; Zhang et al., SageAttention, arXiv:2410.02367.
    """

    qk: Literal["native", "fp8", "int8"] = "fp8"
    pv: Literal["native", "fp8"] = "fp8"
    granularity: Literal["tensor", "head", "block", "row"] = "block"
    incoherent: bool = True
    smooth_k: bool = True

    def __post_init__(self) -> None:
        for name, has in _HAS.items():
            value = getattr(self, name)
            # 1 equals True
            if value not in has or type(value) is not type(has[0]):
                raise InvalidInput(f"Precision: {name} is {value!r}; has {', '.join(str(word) for word in has)}")

    @property
    def code(self) -> str:
        """The recipe as a short string: `decode(precision.code) == precision`."""
        return f"{self.qk}/{self.pv}/{self.granularity}/{int(self.incoherent)}{int(self.smooth_k)}"

    def __str__(self) -> str:
        name = next((name for name, preset in PRESETS.items() if preset == self), None)
        return name or self.code

    def __repr__(self) -> str:
        """Returns the expression that makes the recipe, without what is at its default."""
        changed = (field.name for field in fields(self) if getattr(self, field.name) != field.default)
        return f"Precision({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"


PRESETS = {"fp8": Precision(), "int8": Precision(qk="int8")}


def recipe_of(precision: object) -> Precision | None:
    """Returns the recipe for an argument `precision`; None if all is computed in the dtype of the tensors."""
    if precision is None or precision == "native":
        return None
    if isinstance(precision, Precision):
        return None if precision.qk == precision.pv == "native" else precision
    if isinstance(precision, str) and precision in PRESETS:
        return PRESETS[precision]
    raise InvalidInput(f"precision is {precision!r}; must be 'native', {', '.join(map(repr, PRESETS))}, or a rooftile.Precision")


def decode(code: str) -> Precision:
    """The recipe behind its word."""
    qk, pv, granularity, flags = code.split("/")
    words: dict[str, Any] = {"qk": qk, "pv": pv, "granularity": granularity}
    return Precision(**words, incoherent=flags[0] == "1", smooth_k=flags[1] == "1")
