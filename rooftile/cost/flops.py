"""The arithmetic of attention. A multiply and an add are two FLOPs; only matrix products count.

Forward: q . k costs 2 D and p v costs 2 Dv for each visible pair of each query head: 2 (D + Dv) pairs H, which is the
usual 4 B H pairs D where D = Dv. Hidden pairs do not count.

Backward: 2.5 times the forward, the usual convention. It is the exact count where D = Dv: five products (the scores
again, dp, dv, dq, dk) against two. Where D > Dv the five products come to 2 (3 D + 2 Dv) per pair, a little more.
"""

from __future__ import annotations

from rooftile.errors import InvalidInput
from rooftile.exact.spec import Problem

PHASES = ("fwd", "bwd")


def count(problem: Problem, phase: str = "fwd") -> int:
    """Counts the FLOPs of a phase, "fwd" or "bwd" (the backward alone)."""
    check_phase(phase)
    spec = problem.spec
    forward = 2 * (spec.dim + spec.dim_v) * problem.pairs * problem.sizes.H
    return forward if phase == "fwd" else forward * 5 // 2


def exponentials(problem: Problem) -> int:
    """Counts the exponentials of either phase: one per visible pair and query head. The forward's rescaling adds a few more."""
    return problem.pairs * problem.sizes.H


def recurrence(
    queries: int, keys: int, H: int, Hk: int, F: int, Dv: int, *, phase: str = "fwd", dim: int = 0, rows: int = 0
) -> int:
    """Counts the FLOPs of linear attention as a recurrence, token by token; a schedule in chunks adds products within them.

    Forward: 2 F Dv for each key (it joins the state) and for each query (it reads the state). Backward: the state again, dk and
    dv for a key, and for a query dq and its part in the state's gradient. Features that are products with a projection
    (rows, dim) cost 2 rows dim per token each time that they are computed, and so does the gradient through them.

    Args:
        queries, keys: tokens of all sequences.
        F: features of a head.
    """
    check_phase(phase)
    state = 2 * F * Dv
    projected = 2 * rows * dim * (queries * H + keys * Hk)
    if phase == "fwd":
        return state * (keys * Hk + queries * H) + projected
    return state * (3 * keys * Hk + 2 * queries * H) + 2 * projected


def check_phase(phase: str) -> None:
    if phase not in PHASES:
        raise InvalidInput(f"phase is {phase!r}; must be fwd or bwd")
