"""Holds the state of a prepared layer, and describes it in words."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from rooftile.qat.rounding.codes import Rounding, Taken
from rooftile.qat.rounding.finite import Raised
from rooftile.qat.rounding.masking import Masking
from rooftile.qat.rounding.slow import SlowFormatWarning
from rooftile.weights.formats import ROW


@dataclass(slots=True)
class Preparation:
    """The state of a prepared layer.

    Args:
        rounding: how the weight is rounded; None: it is not.
        name: of the layer in its model.
        start_step: from which step of the optimiser on it is rounded.
        steps: of the optimiser that holds the weight.
        ignored: how many `rooftile.qat.off` are open.
        kept: codes, with what tells whether they still belong to the weight.
        masking: of a 2:4 weight.
        warning: what the layers of a model share of the warning about a device without units for their format.
        learns: whether an optimiser holds the scales of "lsq".
        raised: the flag of a weight that is not finite.
    """

    rounding: Rounding | None
    name: str
    start_step: int
    steps: int = 0
    ignored: int = 0
    kept: tuple[Any, Taken] | None = None
    masking: Masking | None = None
    warning: SlowFormatWarning = field(default_factory=SlowFormatWarning)
    learns: bool = False
    raised: Raised = field(default_factory=Raised)
    # compiled code is compiled anew where a number that it reads changes, so it reads this
    started: bool = field(init=False)

    def __post_init__(self) -> None:
        self.reach(self.steps)

    def reach(self, steps: int) -> None:
        """Sets the number of steps."""
        self.steps, self.started = steps, steps >= self.start_step

    def __deepcopy__(self, memo: dict[int, Any]) -> Preparation:
        masking, warning = self.masking and replace(self.masking, seen=None), deepcopy(self.warning, memo)
        # a copy is made inside of `off` to be used outside of it
        return replace(self, ignored=0, kept=None, learns=False, raised=Raised(), masking=masking, warning=warning)

    def __reduce__(self) -> Any:
        masking = self.masking and replace(self.masking, seen=None)
        return Preparation, (self.rounding, self.name, self.start_step, self.steps, 0, None, masking, self.warning)


def described(preparation: Preparation) -> str:
    """Returns the format in words, such as "int4:32", "2:4", "int4:32 2:4" or "mxfp4 round_up, activations in mxfp4"."""
    rounding = preparation.rounding
    words = [] if rounding is None else [word_of(rounding)]
    if rounding is not None and rounding.rule != "floor":
        words.append(rounding.rule)
    words += ["2:4"] * (preparation.masking is not None)
    activations = "" if rounding is None or rounding.activations is None else f", activations in {rounding.activations}"
    return " ".join(words) + activations


def word_of(rounding: Rounding) -> str:
    """Returns a format with its group."""
    if rounding.group is None:
        return rounding.format
    return f"{rounding.format}:{'row' if rounding.group == ROW else rounding.group}"
