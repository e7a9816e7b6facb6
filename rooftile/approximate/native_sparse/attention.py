"""Native Sparse Attention: compressed, selected and near keys, in three softmaxes that gates weigh.

The near branch is the exact kernels' window. A query sees a new compressed key every `stride` tokens, so every stride-th query,
from any of `stride` on, is a row of causal attention over n compressed keys. Selection gathers blocks.

Yuan et al., Native Sparse Attention, arXiv:2502.11089.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from rooftile.approximate.arguments import check_qkv, check_scale
from rooftile.approximate.chosen_arguments import as_given, check_indices, check_way
from rooftile.approximate.gathered.arrange import attend_by_head, by_column, from_columns
from rooftile.approximate.native_sparse import definition
from rooftile.approximate.native_sparse.compression import check_compressed, check_lengths
from rooftile.approximate.native_sparse.selected.gated_sum import gated_sum
from rooftile.approximate.native_sparse.selection import check_counts, choose_blocks, selected_attention
from rooftile.errors import InvalidInput
from rooftile.exact import api
from rooftile.exact.masks import CAUSAL, FULL, Window
from rooftile.recurrent.split.context import follows_context
from rooftile.runtime.arguments import check_count, shown
from rooftile.runtime.tensors import check_offsets
from rooftile.runtime.words import answers_foreign_words

Pair = tuple[Tensor, Tensor]


@follows_context()
@answers_foreign_words
def native_sparse(
    q: Tensor,  # (B, T, H, D)
    compressed: Pair,  # (B, n, Hk, D), (B, n, Hk, Dv)
    selected: Pair,  # (B, S, Hk, D), (B, S, Hk, Dv)
    near: Pair,  # (B, S, Hk, D), (B, S, Hk, Dv)
    gates: Tensor,  # (B, T, H, 3)
    *,
    backend: str | None = None,
    block_size: int = 64,
    chosen: Tensor | None = None,
    count: int = 16,
    cu: Tensor | None = None,
    deterministic: bool | None = None,
    first: int = 1,
    length: int = 32,
    local: int = 2,
    scale: float | None = None,
    stride: int = 16,
    window: int = 512,
) -> Tensor:
    """Native Sparse Attention: the sum of three causal attentions, weighed by gates.

    Each branch has keys and values of its own. The compressed branch sees the blocks of `length` tokens that are complete; its
    weights choose the blocks of the selected branch, alike for the heads of a group; the near branch sees the last `window`
    keys, the own among them. The outputs are added times their gates: there is no common softmax. With T < S the queries are the
    last T tokens, so one query at a time gives the same rows.

    Args:
        q: queries (B, T, H, D), float32, bfloat16 or float16, any strides. With cu all tensors are packed: (total, H, D).
        compressed: keys (B, n, Hk, D) and values (B, n, Hk, Dv) from `compress`, n = (S - length) // stride + 1. Hk divides H.
        selected: keys (B, S, Hk, D) and values (B, S, Hk, Dv).
        near: the same.
        gates: (B, T, H, 3), of the branches in this order, after their sigmoid.
        backend: "eager" is the definition; another name means the exact kernels (`rooftile.attention`); None or "auto" takes
            the fastest that runs.
        block_size: tokens per selected block, a multiple of stride and at least length.
        chosen: ready-made blocks (B, T, Hk, count) int32, from `choose_blocks`; -1 for none.
        count: blocks per query, those among them that are always chosen.
        cu: offsets (B + 1,) of packed sequences, queries and keys alike. They are read, which waits for a GPU.
        deterministic: as in `rooftile.attention`.
        first: blocks at the beginning of the text that are always chosen.
        length: tokens per compressed block, a multiple of stride.
        local: the number of blocks that are always chosen: the query's own, and blocks before it.
        scale: of the scores in all branches; 1 / sqrt(D) if None.
        stride: tokens between the beginnings of two compressed blocks.
        window: keys of the near branch.

    Returns:
        o (B, T, H, Dv), contiguous, in the dtype of q. The choice is a constant in the backward.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due.
        Unsupported: the named backend does not run this problem.

    With `count` blocks for the whole text the selected branch is causal attention; with length = stride = 1 and "mean" the
    compressed branch is, too: known answers of the tests.

    Example:
        >>> q, k, v = torch.randn(1, 256, 8, 64), torch.randn(1, 256, 2, 64), torch.randn(1, 256, 2, 64)
        >>> gates = torch.rand(1, 256, 8, 3)
        >>> native_sparse(q, (compress(k), compress(v)), (k, v), (k, v), gates, count=4).shape
        torch.Size([1, 256, 8, 64])

    Yuan et al., Native Sparse Attention, arXiv:2502.11089.
    """
    length, stride, block_size = check_lengths(length, stride, block_size)
    count, first, local = check_counts(count, first, local)
    window = check_count("window", window)
    sizes: dict[str, Any] = {"block_size": block_size, "length": length, "stride": stride}
    counts: dict[str, Any] = {"count": count, "first": first, "local": local}
    if cu is not None:
        rest: dict[str, Any] = {"backend": backend, "deterministic": deterministic, "scale": scale, "window": window}
        return _packed(q, compressed, selected, near, gates, cu, chosen, **sizes, **counts, **rest)
    q, compressed, selected, near = _check_branches(q, compressed, selected, near)
    scale = check_scale(scale, q.shape[-1])
    options = check_way(backend, deterministic, scale)
    (B, T, H, _), S, Hk = q.shape, selected[0].shape[1], selected[0].shape[2]
    check_compressed(compressed[0], S, length, stride)
    _check_gates(gates, "(B, T, H, 3)", (B, T, H, 3), q)
    if chosen is not None:
        check_indices("chosen", chosen, (B, T, Hk, None), f"(B, T, Hk, n) = ({B}, {T}, {Hk}, n)", q)
    with as_given(q):
        if options is None:
            if chosen is None:
                chosen = choose_blocks(q, compressed[0], backend="eager", scale=scale, tokens=S, **sizes, **counts)
            return definition.native_sparse(
                q, compressed, selected, near, gates, chosen, window=window, scale=scale, **sizes
            ).contiguous()
        return with_near(q, compressed, selected, near, gates, chosen=chosen, options=options, window=window, **sizes, **counts)


def with_near(
    q: Tensor, compressed: Pair, selected: Pair, near: Pair, gates: Tensor, *, options: dict[str, Any], length: int, stride: int,
    block_size: int, count: int, first: int, local: int, window: int, chosen: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`native_sparse` by kernels, of checked arguments; `near` may begin at the first key that a query sees.

    options: scale, backend and deterministic of the exact kernels.
    """
    S, scale = selected[0].shape[1], options["scale"]
    far, chosen = far_and_chosen(
        q, compressed, S, options=options, length=length, stride=stride, block_size=block_size, count=count, first=first,
        local=local, chosen=chosen,
    )  # fmt: skip
    # the exact kernels' other names say nothing of the kernels of selection
    kernels = "triton" if options["backend"] == "triton" else None
    middle = selected_attention(q, *selected, chosen, block_size=block_size, backend=kernels, scale=scale)
    return gated_sum((far, middle, api.attention(q, *near, CAUSAL & Window(window - 1), **options)), gates)


