"""FLOPs and compulsory bytes of the approximate methods, forward or backward, from sizes alone.

Only matrix products count as FLOPs, and each byte of an input or output counts once, as everywhere in `rooftile.cost`. These are
what a method must do; a schedule in chunks adds products within its chunks.
"""

from __future__ import annotations

from typing import NamedTuple

from rooftile.cost import flops


class Cost(NamedTuple):
    """The FLOPs of one call, and the bytes that it must move."""

    flops: int
    bytes_moved: int


def linear(
    B: int, T: int, S: int, H: int, Hk: int, D: int, Dv: int, *, itemsize: int = 2, phase: str = "fwd"
) -> Cost:  # fmt: skip
    """The cost of linear attention with features of the head's own dimensions.

    Example:
        >>> linear(1, 16384, 16384, 16, 16, 128, 128).flops
        17179869184
    """
    return Cost(flops.recurrence(B * T, B * S, H, Hk, D, Dv, phase=phase), _dense(B, T, S, H, Hk, D, Dv, itemsize, phase))


def performer(
    B: int, T: int, S: int, H: int, Hk: int, D: int, Dv: int, *, m: int = 256, rows: int | None = None, itemsize: int = 2,
    phase: str = "fwd",
) -> Cost:  # fmt: skip
    """The cost of Performer's attention with m features of `rows` projected numbers (m if None)."""
    rows = m if rows is None else rows
    work = flops.recurrence(B * T, B * S, H, Hk, m, Dv, phase=phase, dim=D, rows=rows)
    return Cost(work, _dense(B, T, S, H, Hk, D, Dv, itemsize, phase) + 4 * rows * D)


def linformer(
    B: int, T: int, S: int, H: int, Hk: int, D: int, Dv: int, *, r: int = 256, heads: int = 1, shared: bool = True,
    itemsize: int = 2, phase: str = "fwd",
) -> Cost:  # fmt: skip
    """The cost of Linformer's attention: the projections of keys and values to r rows, and attention to these.

    Args:
        heads: of each projection: 1, Hk or H.
        shared: whether keys and values share it.
    """
    flops.check_phase(phase)
    projected = heads if heads > 1 else Hk
    project, attend = 2 * r * B * S * max(projected, Hk) * (D + Dv), 2 * (D + Dv) * B * T * r * H
    projections = heads * r * S * (1 if shared else 2) * itemsize
    moved = _dense(B, T, S, H, Hk, D, Dv, itemsize, phase)
    if phase == "fwd":
        return Cost(project + attend, moved + projections)
    # gradients of keys and values, and of the projections, are a product each; those are read, and their gradients written
    return Cost(2 * project + attend * 5 // 2, moved + 2 * projections)


def _dense(B: int, T: int, S: int, H: int, Hk: int, D: int, Dv: int, itemsize: int, phase: str) -> int:
    """Bytes of q, k, v and o; in the backward of these, of do, and of three gradients."""
    q, k, v, o = B * T * H * D, B * S * Hk * D, B * S * Hk * Dv, B * T * H * Dv
    return (q + k + v + o if phase == "fwd" else 2 * (q + k + v) + 2 * o) * itemsize
