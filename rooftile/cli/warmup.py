"""`rooftile warmup`: compiles the kernels of cases ahead of a program's first call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rooftile.cli.output import CaseOption, DeviceOption, JsonOption, TagOption, chosen_cases, print_json, progress
from rooftile.errors import InvalidInput

if TYPE_CHECKING:
    import torch

    from rooftile.exact.cases import Case


def warmup(
    case: CaseOption = None,
    tag: TagOption = "",
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> None:
    """Runs each case once, forward and backward, with one sequence, so that Triton compiles its kernels to its disk cache.

    Example: rooftile warmup --tag gpu-bench --device cuda
    """
    if not case and not tag:
        raise InvalidInput("warmup got no case; name some with --case or --tag (`rooftile bench list` prints both)")
    from rooftile.hardware.device import device_of

    target = device_of(device)
    chosen = chosen_cases(case, tag, "")
    taken = {}
    with progress() as say:
        for number, one in enumerate(chosen, 1):
            say(f"{number} of {len(chosen)}: {one.name}")
            taken[one.name] = round(_run(one, target), 3)
    if json:
        print_json(taken)
        return
    for name, seconds in taken.items():
        print(f"{name:24} {seconds:8.2f} s")


def _run(case: Case, device: torch.device) -> float:
    import torch

    from rooftile.exact import api

    start = time.perf_counter()
    # the kernels do not depend on the batch size
    inputs = (case if case.lengths else replace(case, B=1)).inputs(device, requires_grad=True)
    function: Callable[..., torch.Tensor] = api.attention_packed if case.lengths else api.attention
    o = function(*inputs.tensors, inputs.mask, **inputs.options)
    torch.autograd.grad(o.sum(), inputs.tensors[:3])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
