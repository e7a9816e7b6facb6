"""From scores to weights and slopes, and whose tile a program has: shared by the kernels."""

from typing import NamedTuple

import triton
import triton.language as tl

from rooftile.exact.backends.triton.schedule import packed_tile

LOG2E = tl.constexpr(1.4426950408889634)


class Numbers(NamedTuple):
    """The numbers of a call."""

    scale: tl.tensor
    group: tl.tensor  # heads of candidates that share a head of events
    k: tl.tensor  # the length of a list of chosen events


class User(NamedTuple):
    """A user: where its candidates and events begin, and how many there are."""

    row_0: tl.tensor
    rows: tl.tensor
    key_0: tl.tensor
    keys: tl.tensor


@triton.jit
def user_and_tile(slot, cut_ptr, cu_q_ptr, cu_ptr, B, BLOCK: tl.constexpr):
    """Finds the user of a slot and the number of its tile, which may lie past the user's end; cut_ptr has what is cut into tiles."""
    b, i = packed_tile(slot, cut_ptr, B, BLOCK)
    row_0 = tl.load(cu_q_ptr + b).to(tl.int64)
    key_0 = tl.load(cu_ptr + b).to(tl.int64)
    rows = (tl.load(cu_q_ptr + b + 1) - row_0).to(tl.int32)
    keys = (tl.load(cu_ptr + b + 1) - key_0).to(tl.int32)
    return User(row_0, rows, key_0, keys), i


@triton.jit
def weight(x, SPEC: tl.constexpr):
    """The weight of a score without softmax, 0 for -inf, and its derivative."""
    gate = 1.0 / (1.0 + tl.exp2(x * -LOG2E))
    if SPEC.SILU:
        hidden = x == float("-inf")
        w = tl.where(hidden, 0.0, x * gate)
        slope = tl.where(hidden, 0.0, gate * (1.0 + x * (1.0 - gate)))
    else:
        w = gate
        slope = gate * (1.0 - gate)
    return w, slope


@triton.jit
def softmax_again(x, lse):
    """The softmax's weights from scores and their lse; 0 for a candidate that sees nothing."""
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    return tl.exp2((x - lse) * LOG2E)
