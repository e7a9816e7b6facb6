"""The price of `deterministic=True` in the backward: the same problem with and without it, in turns.

At head dims above 128 both are the same kernels, so these have no case.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

import rooftile as rt
from rooftile.cost import roof
from rooftile.cost.session import Session
from rooftile.exact.cases import CASES as PROBLEMS
from rooftile.exact.cases import Case
from rooftile.hardware.clock import Work, clock_for
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import contest, times_of, with_measures
from rooftile_lab.bench.run import Progress, words_of
from rooftile_lab.bench.works import step

GPU = tuple(f"d{dim}-{mask}-{length}" for dim in (64, 128) for mask in ("full", "causal") for length in ("512", "2k", "8k"))
CPU = ("cpu-causal-512",)
QUICK = ("d64-causal-2k", "d128-causal-2k")


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """Two rows per case; the deterministic one has the time that it takes longer."""
    for name in names:
        say(name)
        case = PROBLEMS[name]
        problem = case.problem(session.machine.arch)
        works = {"rooftile": backward(session, case, False), "rooftile, deterministic": backward(session, case, True)}
        rows = contest(
            session, works, clock_for(session.device), dtype=case.dtype, roofs=roof(problem, session.ceilings, "bwd"),
            suite="deterministic", case=name, phase="bwd", problem=words_of(problem),
        )  # fmt: skip
        plain, deterministic = rows.values()
        us = times_of(rows)
        yield plain
        yield with_measures(deterministic, extra_time_percent=100 * (us[deterministic.backend] / us[plain.backend] - 1))


def backward(session: Session, case: Case, deterministic: bool) -> Work:
    """The backward alone, on a kept graph."""
    inputs = case.inputs(session.device)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rt.attention(q, k, v, inputs.mask, deterministic=deterministic, **inputs.options)

    return step(forward, inputs.tensors, "bwd")
