"""FLOPs and compulsory bytes of the approximate methods, forward or backward, from sizes alone.

Only matrix products count as FLOPs, and each byte of an input or output counts once, as everywhere in `rooftile.cost`. These are
what a method must do; a schedule in chunks adds products within its chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def sparse_transformer(
    B: int, T: int, S: int, H: int, Hk: int, D: int, Dv: int, *, pattern: str = "strided", stride: int = 128,
    window: int | None = None, summary: int = 8, heads: str = "union", itemsize: int = 2, phase: str = "fwd",
) -> Cost:  # fmt: skip
    """The cost of a Sparse Transformer's attention: the pairs of its sets, each once.

    Example:
        >>> sparse_transformer(1, 16384, 16384, 16, 16, 128, 128).flops / linear(1, 16384, 16384, 16, 16, 128, 128).flops
        1.490234375
    """
    window = stride if window is None else window
    near = far = both = 0
    for i in range(max(S - T, 0), S):
        if pattern == "strided":
            near, far = near + min(window, i + 1), far + i // stride + 1
            both += min((window - 1) // stride, i // stride) + 1
        else:
            own = max(i % stride - (stride - summary) + 1, 0)
            near, far, both = near + i % stride + 1, far + i // stride * summary + own, both + own
    total = {"union": H * (near + far - both), "first": H * near, "second": H * far, "split": (H - H // 2) * near + H // 2 * far}
    return Cost(_pairs(B * total[heads], D, Dv, phase), _dense(B, T, S, H, Hk, D, Dv, itemsize, phase))


def reformer(
    B: int, T: int, S: int, H: int, Hk: int, D: int, Dv: int, *, rounds: int = 4, chunk: int = 64, buckets: int | None = None,
    strict: bool = False, itemsize: int = 2, phase: str = "fwd",
) -> Cost:  # fmt: skip
    """The cost of Reformer's attention: the hashes, and every pair of a chunk with itself and the one before, in each round.

    Causal or not, the sort decides which of these pairs are seen, so that all count. Queries are the keys: S is T.
    """
    buckets = 2 ** max((2 * T // chunk).bit_length() - 1, 1) if buckets is None else buckets
    hashes = B * T * H * D * rounds * buckets if phase == "fwd" else 0
    seen = B * H * rounds * T * min(chunk if strict else 2 * chunk, T)
    moved = B * T * (H * D + Hk * Dv + H * Dv) * itemsize
    return Cost(hashes + _pairs(seen, D, Dv, phase), moved if phase == "fwd" else 2 * moved)


def routing(
    B: int, T: int, S: int, H: int, Hk: int, D: int, Dv: int, *, clusters: int = 64, width: int | None = None,
    itemsize: int = 2, phase: str = "fwd",
) -> Cost:  # fmt: skip
    """The cost of routing attention: the scores with the centroids, and every pair of a cluster. Causal or not, all count."""
    width = -(-S // clusters) if width is None else width
    scores = 2 * B * H * clusters * (T + S) * D if phase == "fwd" else 0
    seen = B * H * clusters * min(width, T) * min(width, S)
    moved = _dense(B, T, S, H, Hk, D, Dv, itemsize, phase) + 4 * H * clusters * D * (phase == "fwd")
    return Cost(scores + _pairs(seen, D, Dv, phase), moved)


def loki(
    B: int, T: int, S: int, H: int, Hk: int, D: int, Dv: int, *, dims: float = 0.25, keep: float = 0.25, unit: str = "page",
    page: int = 16, itemsize: int = 2, phase: str = "fwd",
) -> Cost:  # fmt: skip
    """The cost of a step of Loki's decoding: T is 1, and there is no backward.

    The leading dimensions of all keys are read, and the chosen keys and values: by pages once per key head, by tokens as often as
    a head has chosen them.
    """
    flops.check_phase(phase)
    r, count = max(round(dims * D), 1), max(math.ceil(keep * S), 1)
    if unit == "page":
        count = min(-(-count // page) * page, S)
    work = 2 * B * H * S * r + 2 * B * H * D * D + _pairs(B * H * count, D, Dv, "fwd")
    kept = count * (Hk if unit == "page" else H) * (D + Dv)
    return Cost(work, B * (S * Hk * r + kept + H * D + H * Dv) * itemsize + 4 * Hk * D * D)


def native_sparse(
    B: int, T: int, S: int, H: int, Hk: int, D: int, Dv: int, *, length: int = 32, stride: int = 16, block_size: int = 64,
    count: int = 16, window: int = 512, itemsize: int = 2, phase: str = "fwd",
) -> Cost:  # fmt: skip
    """The cost of Native Sparse Attention without projections and compression: the pairs of its three branches.

    The weights that choose blocks are the weights of the compressed branch, so they count once.
    """
    n = max((S - length) // stride + 1, 0)
    sizes = {"length": length, "stride": stride, "block_size": block_size, "count": count, "window": window}
    seen = sum(native_sparse_pairs(T, S, branch, **sizes) for branch in BRANCHES)
    # two more pairs of keys and values than `_dense` has, and the gates
    more = B * ((n + S) * Hk * (D + Dv) + 3 * T * H) * itemsize * (1 if phase == "fwd" else 2)
    return Cost(_pairs(B * H * seen, D, Dv, phase), _dense(B, T, S, H, Hk, D, Dv, itemsize, phase) + more)


BRANCHES = ("compressed", "selected", "near")


def native_sparse_pairs(
    T: int, S: int, branch: str, *, length: int = 32, stride: int = 16, block_size: int = 64, count: int = 16, window: int = 512
) -> int:
    """The pairs of one head in a branch of Native Sparse Attention, one of `BRANCHES`; a compressed key counts as a key."""
    n = max((S - length) // stride + 1, 0)
    seen = {
        "compressed": lambda i: min(max((i - length + 1) // stride + 1, 0), n),
        "selected": lambda i: (min(count, i // block_size + 1) - 1) * block_size + i % block_size + 1,
        "near": lambda i: min(window, i + 1),
    }[branch]
    return sum(seen(i) for i in range(max(S - T, 0), S))


def native_sparse_branch(
    B: int, T: int, S: int, H: int, Hk: int, D: int, Dv: int, *, branch: str, length: int = 32, stride: int = 16,
    block_size: int = 64, count: int = 16, window: int = 512, itemsize: int = 2, phase: str = "fwd",
) -> Cost:  # fmt: skip
    """The cost of one branch of Native Sparse Attention, or of its choice of blocks (`branch="choice"`).

    The choice is the scores of the compressed keys, from which it makes no output, and it writes `count` numbers per query and
    key head; the selected branch reads these.
    """
    sizes = {"length": length, "stride": stride, "block_size": block_size, "count": count, "window": window}
    n = max((S - length) // stride + 1, 0)
    chosen = 4 * B * T * Hk * count
    if branch == "choice":
        pairs = B * H * native_sparse_pairs(T, S, "compressed", **sizes)
        return Cost(2 * D * pairs, (B * T * H * D + B * n * Hk * D) * itemsize + chosen)
    moved = _dense(B, T, n if branch == "compressed" else S, H, Hk, D, Dv, itemsize, phase)
    pairs = B * H * native_sparse_pairs(T, S, branch, **sizes)
    return Cost(_pairs(pairs, D, Dv, phase), moved + chosen * (branch == "selected"))


def native_sparse_decode(
    lengths: Sequence[int], H: int, Hk: int, D: int, Dv: int, *, length: int = 32, stride: int = 16, block_size: int = 64,
    count: int = 16, window: int = 512, itemsize: int = 2,
) -> Cost:  # fmt: skip
    """The cost of one query per sequence from a paged cache, without its block tables.

    The choice reads no key of its own: its weights are the compressed branch's. Each branch reads the keys and values that
    it sees, once for the heads of a group. So 32 sequences of 65,536 tokens read a twelfth of what exact attention does:

    Example:
        >>> native_sparse_decode([65536] * 32, 64, 4, 128, 128).bytes_moved / 1e6, 32 * 65536 * 4 * 256 * 2 / 1e6
        (370.09408, 4294.967296)
    """
    sizes = {"length": length, "stride": stride, "block_size": block_size, "count": count, "window": window}
    seen = sum(native_sparse_pairs(1, S, branch, **sizes) for S in lengths for branch in BRANCHES)
    rows = len(lengths) * H * (D + Dv + 3)
    return Cost(_pairs(H * seen, D, Dv, "fwd"), (seen * Hk * (D + Dv) + rows) * itemsize)


def _pairs(count: int, D: int, Dv: int, phase: str) -> int:
    """FLOPs of exact attention over a number of pairs, heads counted."""
    flops.check_phase(phase)
    forward = 2 * (D + Dv) * count
    return forward if phase == "fwd" else forward * 5 // 2


def _dense(B: int, T: int, S: int, H: int, Hk: int, D: int, Dv: int, itemsize: int, phase: str) -> int:
    """Bytes of q, k, v and o; in the backward of these, of do, and of three gradients."""
    q, k, v, o = B * T * H * D, B * S * Hk * D, B * S * Hk * Dv, B * T * H * Dv
    return (q + k + v + o if phase == "fwd" else 2 * (q + k + v) + 2 * o) * itemsize
