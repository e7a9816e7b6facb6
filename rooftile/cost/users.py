"""Pairs and FLOPs of attention over users' events (`rooftile.recommend`)."""

from __future__ import annotations

from torch import Tensor

from rooftile.exact import masks
from rooftile.exact.masks import Mask


def hstu_pairs(rows: int, contextual: int, targets: int, mask: Mask) -> int:
    """Counts the pairs of rows that see each other of a user: `rows` in all, contextual ones first, targets last."""
    end = max(rows - targets, 0)
    contextual = min(contextual, end)
    history = end - contextual
    start, stop = max(mask.first_key(history), 0), min(mask.last_key(history) + 1, history)
    per_target = contextual + max(stop - start, 0) + 1
    return contextual * end + history * contextual + masks.pairs(mask, history, history) + (rows - end) * per_target


def hstu_flops(q: Tensor, v: Tensor, cu: Tensor, targets: Tensor | None, contextual: int, mask: list[int]) -> int:
    """Counts the FLOPs of the two products of each pair, over all users and heads; reads the offsets.

    Example:
        >>> hstu_flops(torch.empty(3, 2, 8), torch.empty(3, 2, 4), torch.tensor([0, 3]), None, 0, [-1, 0, -1])
        288
    """
    left, right, prefix = (None if n < 0 else n for n in mask[:3])
    lengths = cu.diff().tolist()
    last = [0] * len(lengths) if targets is None else targets.tolist()
    seen = Mask(left, right, prefix, tuple(mask[3:]))
    pairs = sum(hstu_pairs(n, contextual, m, seen) for n, m in zip(lengths, last, strict=True))
    return 2 * pairs * q.shape[1] * (q.shape[2] + v.shape[2])


def target_flops(q: Tensor, dims: int, events: Tensor | None, cu_q: Tensor, cu: Tensor) -> int:
    """Counts the FLOPs of target attention's products, `dims` per pair and head: of candidates and all events, or those chosen.

    Example:
        >>> target_flops(torch.empty(3, 2, 8), 8 + 4, None, torch.tensor([0, 3]), torch.tensor([0, 5]))
        720
    """
    if events is None:
        pairs = int((cu_q.diff().long() * cu.diff()).sum()) * q.shape[1]
    else:
        pairs = int((events >= 0).sum()) * (q.shape[1] // events.shape[1])
    return 2 * pairs * dims


def paged_pairs(rows: int, length: int, candidates: bool, mask: Mask) -> int:
    """Counts the pairs of a user's rows and the events in pages that they see, and candidates' pairs with themselves."""
    if not candidates:
        return masks.pairs(mask, rows, length)
    start, stop = max(mask.first_key(length), 0), min(mask.last_key(length) + 1, length)
    return rows * (max(stop - start, 0) + 1)


def events_read(rows: int, length: int, candidates: bool, mask: Mask) -> int:
    """Counts the events in pages that some row of a user sees."""
    first, last = (length, length) if candidates else (length - rows, length - 1)
    start, stop = max(mask.first_key(first), 0), min(mask.last_key(last) + 1, length)
    return max(stop - start, 0) if rows else 0


def paged_work(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, cu: Tensor, scaled: bool, candidates: bool, timed: bool,
    mask: list[int],
) -> tuple[int, int]:  # fmt: skip
    """Counts the FLOPs of attention over pages, and the bytes that it reads of pages and their tables; reads the lengths."""
    left, right, prefix = (None if n < 0 else n for n in mask[:3])
    seen = Mask(left, right, prefix, tuple(mask[3:]))
    users = list(zip(cu.diff().tolist(), lengths.tolist(), strict=True))
    pairs = sum(paged_pairs(*user, candidates, seen) for user in users)
    events = [events_read(*user, candidates, seen) for user in users]
    (size, H, D), Dv = k.shape[1:], v.shape[3]
    event = H * (D * k.element_size() + Dv * v.element_size() + 8 * scaled) + 8 * timed
    blocks = sum(-(-n // size) for n in events)
    return 2 * pairs * H * (D + Dv), sum(events) * event + blocks * table.element_size()
