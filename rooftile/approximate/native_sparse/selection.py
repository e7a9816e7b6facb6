"""The choice of blocks of tokens by the weights of compressed keys, and attention to chosen blocks.

Yuan et al., Native Sparse Attention, arXiv:2502.11089.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.approximate.arguments import check_qkv, check_scale
from rooftile.approximate.chosen_arguments import as_given, check_indices, check_range
from rooftile.approximate.gathered.pairs import best
from rooftile.approximate.native_sparse import definition
from rooftile.approximate.native_sparse.compression import check_compressed, check_lengths
from rooftile.approximate.native_sparse.selected import attend as attend_selected
from rooftile.approximate.native_sparse.selected.block_choice import choose as choose_in_kernel
from rooftile.approximate.native_sparse.selected.block_choice import refusal
from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact.reference import pairs
from rooftile.recurrent.split.context import follows_context
from rooftile.runtime.arguments import check_backend, check_count, check_deterministic, shown
from rooftile.runtime.devices import warn_without_triton
from rooftile.runtime.operators import transformed
from rooftile.runtime.words import answers_foreign_words, answers_with

# bytes that the scores of a piece of the queries may have
PIECE = 2**26


@follows_context()
@answers_with({"return_scores": "call choose_blocks_with_scores, which returns (chosen, scores)"})
def choose_blocks(
    q: Tensor,  # (B, T, H, D)
    compressed: Tensor,  # (B, n, Hk, D)
    *,
    backend: str | None = None,
    block_size: int = 64,
    count: int = 16,
    first: int = 1,
    length: int = 32,
    local: int = 2,
    lse: Tensor | None = None,
    scale: float | None = None,
    stride: int = 16,
    tokens: int | None = None,
) -> Tensor:
    """The blocks of tokens that each query of a group of heads selects, by the weights of the compressed keys.

    A block's score is the sum of the softmax weights of the compressed keys that overlap with it, by how much they do, over the
    heads of the group. The first blocks, the own one and those before it are always chosen and count among `count`. Scores are
    computed in fp32, in pieces of the queries, and ties go to the lower block.

    Args:
        q: queries (B, T, H, D), the last T tokens of the text.
        compressed: compressed keys (B, n, Hk, D), from `compress`.
        backend: "eager" is the definition, which holds all scores at once; "triton" the kernel, which holds and
            returns none; "plain" computes in pieces; None or "auto" takes the kernel where it runs.
        block_size: tokens per selected block, a multiple of stride.
        count: blocks per query, at least first + local.
        first: blocks at the beginning of the text that are always chosen.
        length, stride: as in the compression.
        local: the number of blocks that are always chosen: the query's own, and blocks before it.
        lse: of the attention to the compressed keys, (B, H, T), if it is known: the kernel then reads these keys once and not
            twice. Everything else computes its own.
        scale: of the compressed scores; 1 / sqrt(D) if None.
        tokens: the length S of the text; T if None.

    Returns:
        (B, T, Hk, count) int32, rising, then -1 where a query has fewer blocks. Nothing has a gradient.

    Example:
        >>> q, k = torch.randn(1, 256, 8, 64), torch.randn(1, 256, 2, 64)
        >>> choose_blocks(q, compress(k), count=4).shape
        torch.Size([1, 256, 2, 4])
    """
    q, compressed, S, scale, sizes = _checked(q, compressed, tokens, scale, length, stride, block_size, count, first, local)
    way = check_backend(backend, ("eager", "triton", "plain"))
    (B, T, H, _), Hk = q.shape, compressed.shape[2]
    known = isinstance(lse, Tensor) and lse.is_floating_point() and lse.shape == (B, H, T) and lse.device == q.device
    if lse is not None and not known:
        due = f"must be a floating-point tensor (B, H, T) = ({B}, {H}, {T}) on {q.device}"
        raise InvalidInput(f"lse is {shown(lse)}; {due}")
    reason = refusal(q, Hk, sizes["length"], sizes["block_size"], sizes["stride"], sizes["count"])
    if reason is None and (transformed() or torch.compiler.is_compiling()):
        reason = "a transform of torch.func or a compiler sees the call; has neither"
    if way == "triton" and reason is not None:
        raise Unsupported(f"backend 'triton' cannot make this choice: {reason}")
    if way == "auto":
        warn_without_triton(q.is_cuda)
    if reason is None and way in ("auto", "triton"):
        lse = None if lse is None else lse.detach()
        return choose_in_kernel(q.detach(), compressed.detach(), S, scale=scale, lse=lse, **sizes)
    return _in_pieces(q, compressed, S, scale, way == "eager", **sizes)[0]


@follows_context()
@answers_with({"return_scores": "leave it out: the scores are always returned", "lse": "leave it out: scores are computed anew"})
def choose_blocks_with_scores(
    q: Tensor,  # (B, T, H, D)
    compressed: Tensor,  # (B, n, Hk, D)
    *,
    backend: str | None = None,
    block_size: int = 64,
    count: int = 16,
    first: int = 1,
    length: int = 32,
    local: int = 2,
    scale: float | None = None,
    stride: int = 16,
    tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `choose_blocks` in plain operations and also returns the scores (the kernel never holds them).

    Args:
        backend: "eager" is the definition, which holds all weights at once; "plain" computes in pieces, as None and "auto" do.
        q, compressed, block_size, count, first, length, local, scale, stride, tokens: as in `choose_blocks`.

    Returns:
        the blocks (B, T, Hk, count) int32, and the scores (B, T, Hk, blocks), fp32, before anything is always chosen.

    Example:
        >>> q, k = torch.randn(1, 256, 8, 64), torch.randn(1, 256, 2, 64)
        >>> chosen, scores = choose_blocks_with_scores(q, compress(k), count=4)
        >>> scores.shape
        torch.Size([1, 256, 2, 4])
    """
    q, compressed, S, scale, sizes = _checked(q, compressed, tokens, scale, length, stride, block_size, count, first, local)
    way = check_backend(backend, ("eager", "plain"))
    return _in_pieces(q, compressed, S, scale, way == "eager", **sizes)


