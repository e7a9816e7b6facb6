"""The options of the experts' operators, and how they cross a schema."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from torch import Tensor

from rooftile.weights import QuantisedWeight

# the most tokens whose experts a GPU computes without sorting their choices, where no gradient is wanted
FEW = 4
# a choice that another rank computes: it adds nothing here
ELSEWHERE = -2


class Weights(NamedTuple):
    """The weights of all experts, and of the one that every token uses."""

    up: Tensor  # (E, 2 h, d), gate rows first; (E, h, d) for relu2
    down: Tensor  # (E, d, h)
    up_bias: Tensor | None = None  # (E, 2 h)
    down_bias: Tensor | None = None  # (E, d)
    shared_up: Tensor | None = None  # (2 s, d)
    shared_down: Tensor | None = None  # (d, s)
    shared_gate: Tensor | None = None  # (d,)


class QuantisedWeights(NamedTuple):
    """The same weights, some quantised: one quantised weight stacks the rows of all experts, one expert below the other."""

    up: Tensor | QuantisedWeight  # (E, 2 h, d), or quantised (E 2 h, d)
    down: Tensor | QuantisedWeight  # (E, d, h), or quantised (E d, h)
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    shared_up: Tensor | QuantisedWeight | None = None
    shared_down: Tensor | QuantisedWeight | None = None
    shared_gate: Tensor | None = None


class Options(NamedTuple):
    """The options of a call; tensors travel beside them."""

    activation: str = "silu"
    deterministic: bool = False
    backend: str = "auto"

    @property
    def code(self) -> str:
        """The options as a string, which `decode` reads."""
        return ";".join((self.activation, "deterministic" if self.deterministic else "", self.backend))


@cache
def decode(code: str) -> Options:
    """The options that made this code."""
    activation, deterministic, backend = code.split(";")
    return Options(activation, deterministic == "deterministic", backend)
