"""Sparse Transformers: fixed sets of keys by place, in arrangements in which the exact kernels see whole intervals.

The strided set {j : (i - j) mod l = 0} is causal attention among the tokens of one column, place mod l. The summary places of
earlier blocks are causal attention over blocks: for each of the c places, all l queries of a block see one key per earlier
block, so they are heads of one group; where tiles of them are whole, `arrange` has a faster way. Both are merged with the near
keys by lse, which is exact as the sets are disjoint.

Child et al., Generating Long Sequences with Sparse Transformers, arXiv:1904.10509.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rooftile.approximate.arguments import check_qkv, check_scale
from rooftile.approximate.chosen_arguments import check_way
from rooftile.approximate.gathered.arrange import (
    as_groups,
    attend_by_head,
    by_column,
    from_columns,
    from_groups,
    padded,
    summaries_are_tiles,
    summaries_before,
)
from rooftile.approximate.sparse_transformer import definition
from rooftile.errors import InvalidInput
from rooftile.exact import api
from rooftile.exact.masks import CAUSAL, Chunk, Window
from rooftile.recurrent.split.context import follows_context
from rooftile.runtime.arguments import check_choice, check_count
from rooftile.runtime.words import answers_foreign_words

Part = tuple[Tensor, Tensor]


@follows_context()
@answers_foreign_words
def sparse_transformer(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    *,
    backend: str | None = None,
    deterministic: bool | None = None,
    pattern: str = "strided",
    scale: float | None = None,
    sets: str = "union",
    stride: int = 128,
    summary: int = 8,
    window: int | None = None,
) -> Tensor:
    """Causal attention to fixed sets of about 2 sqrt(S) keys: near ones, and a few of the far ones.

    strided: the last `window` keys, the query's own among them, and those with (i - j) mod stride = 0. The paper's set of near
    keys begins at i - stride, one key more. fixed: the own block of `stride` keys, and the last `summary` places of every block.
    A key in both sets counts once. With T < S the queries are the last T tokens, so one query at a time gives the same rows.

    Args:
        q: queries (B, T, H, D), float32, bfloat16 or float16, any strides.
        k: keys (B, S, Hk, D). Hk divides H.
        v: values (B, S, Hk, Dv).
        backend: "eager" is the definition; another name means the exact kernels (`rooftile.attention`); None or "auto" takes
            the fastest that runs.
        deterministic: as in `rooftile.attention`.
        pattern: "strided" or "fixed".
        scale: of the scores; 1 / sqrt(D) if None.
        sets: "union" shows both sets to each head; "split" shows the near set to the first half of the heads and the far set to
            the others; "first" and "second" show one of them, for layers that alternate.
        stride: the paper's l.
        summary: the paper's c, for "fixed".
        window: of near keys, for "strided"; stride if None.

    Returns:
        o (B, T, H, Dv), contiguous, in the dtype of q.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due.
        Unsupported: the named backend does not run this problem.

    With a stride of at least S, or a window of at least S, "union" is causal attention: a known answer of the tests. Another: the
    second strided set is causal attention among every l-th token.

    Example:
        >>> q, k, v = (torch.randn(1, 1024, 8, 64) for _ in range(3))
        >>> sparse_transformer(q, k, v, pattern="fixed", stride=128, summary=8).shape
        torch.Size([1, 1024, 8, 64])

    Child et al., Generating Long Sequences with Sparse Transformers, arXiv:1904.10509.
    """
    q, k, v, _ = check_qkv(q, k, v)
    pattern = check_choice("pattern", pattern, ("strided", "fixed"))
    sets = check_choice("sets", sets, ("union", "split", "first", "second"))
    stride, summary = check_count("stride", stride), check_count("summary", summary)
    if window is not None and pattern == "fixed":
        raise InvalidInput(f"window is {window} with pattern 'fixed'; the near keys are then the own block: leave it out")
    window = stride if window is None else check_count("window", window)
    if summary > stride and pattern == "fixed":
        raise InvalidInput(f"summary is {summary}; stride is {stride}, and summary must be at most stride")
    H = q.shape[2]
    if sets == "split" and H == 1:
        raise InvalidInput("sets is 'split' and q has 1 head; must have at least 2, or write sets='union'")
    scale = check_scale(scale, q.shape[-1])
    options = check_way(backend, deterministic, scale)
    if options is None:
        return definition.sparse_transformer(
            q, k, v, pattern=pattern, stride=stride, window=window, summary=summary, sets=sets, scale=scale
        ).contiguous()
    if k.shape[1] < q.shape[1]:
        # queries before the first key see nothing
        early = q.shape[1] - k.shape[1]
        late = sparse_transformer(
            q[:, early:], k, v, sets=sets, pattern=pattern, stride=stride, summary=summary, **options,
            window=window if pattern == "strided" else None,
        )  # fmt: skip
        return padded(late, early, 0)
    whole = partial(_heads, pattern=pattern, stride=stride, window=window, summary=summary, options=options)
    if sets != "split":
        return whole(q, k, v, sets)
    first = H - H // 2
    if first % (H // k.shape[2]):
        # the border lies within a group
        k, v = (x.repeat_interleave(H // k.shape[2], dim=2) for x in (k, v))
    border = first * k.shape[2] // H
    near = whole(q[:, :, :first], k[:, :, :border], v[:, :, :border], "first")
    return torch.cat([near, whole(q[:, :, first:], k[:, :, border:], v[:, :, border:], "second")], dim=2)


def _heads(
    q: Tensor, k: Tensor, v: Tensor, heads: str, *, pattern: str, stride: int, window: int, summary: int, options: dict[str, Any]
) -> Tensor:  # fmt: skip
    """The attention of heads that all see the first set, the second, or both."""
    parts: list[Part] = []
    if heads != "second":
        near = CAUSAL & (Window(window - 1) if pattern == "strided" else Chunk(stride))
        parts.append(api.attention_with_lse(q, k, v, near, **options))
    if heads != "first" and pattern == "strided":
        # the union leaves out the keys that the window holds already
        parts.append(_columns(q, k, v, stride, 0 if heads == "second" else -(-window // stride), options))
    if heads != "first" and pattern == "fixed":
        by_tiles = summaries_are_tiles(q, stride, summary, options["backend"])
        before = summaries_before if by_tiles else _summaries_before
        parts += before(q, k, v, stride, summary, options)
        if heads == "second":
            parts.append(_own_summary(q, k, v, stride, summary, options))
    return (parts[0][0] if len(parts) == 1 else api.merge(parts)[0]).contiguous()


def _columns(q: Tensor, k: Tensor, v: Tensor, stride: int, skip: int, options: dict[str, Any]) -> Part:
    """Attention to the keys at i - l m, for all m >= skip."""
    T, S = q.shape[1], k.shape[1]
    if T == 1:
        # one query reads its own column alone
        here = slice((S - 1) % stride, max(S - stride * skip, 0), stride)
        return api.attention_with_lse(q, k[:, here], v[:, here], **options)
    before, after = (S - T) % stride, -S % stride
    q = by_column(padded(q, before, after), stride)
    # rows of a column, less those that are skipped: aligned bottom-right, the causal mask moves along
    k, v = (by_column(padded(x, 0, after), stride) for x in (k, v))
    rows = max(k.shape[1] - skip, 0)
    o, lse = from_columns(*attend_by_head(q, k[:, :rows], v[:, :rows], **options), stride)
    return o[:, before : before + T], lse[..., before : before + T]


def _summaries_before(q: Tensor, k: Tensor, v: Tensor, stride: int, summary: int, options: dict[str, Any]) -> list[Part]:
    """Attention to the summary places of the blocks before the own one: a part per place."""
    T, (S, Hk) = q.shape[1], k.shape[1:3]
    before, after = (S - T) % stride, -S % stride
    q = as_groups(padded(q, before, after), stride, Hk)
    k, v = (padded(x, 0, after).unflatten(1, (-1, stride))[:, :-1] for x in (k, v))
    parts = []
    for place in range(stride - summary, stride):
        part = attend_by_head(q, k[:, :, place], v[:, :, place], **options)
        o, lse = from_groups(*part, stride, Hk)
        parts.append((o[:, before : before + T], lse[..., before : before + T]))
    return parts


def _own_summary(q: Tensor, k: Tensor, v: Tensor, stride: int, summary: int, options: dict[str, Any]) -> Part:
    """Attention to the summary places of the own block."""
    B, T, S = *q.shape[:2], k.shape[1]
    before, after = (S - T) % stride, -S % stride
    n = (before + T + after) // stride
    q = padded(q, before, after).unflatten(1, (n, stride))
    k, v = (padded(x[:, S - T - before :], 0, after).unflatten(1, (-1, stride)) for x in (k, v))
    q, k, v = (x[:, :, stride - summary :].flatten(0, 1) for x in (q, k, v))  # (B n, c, H, D)
    o, lse = attend_by_head(q, k, v, **options)
    o = padded(o, stride - summary, 0).unflatten(0, (B, n)).flatten(1, 2)
    lse = F.pad(lse, (stride - summary, 0), value=-torch.inf).unflatten(0, (B, n)).transpose(1, 2).flatten(2)
    return o[:, before : before + T], lse[..., before : before + T]
