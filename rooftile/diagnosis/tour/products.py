"""Exhibits about matrix products: tiny and huge ones, and the thin ones of decoding."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from rooftile.diagnosis.output.units import count, percent
from rooftile.diagnosis.tour.exhibit import Exhibit, ExhibitCase, Lab

SIZES = {"cpu": (16, 64, 256, 1024, 2048), "cuda": (64, 256, 1024, 4096, 8192)}
WIDTH = {"cpu": 4096, "cuda": 16384}
BATCHES = (1, 64)


def products(lab: Lab) -> Exhibit:
    """Multiplies square matrices, from products that are shorter than their call to products that fill the machine."""
    dtype = _dtype(lab)
    sizes = SIZES[lab.device.type]
    cases = []
    for n in sizes:
        a, b, c = (torch.randn(n, n, device=lab.device).to(getattr(torch, dtype)) for _ in range(3))
        expected = lab.expect(bytes=3 * a.nbytes, flops=2 * n**3, product=_short(dtype))
        cases.append(ExhibitCase(name=f"{n} x {n}", expected=expected, work=partial(torch.mm, a, b, out=c)))
    peak = lab.ceilings.matmul_tflops[_short(dtype)] * 1e6

    def lesson(us: Mapping[str, float]) -> str:
        reached = {n: 2 * n**3 / us[f"{n} x {n}"] / peak for n in (sizes[0], sizes[-1])}
        return (
            f"The largest reaches {percent(reached[sizes[-1]])} of the ceiling, the smallest {reached[sizes[0]] * 100:.2g} %: "
            "there the call takes longer than the arithmetic."
        )

    return Exhibit(
        title="Matrix products, tiny to huge",
        does=f"Products of square matrices in {dtype}: FLOPs grow with the cube of the size, bytes with its square.",
        cases=tuple(cases),
        lesson=lesson,
    )


def decoding(lab: Lab) -> Exhibit:
    """Multiplies one and 64 tokens with the same weights, as a decoder does with batch 1 and 64."""
    dtype, n = _dtype(lab), WIDTH[lab.device.type]
    weights = torch.randn(n, n, device=lab.device).to(getattr(torch, dtype))
    cases = []
    for batch in BATCHES:
        x = torch.randn(batch, n, device=lab.device).to(weights.dtype)
        flops = 2 * batch * n * n
        expected = lab.expect(bytes=weights.nbytes + 2 * x.nbytes, flops=flops, product=_short(dtype))
        name = f"batch {batch}"
        cases.append(ExhibitCase(name=name, expected=expected, work=partial(torch.nn.functional.linear, x, weights)))

    def lesson(us: Mapping[str, float]) -> str:
        one, many = us["batch 1"], us["batch 64"]
        return (
            f"64 tokens take {many / one:.1f} times as long as one, so each costs {percent(many / one / 64)} of it: the weights "
            "are read once for all of them."
        )

    return Exhibit(
        title="Decoding with batch 1 and 64",
        does=f"One layer's weights, {count(weights.nbytes, 'B')} in {dtype}, with one token and with 64.",
        cases=tuple(cases),
        lesson=lesson,
    )


def _dtype(lab: Lab) -> str:
    return "bfloat16" if lab.on_gpu else "float32"


def _short(dtype: str) -> str:
    return {"bfloat16": "bf16", "float32": "fp32"}[dtype]