def far_and_chosen(
    q: Tensor, compressed: Pair, S: int, *, options: dict[str, Any], length: int, stride: int, block_size: int, count: int,
    first: int, local: int, chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The compressed branch (B, T, H, Dv) of the last T of S tokens, and the blocks that it chooses unless they are given."""
    far, lse = compressed_attention(q, *compressed, S, length, stride, options)
    if chosen is None:
        chosen = choose_blocks(
            q, compressed[0], block_size=block_size, count=count, first=first, length=length, local=local, lse=lse,
            scale=options["scale"], stride=stride, tokens=S,
        )  # fmt: skip
    return far, chosen


def compressed_attention(
    q: Tensor, k: Tensor, v: Tensor, S: int, length: int, stride: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Attention of queries to the compressed keys that are complete.

    The queries of a group of `stride` see as many keys. So whole groups are `stride` batches of causal attention, a view of q
    where B is 1; queries before the first whole group and after the last are attended on their own.

    Returns o (B, T, H, Dv) and lse (B, H, T).
    """
    T, n = q.shape[1], k.shape[1]
    # the place of a query, counted from the first that sees a compressed key
    place = S - T - (length - 1)
    early = min(max(-place, 0), T)
    place = max(place, 0)
    if n == 0 or early == T:
        # no query sees anything
        return _seeing_nothing(q, k, v)
    lead = min(-place % stride, T - early)
    groups, tail = divmod(T - early - lead, stride)
    blind, first, whole, last = q.split((early, lead, groups * stride, tail), 1)
    # the keys that the queries of the first group see; each group sees one more than the group before
    seen = place // stride + 1
    parts = [_seeing_nothing(blind, k, v)] * (early > 0)
    if lead:
        parts.append(attend_by_head(first, k[:, :seen], v[:, :seen], FULL, **options))
    if groups:
        count = seen + (lead > 0) + groups - 1
        rows = by_column(whole, stride)
        keys, values = (_for_each(x[:, :count], stride) for x in (k, v))
        o, lse = api.attention_with_lse(rows, keys, values, CAUSAL, **options)
        parts.append(from_columns(o, lse, stride))
    if tail:
        parts.append(attend_by_head(last, k, v, FULL, **options))
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 2)


