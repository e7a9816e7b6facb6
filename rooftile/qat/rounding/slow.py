"""Formats that a device has no matrix units for: they are trained by the definition, and a warning says so once.

A served product in such a format is refused (`rooftile.weights.dispatch`), because a server has another choice. Training for
another machine has none: the numbers must be the format's.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from rooftile.weights.dispatch import lack_of_fp8


@dataclass(slots=True)
class SlowFormatWarning:
    """Holds what a model's layers share: where they were looked at, and whether the warning was given."""

    seen: set[tuple[str, torch.device]] = field(default_factory=set)
    given: bool = False

    def __reduce__(self) -> Any:
        # a copy of a model has its own warning
        return SlowFormatWarning, ()


# compiled code does not know its model
COMPILED = SlowFormatWarning()


def backend_for(format: str, device: torch.device) -> str:
    """Returns the backend of a forward in a format: the definition where the device has no units for it; "" chooses one."""
    return "definition" if lack_of_fp8(format, device) else ""


def warn_if_slow(format: str, device: torch.device, warning: SlowFormatWarning) -> None:
    """Warns where a device has no units for a format, once."""
    if (format, device) in warning.seen:
        return
    warning.seen.add((format, device))
    if warning.given or not lack_of_fp8(format, device):
        return
    warning.given = True
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    warnings.warn(
        f"layers are prepared for {format}, and {name} has no FP8 units: their forward is computed by the definition, as a "
        "product of codes in fp32, so it takes at least as long as a layer in fp32 and the rounding of its weight and inputs; "
        "the result equals a device's with FP8",
        stacklevel=2,
    )
