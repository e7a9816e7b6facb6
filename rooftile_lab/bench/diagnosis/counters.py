"""The bytes that a diagnosis predicts beside those that Nsight Compute counts, over three sizes of each operator.

A row has what was predicted and counted at the largest size, and the ratio of the two slopes over the sizes, in which a kernel's
fixed traffic cancels. Needs a GPU, ncu on the PATH and the right to read counters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import rooftile as rt
from rooftile.cost.io import tiles
from rooftile.cost.session import Session
from rooftile.exact.spec import Problem, Sizes, Spec
from rooftile.fused.gated import gated as gate
from rooftile.fused.norm import Weights, normalise
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import timed_row, with_measures

SIZES = (1, 2, 4)
Operator = Callable[[int], Callable[[], Any]]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(torch.bfloat16)


def addition(n: int) -> Callable[[], Any]:
    x = _random(n << 26)
    return lambda: x + 1.5


def copy(n: int) -> Callable[[], Any]:
    """A copy of rows that are not contiguous; contiguous ones are moved without a kernel that ncu could see."""
    x = _random(n << 13, 8192 + 64)[:, :8192]
    return lambda: x.contiguous()


def product(n: int) -> Callable[[], Any]:
    x, y = _random(2048 * n, 8192), _random(8192, 8192)
    return lambda: x @ y


def attention(n: int) -> Callable[[], Any]:
    q, k, v = (_random(4 * n, 4096, 16, 128) for _ in range(3))
    return lambda: rt.attention(q, k, v, rt.CAUSAL)


def _problem(n: int) -> Problem:
    spec = Spec(dtype=torch.bfloat16, dim=128, dim_v=128, mask=rt.CAUSAL, scale=128**-0.5)
    return Problem(spec=spec, sizes=Sizes(B=4 * n, T=4096, S=4096, H=16, Hk=16))


def norm(n: int) -> Callable[[], Any]:
    x, weights = _random(n << 14, 4096), Weights(_random(4096), None, 1e-5, False)
    return lambda: normalise(x, weights)


def gated(n: int) -> Callable[[], Any]:
    x = _random(n << 13, 2 * 8192)
    return lambda: gate(x, "silu")


OPERATORS: dict[str, Operator] = {
    "addition": addition, "copy": copy, "product": product, "attention": attention, "norm": norm, "gated": gated,
}  # fmt: skip


def counted_row(session: Session, case: str, operator: Operator) -> Row:
    """The row of an operator; without counters it has a reason."""
    named: dict[str, Any] = {"suite": "diagnosis", "case": case, "backend": "rooftile", "phase": "fwd"}
    if session.device.type != "cuda":
        return timed_row(session, [], dtype=session.dtype, reason="refused: Nsight Compute counts on a GPU", **named)
    counted: list[dict[str, Any]] = []
    for n in SIZES:
        found = rt.diagnose(operator(n), budget=0.5, ncu=True)
        if not found.counters:
            return timed_row(session, [], dtype=session.dtype, reason=f"refused: {'; '.join(found.notes)}", **named)
        counted.append(max(found.counters, key=lambda c: c["dram_bytes"]))
    made = timed_row(session, [], dtype=session.dtype, settings={"op": counted[-1]["op"]}, **named)
    return replace(with_measures(made, **measures_of(operator, counted)), samples=len(counted))


def measures_of(operator: Operator, counted: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the bytes at the largest size, predicted and counted, and the ratios of slopes."""
    last = counted[-1]
    predicted, dram, l2 = (np.array([c[key] for c in counted], float) for key in ("bytes", "dram_bytes", "l2_bytes"))
    # a tile of queries reads its keys and values anew
    is_attention = operator is attention
    through_l2 = np.array([tiles(_problem(n), block_s=128).total for n in SIZES], float) if is_attention else predicted
    measures = {
        "predicted_bytes": float(predicted[-1]),
        "dram_bytes": float(dram[-1]),
        "l2_bytes": float(l2[-1]),
        "dram_slope_ratio": _slope(dram) / _slope(predicted),
        "l2_slope_ratio": _slope(l2) / _slope(through_l2),
    }
    if last["tensor_flops"]:
        measures["tensor_flops_ratio"] = last["tensor_flops"] / last["flops"]
    return measures


def _slope(counts: Any) -> float:
    return float(np.polyfit(SIZES, counts, 1)[0])
