"""The word that a Spec uses for where its tensors are."""

from __future__ import annotations

import torch

_KNOWN: dict[torch.device, str] = {}


def arch(device: torch.device) -> str:
    """"cpu", "sm80", "sm90", "sm100", ...; for other devices their type ("mps", "xpu")."""
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


# what torch.compiler.assume_constant_result sets; calling it would import Dynamo, over a second
arch._dynamo_marked_constant = True  # type: ignore[attr-defined]
