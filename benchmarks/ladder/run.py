"""Times every rung of the ladder on one problem, all in turns, each checked first: a JSON line a rung.

    PYTHONPATH=. python -m benchmarks.ladder.run COMMIT >> benchmarks/results/h200-ladder.jsonl
    PYTHONPATH=. ncu --profile-from-start off ... python -m benchmarks.ladder.run --once RUNG [causal]

bf16, D = 128, 16 heads, 4 sequences of 4,096, full and causal. The share is of the matrix product that the same run measured.
"""

# ruff: noqa: T201 - what it prints is what it is for
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime

import torch
from torch import Tensor

import rooftile as rt
from benchmarks import ncu
from benchmarks.ladder import first, kernels
from rooftile.bench.clock import clock_for, medians
from rooftile.bench.peers import provider_named
from rooftile.bench.session import open_session
from rooftile.cases import CASES, Inputs

B, T, H, D, ROUNDS = 4, 4096, 16, 128, 6

RUNGS = ("standard", "flash-1", "flash-2", *kernels.RUNGS, "hopper")

Work = Callable[[], Tensor]


def rungs(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Work]:
    case = CASES[f"d{D}-{'causal' if causal else 'full'}-4k"]
    mask = rt.CAUSAL if causal else rt.FULL
    ours: dict[str, Work] = {
        "standard": provider_named("standard").prepare(case, Inputs((q, k, v), mask, {})),
        "flash-1": lambda: first.forward(q, k, v, causal)[0],
        "flash-2": lambda: rt.attention(q, k, v, mask, backend="triton"),
    }
    for rung in kernels.RUNGS:
        ours[rung] = lambda rung=rung: kernels.forward(q, k, v, causal, rung)[0]
    ours["hopper"] = lambda: rt.attention(q, k, v, mask, backend="hopper")
    return ours


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))


def checked(work: Work, due: Tensor) -> Work:
    worst = (work().float() - due.float()).abs().max().item()
    # two roundings of numbers below 4
    if not worst <= 2**-5:
        raise ValueError(f"differs from the definition by {worst}")
    return work


def main(commit: str) -> None:
    session = open_session(torch.device("cuda"), refresh=True)
    clock = clock_for(torch.device("cuda"))
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit}
    about |= {"date": datetime.now(UTC).isoformat(), "matmul_tflops": session.ceilings.matmul_tflops["bf16"]}
    for causal in (False, True):
        q, k, v = inputs()
        due = rt.attention(q, k, v, rt.CAUSAL if causal else rt.FULL, backend="eager")
        works = {name: checked(work, due) for name, work in rungs(q, k, v, causal).items()}
        flops = 4 * B * H * T * T * D / (2 if causal else 1)
        for name, us in medians(works, clock, ROUNDS).items():
            row = {"rung": name, "mask": "causal" if causal else "full", "median_us": round(us, 1)}
            print(json.dumps(row | {"tflops": round(flops / us / 1e6, 1)} | about), flush=True)


def once(rung: str, causal: bool) -> None:
    ncu.show_once(rungs(*inputs(), causal)[rung])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(sys.argv[2], causal=sys.argv[3:] == ["causal"])
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "unknown")
