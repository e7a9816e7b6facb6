"""Gradients that another backend has spoiled are computed once more, if it says so."""

from __future__ import annotations

import pytest
import torch

from rooftile.exact import reference
from rooftile.exact.backends import triton
from rooftile.exact.backends.triton import row_stats
from rooftile.exact.backends.triton.call import call_of, strides_of
from rooftile.exact.backends.triton.tiles import backward_kv_walks
from rooftile.exact.blocks import Blocks, packed
from rooftile.exact.masks import CAUSAL
from rooftile.exact.spec import Options, Spec


@pytest.mark.parametrize(
    ("shape", "dim", "layout"),
    [((2, 70, 4, 2), 16, "packed"), ((1, 33, 2, 2), 16, "dense"), ((2, 20, 2, 1), 80, "dense"), ((1, 20, 2, 1), 80, "packed")],
)
def test_only_what_is_lost_is_computed_again(shape: tuple[int, int, int, int], dim: int, layout: str) -> None:
    B, T, H, Hk = shape
    q, do = torch.randn(B, T, H, dim), torch.randn(B, T, H, dim)
    k, v = torch.randn(B, T, Hk, dim), torch.randn(B, T, Hk, dim)
    due = reference.gradients(do.double(), torch.zeros(B, H, T), q.double(), k.double(), v.double(), CAUSAL, scale=0.25)[:3]
    spec = Spec(dtype=torch.float32, dim=dim, dim_v=dim, group=H // Hk, mask=CAUSAL, scale=0.25, needs_grad=True, layout=layout)
    # a head dim above 64 in fp32 has a walk for dk and another for dv
    assert len(backward_kv_walks(spec)) == 1 + (dim > 64)
    options = Options()
    if layout == "packed":
        offsets = torch.arange(B + 1, dtype=torch.int32) * T
        options = Options(cu_q=offsets, cu_k=offsets)
        q, k, v, do, *due = (x.flatten(0, 1) for x in (q, k, v, do, *due))
    o, lse = triton.forward(q, k, v, options, spec)
    call = call_of(q, k, v, options, spec)
    _, words, rests = row_stats.plan(call, strides_of(o), strides_of(do), has_dlse=False)(o, do, lse, None)
    repair = triton.repair(q, k, v, do, options, spec)
    offsets = words if options.cu_q is None else options.cu_q
    for _ in range(2):
        grads = [torch.full_like(x, 7.0) for x in (q, k, v)]
        repair(torch.tensor([0, 0, 0], dtype=torch.int32), q, k, v, do, words, rests, *grads, offsets, offsets, q, q)
        assert all((x == 7.0).all() for x in grads)
        repair(torch.tensor([1, 0, 0], dtype=torch.int32), q, k, v, do, words, rests, *grads, offsets, offsets, q, q)
        for x, y in zip(grads, due, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("part", [0, 1])
def test_lists_of_blocks_and_their_bits_are_followed(layout: str, part: int) -> None:
    B, T, H, dim = (2, 140, 4, 16) if layout == "dense" else (1, 140, 4, 16)
    q, do = torch.randn(B, T, H, dim), torch.randn(B, T, H, dim)
    k, v = torch.randn(B, T, 2, dim), torch.randn(B, T, 2, dim)
    # packed: a place for each block that a sequence of 140 may begin
    blocks = Blocks.from_dense(torch.rand(1, 4, 3, 3) < 0.7, (64, 64))
    if part:
        bits = packed(torch.rand(*blocks.counts.shape, part, 64, 64) < 0.7)
        blocks = Blocks(blocks.counts, blocks.indices, blocks.block_size, bits)
    seen = blocks.pairs(T, T).expand(B, -1, -1, -1)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    due, _ = reference.attention(*leaves, CAUSAL, scale=0.25, seen=seen)
    due = torch.autograd.grad(due, leaves, do.double())
    spec = Spec(
        dtype=torch.float32, dim=dim, dim_v=dim, group=2, mask=CAUSAL, scale=0.25, needs_grad=True, layout=layout,
        block_size=(64, 64), has_bits=bool(part),
    )  # fmt: skip
    keys = blocks.transposed(3)
    options = Options(
        block_counts=blocks.counts, block_indices=blocks.indices, block_bits=blocks.bits, key_counts=keys.counts,
        key_entries=keys.entries.contiguous(),
    )  # fmt: skip
    if layout == "packed":
        offsets = torch.tensor([0, T], dtype=torch.int32)
        options = options._replace(cu_q=offsets, cu_k=offsets)
        q, k, v, do, *due = (x.flatten(0, 1) for x in (q, k, v, do, *due))
    o, lse = triton.forward(q, k, v, options, spec)
    call = call_of(q, k, v, options, spec)
    _, words, rests = row_stats.plan(call, strides_of(o), strides_of(do), has_dlse=False)(o, do, lse, None)
    repair = triton.repair(q, k, v, do, options, spec)
    lists = (options.block_counts, options.block_indices, options.key_counts, options.key_entries, options.block_bits)
    grads = [torch.full_like(x, 7.0) for x in (q, k, v)]
    offsets = words if options.cu_q is None else options.cu_q
    repair(torch.tensor([1, 0, 0], dtype=torch.int32), q, k, v, do, words, rests, *grads, offsets, offsets, q, lists)
    for x, y in zip(grads, due, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5)