def _seeing_nothing(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of 0 and lse of -inf, from which gradients of 0 flow to all tensors."""
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, device=q.device)
    return q.new_zeros(*q.shape[:3], v.shape[-1]) + q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum(), lse


def _for_each(x: Tensor, count: int) -> Tensor:
    """Keys (B, n, Hk, D) for each of `count` queries of a group, (B count, n, Hk, D)."""
    return x.unsqueeze(1).expand(-1, count, -1, -1, -1).flatten(0, 1)


def _packed(
    q: Tensor, compressed: Pair, selected: Pair, near: Pair, gates: Tensor, cu: Tensor, chosen: Tensor | None, **options: Any
) -> Tensor:  # fmt: skip
    """One sequence after the other."""
    if not isinstance(q, Tensor) or q.ndim != 3:
        raise InvalidInput(f"q is {shown(q)}; with cu it must be packed (total, H, D)")
    total, H, _ = q.shape
    ends = check_offsets("cu", cu, total, "tokens", q.device, False).tolist()
    length, stride = options["length"], options["stride"]
    counts = [max((b - a - length) // stride + 1, 0) for a, b in itertools.pairwise(ends)]
    starts = [0, *itertools.accumulate(counts)]
    for name, pair, due in (("compressed", compressed, starts[-1]), ("selected", selected, total), ("near", near, total)):
        for x in _check_pair(name, pair):
            if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[0] != due:
                raise InvalidInput(f"{name} has {shown(x)}; must be packed, and these sequences have {due} {name} keys in all")
    _check_gates(gates, "(total, H, 3)", (total, H, 3), q)
    if chosen is not None:
        Hk = selected[0].shape[1]
        check_indices("chosen", chosen, (total, Hk, None), f"(total, Hk, n) = ({total}, {Hk}, n)", q)
    outs = []
    for (a, b), (c, d) in zip(itertools.pairwise(ends), itertools.pairwise(starts), strict=True):
        pairs = (compressed[0][None, c:d], compressed[1][None, c:d]), _rows(selected, a, b), _rows(near, a, b)
        own = None if chosen is None else chosen[None, a:b]
        outs.append(native_sparse(q[None, a:b], *pairs, gates[None, a:b], chosen=own, **options)[0])
    return torch.cat(outs) if outs else q.new_zeros(0, q.shape[1], selected[1].shape[-1])


def _rows(pair: Pair, a: int, b: int) -> Pair:
    """The tokens of one sequence."""
    return pair[0][None, a:b], pair[1][None, a:b]


def _check_pair(name: str, pair: Any) -> Pair:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        came = f"a {type(pair).__name__} of {len(pair)}" if isinstance(pair, (tuple, list)) else shown(pair)
        raise InvalidInput(f"{name} is {came}; must be a pair of keys and values")
    return pair[0], pair[1]


def _check_gates(gates: Any, axes: str, due: tuple[int, ...], q: Tensor) -> None:
    if not isinstance(gates, Tensor) or gates.shape != due or not gates.is_floating_point():
        raise InvalidInput(f"gates is {shown(gates)}; must be a floating-point tensor {axes} = {due}")
    if gates.device != q.device:
        raise InvalidInput(f"gates is on {gates.device}; q is on {q.device}, and all inputs must be on one device")


def _check_branches(q: Tensor, *branches: Any) -> Any:
    """The tensors in one dtype and shape."""
    found = []
    for name, pair in zip(("compressed", "selected", "near"), branches, strict=True):
        try:
            rows, *own = check_qkv(q, *_check_pair(name, pair))[:3]
        except InvalidInput as error:
            raise InvalidInput(str(error) if str(error).startswith(name) else f"{name}: {error}") from error
        found.append(tuple(own))
    shapes = [(k.shape[2], v.shape[3]) for k, v in found]
    if found[1][0].shape[1] != found[2][0].shape[1]:
        raise InvalidInput(f"near has {found[2][0].shape[1]} keys; selected has {found[1][0].shape[1]}, and they must agree")
    if len(set(shapes)) > 1:
        raise InvalidInput(f"the branches have (key heads, value dim) {shapes}; must agree")
    return rows, *found
