"""Triton kernels of attention between gathered rows.

A program owns a tile of rows of one group, reads the places of its rows and of the group's other side from the lists, and loads
rows of q, k and v where they lie. Which pairs are seen, and N_ij, follow from places and ranks: no table of pairs is stored.

    X = scale Q K_j^T          -inf where the pair is hidden
    P = exp(X - L) / N         O += P V_j;  dP = dO V_j^T;  dQ += P (dP - D) K_j

Each round, or cluster, writes its own part of o, dq, dk and dv, at the row's place or position; the parts are added in one order.
So every sum has one owner and one order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.approximate.gathered.kernels import gradients, outputs, sums
from rooftile.approximate.gathered.lists import RowLists, slots_of

Results = tuple[Tensor, Tensor, Tensor]


def forward(q: Tensor, k: Tensor, v: Tensor, lists: RowLists, scale: float) -> Results:
    """Returns o (B, T, H, Dv), and lse and outputs for the backward: see `attention.attend`."""
    parts, lse = outputs.forward(q, k, v, lists, scale)
    if not lists.joins:
        return sums.add_slots(parts, slots_of(lists.rows[0], q.shape[1]), q, v.shape[-1], mean=True), lse, parts
    if parts.shape[0] == 1:
        return parts[0], lse[0], parts.new_empty(0)
    return *sums.join(parts, lse, v), parts.new_empty(0)


def backward(do: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, lists: RowLists, scale: float) -> Results:
    """Returns dq, dk and dv from contiguous do, and o and lse as `gradients.backward` takes them."""
    if lists.joins:
        dq, dk, dv = gradients.backward(do, o, lse, q, k, v, lists, scale)
        return sums.add_rounds(dq, q), sums.add_rounds(dk, k), sums.add_rounds(dv, v, do, lse)
    of_rows, of_keys = slots_of(lists.rows[0], q.shape[1]), slots_of(lists.keys[0], k.shape[1])
    # each of a row's groups has an equal share
    counts = of_rows.starts.diff().clamp(min=1).transpose(1, 2)[..., None]
    dq, dk, dv = gradients.backward((do / counts).to(torch.promote_types(do.dtype, q.dtype)), o, lse, q, k, v, lists, scale)
    D, Dv = q.shape[-1], v.shape[-1]
    return sums.add_slots(dq, of_rows, q, D), sums.add_slots(dk, of_keys, k, D), sums.add_slots(dv, of_keys, v, Dv)
