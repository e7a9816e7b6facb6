"""Programmatic dependent launch: a kernel begins while the one in front of it still runs, and waits for its results itself.

On Hopper and newer GPUs this hides the launch of a small kernel. It also gives a product behind a small kernel time to copy in
its weight (`rooftile.runtime.early_weights`): the norm of one row keeps one multiprocessor busy, and the memory idles meanwhile.

A kernel that takes part is launched with `overlaps(device)` among its constants, and calls `wait_for_inputs()` under `if PDL:`
before it reads or writes anything.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rooftile.runtime.devices import arch


def has_dependent_launches(name: str) -> bool:
    """Whether a GPU such as "sm90" has such launches, also where a CUDA graph is captured.

    Consumer Blackwell (sm120) has them, but a capture with one fails there: SGLang, pull request 18596.
    """
    return name.startswith("sm") and 90 <= int(name[2:]) < 120


@cache
def overlaps(device: torch.device) -> dict[str, bool]:
    """Returns the compile-time arguments of kernels that take part, as far as a device has such launches."""
    if not has_dependent_launches(arch(device)):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def wait_for_inputs() -> None:
    """Lets the next kernel begin, and waits until the kernels in front have written their results."""
    gdc_launch_dependents()
    gdc_wait()
