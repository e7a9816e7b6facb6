"""The name of a device's architecture in a Spec."""

from __future__ import annotations

import torch

_KNOWN: dict[torch.device, str] = {}


def arch(device: torch.device) -> str:
    """Returns "cpu", "sm80", "sm90", "sm100", ...; for other devices their type ("mps", "xpu")."""
    word = _KNOWN.get(device)
    if word is None:
        word = device.type
        if word == "cuda" and torch.version.hip is None:
            major, minor = torch.cuda.get_device_capability(device)
            word = f"sm{major}{minor}"
        elif word == "cuda":
            word = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        _KNOWN[device] = word
    return word


# torch.compiler.assume_constant_result sets this attribute, but calling it would import Dynamo, which takes over a second
arch._dynamo_marked_constant = True  # type: ignore[attr-defined]


def lacks_fp8(device: torch.device) -> bool:
    """Whether a device is a GPU without matrix units for FP8 (e4m3): older than Ada. Triton has no e4m3 there either."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)
