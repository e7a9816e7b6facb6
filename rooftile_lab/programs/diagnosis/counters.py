"""Sets the bytes that a diagnosis predicts beside those that Nsight Compute counts, over three sizes of each operator.

    PYTHONPATH=. python -m rooftile_lab.programs.diagnosis.counters --json benchmarks/results/h200-counters.jsonl

A row for each operator: what was predicted and counted at the largest size, and the ratio of the two slopes over the sizes, in
which a kernel's fixed traffic cancels. Needs a GPU, ncu on the PATH and the right to read counters.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rooftile as rt
from rooftile.cost.io import tiles
from rooftile.cost.session import Session, open_session
from rooftile.exact.spec import Problem, Sizes, Spec
from rooftile.fused.gated import gated as gate
from rooftile.fused.norm import Weights, normalise
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import figures

SIZES = (1, 2, 4)


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


OPERATORS = {f.__name__: f for f in (addition, copy, product, attention, norm, gated)}


def row(session: Session, name: str, counted: Sequence[dict[str, Any]]) -> Row:
    last = counted[-1]
    predicted, dram, l2 = (np.array([c[key] for c in counted], float) for key in ("bytes", "dram_bytes", "l2_bytes"))
    # a tile of queries reads its keys and values anew
    through_l2 = np.array([tiles(_problem(n), block_s=128).total for n in SIZES], float) if name == "attention" else predicted
    measures = {
        "predicted_bytes": float(predicted[-1]),
        "dram_bytes": float(dram[-1]),
        "l2_bytes": float(l2[-1]),
        "dram_slope_ratio": _slope(dram) / _slope(predicted),
        "l2_slope_ratio": _slope(l2) / _slope(through_l2),
    }
    if last["tensor_flops"]:
        measures["tensor_flops_ratio"] = last["tensor_flops"] / last["flops"]
    return Row(
        **session.about(session.dtype), suite="diagnosis", case=f"counters-{name}", backend="rooftile", phase="fwd",
        samples=len(counted), measures={word: figures(value) for word, value in measures.items()}, settings={"op": last["op"]},
    )  # fmt: skip


def _slope(counts: Any) -> float:
    return float(np.polyfit(SIZES, counts, 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=OPERATORS, help="several; all without it")
    parser.add_argument("--json", type=Path, help="append rows to this file")
    asked = parser.parse_args()
    session = open_session(torch.device("cuda"))
    for name in asked.case or OPERATORS:
        counted = []
        for n in SIZES:
            found = rt.diagnose(OPERATORS[name](n), budget=0.5, ncu=True)
            if not found.counters:
                print(f"{name}: {'; '.join(found.notes)}")
                break
            counted.append(max(found.counters, key=lambda c: c["dram_bytes"]))
        if len(counted) == len(SIZES):
            line = row(session, name, counted).json()
            print(line, flush=True)
            if asked.json:
                with asked.json.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
