"""The options of a chunked recurrence, and how they cross an operator's schema."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from rooftile.recurrent.linear.features import SCALED


class Recurrence(NamedTuple):
    """The options of a recurrence; tensors travel beside it."""

    feature: str = "elu"
    causal: bool = True
    normalise: bool = True
    scale: float = 1.0  # the factor of scores, for projected features: each side takes its root
    backend: str = "auto"

    @property
    def scaled(self) -> bool:
        """Whether keys have factors of their own, so that the state has a running largest."""
        return self.feature in SCALED

    @property
    def code(self) -> str:
        """The options but for the scale as a string, which `decode` reads. It has no number: Dynamo makes symbols of them."""
        return ";".join((self.feature, "causal" if self.causal else "", "normalise" if self.normalise else "", self.backend))


@cache
def decode(code: str, scale: float) -> Recurrence:
    """The options that made this code."""
    feature, causal, normalise, backend = code.split(";")
    return Recurrence(feature, causal == "causal", normalise == "normalise", scale, backend)