def _checked(
    q: Tensor, compressed: Tensor, tokens: int | None, scale: float | None, length: int, stride: int, block_size: int, count: int,
    first: int, local: int,
) -> tuple[Tensor, Tensor, int, float, dict[str, int]]:  # fmt: skip
    """The tensors, the length of the text, the scale and the sizes of a choice."""
    q, compressed, _, _ = check_qkv(q, compressed, compressed)
    length, stride, block_size = check_lengths(length, stride, block_size)
    count, first, local = check_counts(count, first, local)
    S = q.shape[1] if tokens is None else check_count("tokens", tokens, 0)
    check_compressed(compressed, S, length, stride)
    sizes = {"length": length, "stride": stride, "block_size": block_size, "count": count, "first": first, "local": local}
    return q, compressed, S, check_scale(scale, q.shape[-1]), sizes


def _in_pieces(
    q: Tensor, compressed: Tensor, S: int, scale: float, eager: bool, *, length: int, stride: int, block_size: int, count: int,
    first: int, local: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The chosen blocks and all scores, in plain operations; `eager` is the definition, in one piece."""
    (B, T, H, _), Hk = q.shape, compressed.shape[2]
    blocks, group = -(-S // block_size), H // Hk
    seen = definition.sees_compressed(T, S, compressed.shape[1], length, stride, q.device)
    found, scores = [], []
    rows = max(T, 1) if eager else max(PIECE // max(4 * B * H * compressed.shape[1], 1), 1)
    with torch.no_grad(), as_given(q):
        for t in range(0, max(T, 1), rows):
            p = definition.weights(q[:, t : t + rows], compressed, seen[t : t + rows], scale)
            if eager:
                score = definition.block_scores(p, blocks, group, length, stride, block_size)
                found.append(definition.choose(score, S, block_size, count, first, local))
            else:
                score = scores_of_blocks(p, blocks, group, length, stride, block_size)
                found.append(_choose(score, t + S - T, block_size, count, first, local))
            scores.append(score)
    return torch.cat(found, 1), torch.cat(scores, 1)


def scores_of_blocks(p: Tensor, blocks: int, group: int, length: int, stride: int, block_size: int) -> Tensor:
    """Scores (B, T, Hk, blocks) from weights p (B, H, T, n): a convolution with the overlaps, in units of stride."""
    p = p.unflatten(1, (-1, group)).sum(2).transpose(1, 2)  # (B, T, Hk, n)
    ratio, back = block_size // stride, length // stride - 1
    # compressed key ratio j + d overlaps with block j by this many strides
    overlaps = torch.ones(ratio, dtype=p.dtype, device=p.device)
    overlaps = torch.nn.functional.pad(overlaps, (back, back)).unfold(0, back + 1, 1).sum(-1)
    need = ratio * blocks + back
    p = torch.nn.functional.pad(p, (back, max(need - back - p.shape[-1], 0)))[..., :need]
    if not blocks:
        return p.new_zeros(*p.shape[:-1], 0)
    return (p.unfold(-1, ratio + back, ratio) * overlaps).sum(-1)


def _choose(score: Tensor, start: int, block_size: int, count: int, first: int, local: int) -> Tensor:
    """The definition's choice for queries that begin at a place."""
    own = (torch.arange(score.shape[1], device=score.device) + start).div(block_size, rounding_mode="floor")
    return choose_from(score, own[:, None, None], count, first, local)


def choose_from(score: Tensor, own: Tensor, count: int, first: int, local: int) -> Tensor:
    """The definition's choice from scores (B, T, Hk, blocks), for queries in blocks `own`, (T, 1, 1) or (B, 1, 1, 1)."""
    blocks = score.shape[-1]
    j = torch.arange(blocks, device=score.device)
    score = score.masked_fill((j < first) | (j > own - local), torch.inf).masked_fill(j > own, -torch.inf)
    found = best(score, count)
    # none is the largest index, so that it is sorted to the end
    found = torch.where(score.gather(-1, found) == -torch.inf, blocks, found)
    found = torch.nn.functional.pad(found, (0, count - found.shape[-1]), value=blocks).sort(dim=-1).values
    return torch.where(found == blocks, -1, found).int()


@answers_foreign_words
def selected_attention(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    chosen: Tensor,  # (B, T, Hk, n)
    *,
    backend: str | None = None,
    block_size: int = 64,
    deterministic: bool | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of each query to the tokens of its chosen blocks, which the heads of a group share.

    Args:
        q: queries (B, T, H, D), the last T tokens of the text.
        k: keys (B, S, Hk, D).
        v: values (B, S, Hk, Dv).
        chosen: blocks (B, T, Hk, n) int32, in any order, -1 for none; a constant in the backward. One that is there twice counts
            once.
        backend: "eager" is the definition, "triton" the kernels, "plain" PyTorch's operations on the gathered keys of a few
            queries at a time; None or "auto" takes the kernels where they run.
        block_size: tokens per block; the last one may be short. The kernels have multiples of 16.
        deterministic: the kernels' gradients always have the same bits.
        scale: of the scores; 1 / sqrt(D) if None.

    Returns:
        o (B, T, H, Dv), contiguous, in the dtype of q; 0 for a query without blocks.

    With all blocks chosen this is causal attention, and with the own block alone attention under CAUSAL & Chunk(block_size):
    known answers of the tests.

    Example:
        >>> q, k, v = (torch.randn(1, 256, 8, 64) for _ in range(3))
        >>> selected_attention(q, k, v, choose_blocks(q, compress(k), count=4)).shape
        torch.Size([1, 256, 8, 64])
    """
    q, k, v, _ = check_qkv(q, k, v)
    block_size, scale = check_count("block_size", block_size), check_scale(scale, q.shape[-1])
    way = check_backend(backend, ("eager", "triton", "plain"))
    check_deterministic(deterministic)
    (B, T, H, _), (S, Hk) = q.shape, k.shape[1:3]
    chosen = check_indices("chosen", chosen, (B, T, Hk, None), f"(B, T, Hk, n) = ({B}, {T}, {Hk}, n)", q)
    check_range("chosen", chosen, max(-(-S // block_size), 0), -1)
    with as_given(q):
        if way == "eager":
            seen = definition.sees_selected(chosen, S, block_size, H // Hk)
            return pairs.attention(q, k, v, seen, scale=scale)[0].contiguous()
        return attend_selected(q, k, v, chosen.to(torch.int32), block_size=block_size, scale=scale, backend=way)[0]


def check_counts(count: Any, first: Any, local: Any) -> tuple[int, int, int]:
    """How many blocks are chosen, and how many always."""
    count, first, local = check_count("count", count), check_count("first", first, 0), check_count("local", local, 0)
    if count < first + local:
        raise InvalidInput(f"count is {count}; first + local is {first + local}, and count must be at least that")
    return count, first, local
