"""Times every rung of the ladder on one problem, all in turns, each checked first: a row for each rung, as a JSON line.

    PYTHONPATH=. python -m rooftile_lab.programs.ladder.run >> benchmarks/results/h200-ladder.jsonl
    PYTHONPATH=. ncu --profile-from-start off ... python -m rooftile_lab.programs.ladder.run --once RUNG [causal]

bf16, D = 128, 16 heads, 4 sequences of 4,096, full and causal. Its kernels are no part of the
package, so this is no `rooftile bench` suite.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

import rooftile as rt
from rooftile.cost import roof
from rooftile.cost.session import open_session
from rooftile.diagnosis.counts import ncu
from rooftile.exact.cases import CASES, Case, Inputs
from rooftile.hardware.clock import clock_for, take_turns
from rooftile_lab.bench.peers import provider_named
from rooftile_lab.bench.rows import timed_row
from rooftile_lab.programs.ladder import first, kernels

B, T, H, D, ROUNDS = 4, 4096, 16, 128, 6

RUNGS = ("standard", "flash-1", "flash-2", *kernels.RUNGS, "hopper")

Work = Callable[[], Tensor]


def case_of(causal: bool) -> Case:
    """The problem that the rungs solve: B, T, H and D are its sizes."""
    return CASES[f"d{D}-{'causal' if causal else 'full'}-4k"]


def rungs(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Work]:
    case = case_of(causal)
    mask = case.mask
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


def main() -> None:
    session = open_session(torch.device("cuda"), refresh=True)
    clock = clock_for(torch.device("cuda"))
    for causal in (False, True):
        q, k, v = inputs()
        case = case_of(causal)
        due = rt.attention(q, k, v, case.mask, backend="eager")
        works = {name: checked(work, due) for name, work in rungs(q, k, v, causal).items()}
        floor = roof(case.problem("sm90"), session.ceilings)
        for name, samples in take_turns(works, clock, ROUNDS).items():
            row = timed_row(session, samples, roof=floor, suite="ladder", case=case.name, backend=name, phase="fwd")
            print(row.json(), flush=True)


def once(rung: str, causal: bool) -> None:
    ncu.show_once(rungs(*inputs(), causal)[rung])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(sys.argv[2], causal=sys.argv[3:] == ["causal"])
    else:
        main()
