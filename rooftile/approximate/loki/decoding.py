"""Loki by pages on a paged cache: scores in the leading dimensions choose pages, and the exact kernel reads only those.

    x_j = scale q'_{1..r} . k'_j,{1..r}        the leading dims of the keys have blocks of their own
    score of a page = sum over its keys j, and the heads of a group, of softmax(x)_j
    chosen: the last page, and the best of the others: ceil(keep S) keys in whole pages, per sequence and key head

Every choice has the shape of the whole block table, so no length is read from the device, and a CUDA graph can hold it. A key
head is a sequence of its own to the exact kernel, since each has its own pages.

Singhania et al., Loki, arXiv:2406.02542.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooftile.approximate.chosen_arguments import as_given
from rooftile.approximate.gathered.pairs import best
from rooftile.approximate.gathered.pieces import in_pieces
from rooftile.exact import api
from rooftile.exact.masks import CAUSAL
from rooftile.exact.spec import CallSettings
from rooftile.kvcache import PagedKV
from rooftile.runtime.devices import runs_kernels
from rooftile.runtime.operators import call, define


def decode(q: Tensor, cache: PagedKV, leading: Tensor, *, keep: float, settings: CallSettings) -> Tensor:
    """Attention of one query per sequence to the pages that its leading dimensions choose.

    Args:
        q: queries (B, H, D), turned by each layer's rotation as the cached keys are.
        cache: a layer's turned keys, and its values; their blocks have the strides of `Pages`.
        leading: the leading dims of the keys, (P, size, Hk, r).
        keep: share of the keys that are read, in whole pages.
        settings: scale, softcap and backend.

    Returns:
        o (B, H, D).
    """
    assert settings.scale is not None
    scores = page_scores(q, leading, cache.table, cache.lengths, scale=settings.scale, softcap=settings.softcap)
    pages, lengths = choose(scores, cache.lengths, size=cache.size, keep=keep)
    return attend(q, cache, pages, lengths, settings)


def page_scores(q: Tensor, leading: Tensor, table: Tensor, lengths: Tensor, *, scale: float, softcap: float | None) -> Tensor:
    """Returns the scores of pages (B, Hk, N), fp32; 0 for a page past the end of its sequence."""
    found: Tensor = call(_PAGE_SCORES, _page_scores, q, leading, table, lengths, scale, softcap)
    return found


def _page_scores(
    q: Tensor, leading: Tensor, table: Tensor, lengths: Tensor, scale: float, softcap: float | None
) -> Tensor:  # fmt: skip
    if runs_kernels(leading):
        from rooftile.approximate.loki import decoding_kernels as kernels

        return kernels.page_scores(q, leading, table, lengths, scale, softcap)
    size, Hk, r = leading.shape[1:]
    parts = in_pieces(q.shape[0], 4 * table.shape[1] * size * (Hk * r + q.shape[1]))
    found = [scores_as_defined(q[one], leading, table[one], lengths[one], scale, softcap) for one in parts]
    return torch.cat(found) if found else q.new_zeros(0, Hk, table.shape[1], dtype=torch.float32)


@torch.no_grad()
def scores_as_defined(
    q: Tensor, leading: Tensor, table: Tensor, lengths: Tensor, scale: float, softcap: float | None
) -> Tensor:  # fmt: skip
    """Computes `page_scores` in plain operations."""
    size, Hk, r = leading.shape[1:]
    N = table.shape[1]
    with as_given(q):
        # entries past a sequence's end may name no block
        there = torch.arange(N, device=q.device) * size < lengths[:, None]
        k = leading[torch.where(there, table, 0)].flatten(1, 2).float()  # (B, N size, Hk, r)
        x = torch.einsum("bhgr,bshr->bhgs", q[..., :r].float().unflatten(1, (Hk, -1)), k) * scale
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    seen = torch.arange(N * size, device=q.device) < lengths[:, None]
    p = torch.softmax(x.masked_fill(~seen[:, None, None], -math.inf), dim=-1)
    # a row that pads a step has no keys
    p = torch.where(lengths[:, None, None, None] > 0, p, 0.0)
    return p.unflatten(-1, (N, size)).sum((2, 4))


def choose(scores: Tensor, lengths: Tensor, *, size: int, keep: float) -> tuple[Tensor, Tensor]:
    """Chooses pages by their scores (B, Hk, N); ties go to the lower page, and the last page is always chosen.

    Returns:
        The chosen pages (B, Hk, n) int32, rising; pages after a sequence's last one are N. And how many keys they hold, (B,)
        int32.
    """
    N = scores.shape[-1]
    counts, pages = counts_of(lengths, size, keep)
    most = max(-(-max(math.ceil(keep * N * size), 1) // size), 1)
    chosen: Tensor = call(_CHOOSE_PAGES, _choose_pages, scores, counts, pages, min(most, N))
    short = pages * size - lengths
    return chosen, (counts * size - short).clamp(min=0).int()


def counts_of(lengths: Tensor, size: int, keep: float) -> tuple[Tensor, Tensor]:
    """Returns how many pages sequences of `lengths` (B,) keep, and how many they have, (B,) int32 each."""
    lengths = lengths.long()
    pages = -(-lengths // size)
    # in fp64 the product is rounded as `Loki.choose` rounds it on the host
    keys = torch.ceil(lengths.double() * keep).long()
    return torch.minimum(-(-keys.clamp(min=1) // size), pages).int(), pages.int()


def _choose_pages(scores: Tensor, counts: Tensor, pages: Tensor, most: int) -> Tensor:
    if runs_kernels(scores):
        from rooftile.approximate.loki import decoding_kernels as kernels

        if scores.shape[-1] <= kernels.MOST_PAGES:
            return kernels.choose(scores, counts, pages, most)
    return chosen_as_defined(scores, counts, pages, most)


@torch.no_grad()
def chosen_as_defined(scores: Tensor, counts: Tensor, pages: Tensor, most: int) -> Tensor:
    """Chooses, in plain operations, `counts` (B,) of the first `pages` (B,) pages by their scores (B, Hk, N)."""
    N = scores.shape[-1]
    number = torch.arange(N, device=scores.device)
    last, past = number == pages[:, None] - 1, number >= pages[:, None]
    scores = scores.masked_fill(last[:, None], math.inf).masked_fill(past[:, None], -math.inf)
    chosen = best(scores, most)
    beyond = torch.arange(most, device=scores.device) >= counts[:, None]
    return torch.where(beyond[:, None], N, chosen).sort(dim=-1).values.int()


def attend(q: Tensor, cache: PagedKV, pages: Tensor, lengths: Tensor, settings: CallSettings) -> Tensor:
    """Exact attention of q (B, H, D) to chosen pages (B, Hk, n) that hold `lengths` keys (B,)."""
    B, Hk, n = pages.shape
    places = pages.clamp(max=cache.table.shape[1] - 1).flatten(1).long()
    blocks = cache.table.gather(1, places).view(B, Hk, n).long()
    # entries past the chosen pages may name no block, and are not read
    blocks = torch.where(pages < cache.table.shape[1], blocks, 0)
    k, v = (_by_head(x) for x in (cache.k, cache.v))
    step = cache.k.stride(0) // cache.k.shape[3]
    table = blocks * step + torch.arange(Hk, device=q.device)[:, None]
    own = PagedKV(k, v, table.flatten(0, 1).int(), lengths[:, None].expand(B, Hk).flatten())
    rows = q.reshape(B * Hk, 1, q.shape[1] // Hk, q.shape[2])
    o, _ = api.prepare_paged(rows, own, CAUSAL, settings=settings)(rows, own)
    return o.view(B, q.shape[1], -1)


def _by_head(x: Tensor) -> Tensor:
    """Views blocks (P, size, Hk, D) as blocks (n, size, 1, D) that overlap: head h of block p begins at row p step + h."""
    P, size, Hk, D = x.shape
    step = x.stride(0) // D
    return x.as_strided(((P - 1) * step + Hk, size, 1, D), (D, x.stride(1), D, 1))


_CHOOSE_PAGES = define(
    "choose_pages(Tensor scores, Tensor counts, Tensor pages, int most) -> Tensor", _choose_pages,
    lambda scores, counts, pages, most: scores.new_empty(*scores.shape[:2], most, dtype=torch.int32),
)  # fmt: skip
_PAGE_SCORES = define(
    "page_scores(Tensor q, Tensor leading, Tensor table, Tensor lengths, float scale, float? softcap) -> Tensor",
    _page_scores,
    lambda q, leading, table, *others: q.new_empty(q.shape[0], leading.shape[2], table.shape[1], dtype=torch.float32),
)
