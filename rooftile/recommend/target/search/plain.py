"""Searches in plain operations: the scores of a tile of candidates at a time, and the k largest of each."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.recommend.target.problem import Batch
from rooftile.recommend.target.search.problem import Search
from rooftile.recommend.target.search.simhash import differing_bits
from rooftile.recommend.target.tiled import scores
from rooftile.recommend.target.tiles import Tile, put, take, tiles

HIDDEN = torch.iinfo(torch.int64).min


def search(given: Search) -> Tensor:
    """Returns the events that are chosen, (total_q, 1|H, k) int32: places in the user's history, the best first, -1 for none."""
    q, keys = given.q, given.keys
    found = torch.full((q.shape[0], given.heads, given.k), -1, dtype=torch.int32, device=q.device)
    # words of hashes are compared bit by bit in copies of all pairs
    heads = q.shape[1] * (q.shape[2] if given.kind == "lsh" else 1)
    for tile in tiles(given.cu_q, given.cu, heads, keys.shape[1] * keys.shape[2], given.deterministic):
        ranks = _ranks(given, tile)
        ranks = torch.where(tile.keys.there[:, None, None], ranks, HIDDEN)
        best = ranks.topk(min(given.k, ranks.shape[-1]), -1).values
        places = torch.where(best == HIDDEN, -1, best & 0xFFFFFFFF).int()
        put(found[..., : places.shape[-1]], tile.rows, places)
    return found


def _ranks(given: Search, tile: Tile) -> Tensor:
    """A number for each pair, (G, 1|H, R, S) int64, that rises with the score, and among equal scores with the place."""
    place = torch.arange(tile.keys.at.shape[1], device=given.q.device)
    if given.kind == "exact":
        batch = Batch(given.q, given.keys, given.keys, given.bias, None, given.cu_q, given.cu)
        x, _ = scores(batch, tile, given.scale)
        x = x if given.per_head else x.sum(1, keepdim=True)
        high = _order_of_wide(x) if x.dtype == torch.float64 else _order_of(x)
        hidden = x.isneginf()
    else:
        q = take(given.q, tile.rows, given.q.dtype)  # (G, H, R, W)
        keys = take(given.keys, tile.keys, given.keys.dtype)
        if given.kind == "category":
            high, hidden = torch.zeros((), dtype=torch.int64, device=q.device), q != keys.mT
        else:
            keys = keys.repeat_interleave(q.shape[1] // keys.shape[1], 1)
            differ = differing_bits(q[:, :, :, None], keys[:, :, None]).long()
            high, hidden = -(differ if given.per_head else differ.sum(1, keepdim=True)), torch.tensor(False, device=q.device)
    return torch.where(hidden, HIDDEN, (high << 32) | place)


def _order_of(x: Tensor) -> Tensor:
    """Integers in the order of fp32 numbers; zeros are equal, and NaN is the largest, as torch.topk has it."""
    bits = (torch.where(x.isnan(), torch.nan, x) + 0.0).contiguous().view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def _order_of_wide(x: Tensor) -> Tensor:
    """Ranks of fp64 numbers along the last axis; equal numbers have one."""
    values, order = x.sort(-1)
    steps = torch.zeros_like(order)
    equal = (values[..., 1:] == values[..., :-1]) | values[..., :-1].isnan()
    steps[..., 1:] = (~equal).cumsum(-1)
    return torch.empty_like(order).scatter_(-1, order, steps)
