"""In which number formats attention is computed: a recipe, part of what a problem is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rooftile.errors import InvalidInput

_HAS = {
    "qk": ("native", "fp8", "int8"),
    "pv": ("native", "fp8"),
    "granularity": ("tensor", "head", "block", "row"),
    "incoherent": (True, False),
    "smooth_k": (True, False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Formats of the two products of attention, and what is done before numbers are rounded to them.

    Args:
        qk: of queries and keys: "fp8" (e4m3), "int8", or "native", the dtype of the tensors.
        pv: of weights and values: "fp8" (e4m3) or "native".
        granularity: what shares a scale: a "tensor", a "head" of a sequence, a "block" of 128 positions of one, or a "row". Under
            "row" values have a scale a channel of a head, since a row's scale would not come out of the sum over rows.
        incoherent: queries and keys are multiplied by one random orthogonal matrix (`rooftile.numerics.hadamard`), which spreads
            outliers and leaves their products as they are. Head dims that are multiples of 16.
        smooth_k: the mean key, of long sequences the mean of some, is taken from every key. It adds the same to all scores of a
            row, which softmax does not see; lse is given it back.

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
        """The recipe as a word: `decode(precision.code) == precision`."""
        return f"{self.qk}/{self.pv}/{self.granularity}/{int(self.incoherent)}{int(self.smooth_k)}"

    def __str__(self) -> str:
        name = next((name for name, preset in PRESETS.items() if preset == self), None)
        return name or self.code


PRESETS = {"fp8": Precision(), "int8": Precision(qk="int8")}


def recipe_of(precision: object) -> Precision | None:
    """What a caller means by `precision`; None for the dtype of the tensors throughout."""
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
