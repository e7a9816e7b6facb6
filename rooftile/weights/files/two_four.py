"""Our own layout of 2:4 weights in a checkpoint: values and places, with a quantization_config that names it.

No other library reads 2:4 files any more, so a checkpoint stores the dense shape with zeros unless it is asked for this one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from rooftile.weights.two_four import TwoFour

METHOD, LAYOUT = "rooftile", "two_four"
# the last parts of the names of a weight's tensors
VALUES, PLACES, SCALES = "weight_values", "weight_places", "weight_scale"


def configuration(modules: Iterable[str]) -> dict[str, Any]:
    """Returns the quantization_config of a checkpoint in which these modules are 2:4; all others are plain."""
    return {"quant_method": METHOD, "format": LAYOUT, "modules": list(modules)}


def tensors_of(weight: TwoFour) -> dict[str, Tensor]:
    """Returns the tensors of a weight by the last parts of their names."""
    found = {VALUES: weight.values, PLACES: weight.places}
    return found if weight.scales is None else found | {SCALES: weight.scales}
