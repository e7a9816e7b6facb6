"""The tolerance of design.md for the approximate methods: |x - exact| <= 2 |plain - exact| + 8 ulp, largest and mean.

`exact` is the definition in fp64 under equal choices, `plain` the definition in the inputs' dtype, whose sums are in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.conformance.exact import ulp


def assert_within(
    found: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor], dtype: torch.dtype, terms: int = 64
) -> None:
    """Asserts that every tensor of `found` is within the tolerance that the definition gives it.

    terms: how many products the longest sum has, each rounded to fp32: beyond 64 their errors may pass 8 ulp.
    """
    assert found.keys() == exact.keys() == plain.keys()
    # if terms cancel, the rounding of the terms remains
    floor = ulp(torch.float32, max((_magnitude(x) for x in exact.values()), default=0.0))
    for name, due in exact.items():
        x = found[name].detach().double()
        assert x.shape == due.shape, name
        wrong, usual = ((y.detach().double() - due.detach()).abs() for y in (x, plain[name]))
        assert usual.isfinite().all(), f"{name}: the definition overflows {dtype} here, so this case shows nothing"
        if not due.numel():
            continue
        slack = max(8 * ulp(dtype, _magnitude(due)), terms**0.5 * floor)
        for word, size in (("largest", torch.amax), ("mean", torch.mean)):
            got, most = size(wrong).item(), 2 * size(usual).item() + slack
            # written so that NaN fails
            assert got <= most, f"{name}: {word} error {got:.3g}; due {most:.3g}, at magnitude {_magnitude(due):.3g}"


def _magnitude(x: Tensor) -> float:
    return x.detach().abs().max().item() if x.numel() else 0.0


def gradients(outputs: dict[str, Tensor], leaves: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The gradients of `leaves` under the same random incoming gradients, which are rounded to `dtype`."""
    generator = torch.Generator().manual_seed(1)
    incoming = [torch.randn(x.shape, generator=generator).to(dtype).to(x.device, x.dtype) for x in outputs.values()]
    found = torch.autograd.grad(list(outputs.values()), list(leaves.values()), incoming)
    return {f"d{name}": grad for name, grad in zip(leaves, found, strict=True)}


def sentence_only(value: object) -> str:
    """Names a case of bad input by its sentence: random numbers in a name would differ from process to process."""
    return value if isinstance(value, str) else "given"
