"""The devices of the Triton kernels outside attention: CUDA tensors, and CPU tensors in Triton's interpreter."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import util

from torch import Tensor

from rooftile.launch import INTERPRETED


def runs_on(x: Tensor) -> bool:
    """Whether Triton's kernels run on x. Otherwise PyTorch's own operations compute the same.

    That includes CUDA tensors without Triton, with one warning: the result is correct, but slower.
    """
    if not x.is_cuda:
        return INTERPRETED and x.device.type == "cpu"
    return _triton_is_installed()


@cache
def _triton_is_installed() -> bool:
    if util.find_spec("triton") is not None:
        return True
    warnings.warn(
        "Triton is not installed, so CUDA tensors are normalised, gated, rotated, cached and sampled by PyTorch's own "
        "operations, which are slower: install triton 3.6 or newer",
        stacklevel=3,
    )
    return False
