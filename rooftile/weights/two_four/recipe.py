"""`Recipe`: how a model is trained for 2:4 weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

from rooftile.errors import InvalidInput
from rooftile.runtime.words import answers_words
from rooftile.weights.two_four.checks import check_flag


@answers_words
@dataclass(frozen=True, slots=True)
class Recipe:
    """SR-STE, for `rooftile.qat.prepare(model, sparsity=Recipe())`: a layer multiplies with W * mask, and all of W is trained.

    The gradient of the masked weight passes to all of W, and `decay` times the weights that are left out is added to it, so that
    they shrink and masks settle (arXiv:2102.04010; on the gradient rather than on the weight: arXiv:2404.01847).

    Args:
        transposable: whether masks are transposable: `rooftile.sparsity.two_four`.
        decay: of the weights that are left out.
        refresh: after how many changes of a weight its mask is chosen anew.
        freeze_from: the step of the optimiser from which on masks stay; None: they never do.

    Raises:
        InvalidInput: a number is out of range.

    Example:
        >>> Recipe(freeze_from=10_000)
        Recipe(transposable=False, decay=0.0002, refresh=1, freeze_from=10000)

    Zhou et al., arXiv:2102.04010; Hu et al., arXiv:2404.01847.
    """

    transposable: bool = False
    decay: float = 2e-4
    refresh: int = 1
    freeze_from: int | None = None

    def __post_init__(self) -> None:
        check_flag("transposable", self.transposable)
        # NumPy's numbers are no floats to Python, but real ones
        decay: object = self.decay
        if isinstance(decay, bool) or not isinstance(decay, Real) or not 0 <= float(decay) < math.inf:
            raise InvalidInput(f"decay is {self.decay!r}; must be a number of at least 0")
        _check_steps("refresh", self.refresh, 1)
        if self.freeze_from is not None:
            _check_steps("freeze_from", self.freeze_from, 0)


def _check_steps(name: str, value: object, least: int) -> None:
    # NumPy's integers are integers
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InvalidInput(f"{name} is {value!r}; must be a number of steps, {least} or more")
