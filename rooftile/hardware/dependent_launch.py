"""Programmatic dependent launch: a kernel begins while the one in front of it still runs, and waits for its results itself.

On Hopper and newer GPUs this hides the launch of a small kernel. It also gives a product behind a small kernel time to copy in
its weight (`rooftile.matmul.hopper.early`): the norm of one row keeps one multiprocessor busy, and the memory idles meanwhile.

A kernel that takes part is launched with `overlaps(device)` among its constants, and calls `wait_for_inputs()` under `if PDL:`
before it reads or writes anything.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def overlaps(device: torch.device) -> dict[str, bool]:
    """Returns the compile-time arguments of kernels that take part, as far as a device has such launches."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def wait_for_inputs() -> None:
    """Lets the next kernel begin, and waits until the kernels in front have written their results."""
    gdc_launch_dependents()
    gdc_wait()
