"""Every rung of the ladder on one problem, all in turns, each checked first: a row for each rung.

bf16, D = 128, 16 heads, 4 sequences of 4,096, full and causal. The kernels are in `rooftile_lab.bench.ladder`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from torch import Tensor

import rooftile as rt
from rooftile.cost import roof
from rooftile.cost.session import Session
from rooftile.diagnosis.counts import ncu
from rooftile.exact.cases import CASES, Case, Inputs
from rooftile.exact.masks import CAUSAL
from rooftile.hardware.clock import clock_for
from rooftile_lab.bench.ladder import OWN
from rooftile_lab.bench.peers import Forward, provider_named
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import contest
from rooftile_lab.bench.run import Progress

ROUNDS = 6
GPU = ("d128-full-4k", "d128-causal-4k")
CPU = ()
QUICK = ("d128-full-4k",)


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each rung."""
    for name in names:
        say(name)
        case = CASES[name]
        inputs = case.inputs(session.device)
        due = provider_named("eager").prepare(case, inputs)()
        works = {rung: checked(work, due) for rung, work in rungs(case, inputs).items()}
        floor = roof(case.problem("sm90"), session.ceilings)
        named = {"suite": "ladder", "case": name, "phase": "fwd"}
        yield from contest(session, works, clock_for(session.device), roofs=floor, rounds=ROUNDS, **named).values()


def rungs(case: Case, inputs: Inputs) -> dict[str, Forward]:
    """The forward of every rung."""
    # the kernels need Triton, and the names of the cases do not
    from rooftile_lab.bench.ladder import first, kernels

    q, k, v = inputs.tensors
    is_causal = case.mask == CAUSAL

    def own(rung: str) -> Forward:
        return lambda: kernels.forward(q, k, v, is_causal, rung)[0]

    return {
        "standard": provider_named("standard").prepare(case, inputs),
        "flash-1": lambda: first.forward(q, k, v, is_causal)[0],
        "flash-2": lambda: rt.attention(q, k, v, case.mask, backend="triton"),
        **{rung: own(rung) for rung in OWN},
        "hopper": lambda: rt.attention(q, k, v, case.mask, backend="hopper"),
    }


def checked(work: Forward, due: Tensor) -> Forward:
    """The work, if its output is right; raises ValueError if it is not."""
    worst = (work().float() - due.float()).abs().max().item()
    # two roundings of numbers below 4
    if not worst <= 2**-5:
        raise ValueError(f"differs from the definition by {worst}")
    return work


if __name__ == "__main__":
    # the process that ncu looks at
    ncu.show_once(rungs(CASES[sys.argv[1]], CASES[sys.argv[1]].inputs("cuda"))[sys.argv[2]])
