"""Says what a device runs: the only place that asks for Triton, Gluon, FP8 and an architecture.

Kernels in Triton run on CUDA tensors of Ampere and newer, on AMD GPUs, and on CPU tensors in Triton's interpreter. Where Triton
is missing or too old, a named backend refuses with the sentence of `lack_of_triton`; a function that chooses for itself takes
PyTorch's operations, which compute the same, and warns once per process with that sentence.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib import metadata, util
from pathlib import Path

import torch
from torch import Tensor

# Triton's interpreter runs the kernels on CPU tensors, for tests
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

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


def capability(device: torch.device) -> tuple[int, int]:
    """Returns NVIDIA's compute capability of a device: (9, 0) for Hopper, (0, 0) for a device that is no GPU of NVIDIA."""
    word = arch(device)
    return divmod(int(word[2:]), 10) if word.startswith("sm") else (0, 0)


def lacks_fp8(device: torch.device) -> bool:
    """Whether a device is a GPU without matrix units for FP8 (e4m3): older than Ada. Triton has no e4m3 there either."""
    return (0, 0) < capability(device) < (8, 9)


@cache
def lack_of_triton() -> str:
    """Says why kernels in Triton cannot be compiled here; an empty text if they can. Does not import Triton."""
    found = util.find_spec("triton")
    if found is None or found.origin is None:
        return "Triton is not installed; needs 3.6 or newer"
    version = metadata.version("triton")
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < (3, 6):
        return f"Triton {version}; needs 3.6 or newer"
    return ""


@cache
def lack_of_gluon() -> str:
    """Says why kernels in Gluon for Hopper cannot be compiled here; an empty text if they can."""
    if lack := lack_of_triton():
        return lack
    found = util.find_spec("triton")
    assert found is not None
    assert found.origin is not None
    hopper = Path(found.origin).parent / "experimental" / "gluon" / "language" / "nvidia" / "hopper"
    return "" if hopper.exists() else f"Triton {metadata.version('triton')} without Gluon for Hopper; needs 3.6 or newer with it"


def lack_of_kernels(word: str) -> str:
    """Says why kernels in Triton do not run on an architecture (`arch`); an empty text if they do."""
    # AMD's words are gfx90a, gfx942, ...
    if word.startswith("gfx") or (word.startswith("sm") and int(word[2:]) >= 80):
        return lack_of_triton()
    if word == "cpu" and INTERPRETED:
        return ""
    return f"tensors are on {word}; needs a CUDA GPU of sm80 (Ampere) or newer"


# set as above: Dynamo keeps the answer as a constant
lack_of_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


def runs_kernels(x: Tensor) -> bool:
    """Whether kernels in Triton run on x. Otherwise PyTorch's own operations compute the same.

    CUDA tensors without Triton bring one warning: the result is correct, but slower.
    """
    if not x.is_cuda:
        return INTERPRETED and x.device.type == "cpu"
    warn_without_triton(x.is_cuda)
    return not lack_of_triton()


def warn_without_triton(is_gpu: bool) -> None:
    """Warns once that PyTorch's operations stand in for the kernels, if tensors are on a GPU and Triton is missing or too old."""
    # Dynamo warns of functions that keep their results
    if is_gpu and not torch.compiler.is_compiling() and lack_of_triton():
        _warn_once()


@cache
def _warn_once() -> None:
    text = f"{lack_of_triton()}: PyTorch's operations run on this GPU in place of Rooftile's kernels, and are slower"
    warnings.warn(text, stacklevel=4)
