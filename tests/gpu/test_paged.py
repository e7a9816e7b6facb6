"""Attention to a paged cache on a GPU: the definition's answer, bits that know no neighbours, and no waiting for lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.exact.masks import Mask
from rooftile.kvcache import PagedKV, Pages

pytestmark = pytest.mark.gpu

MASKS = [rt.FULL, rt.CAUSAL, rt.CAUSAL & rt.Window(300), rt.Chunk(256) & rt.CAUSAL]


def cache_of(lengths: list[int], Hk: int, dim: int, size: int, dtype: torch.dtype = torch.bfloat16) -> PagedKV:
    """Blocks in random order; what is not written is NaN."""
    counts = [-(-n // size) for n in lengths]
    order = torch.randperm(sum(counts) + 2).int()
    k, v = (torch.randn(len(order), size, Hk, dim, device="cuda").to(dtype) for _ in range(2))
    table = torch.full((len(lengths), max(counts)), 10**6, dtype=torch.int32)
    start = 0
    for b, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        table[b, :count] = order[start : start + count]
        if n % size:
            k[table[b, count - 1], n % size :] = v[table[b, count - 1], n % size :] = torch.nan
        start += count
    return PagedKV(k, v, table.cuda(), torch.tensor(lengths, dtype=torch.int32, device="cuda"))


def assert_close(found: tuple[Tensor, Tensor], due: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(found[0], due[0], rtol=1.6e-2, atol=1e-2)
    torch.testing.assert_close(found[1], due[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("dim", "H", "Hk"), [(64, 8, 8), (128, 32, 8), (128, 71, 1), (256, 8, 4), (80, 4, 2)])
@pytest.mark.parametrize(("size", "T"), [(16, 1), (8, 4), (64, 200)])
def test_dense_queries(mask: Mask, dim: int, H: int, Hk: int, size: int, T: int) -> None:
    cache = cache_of([3000, 17, 1024, 0, 1], Hk, dim, size)
    q = torch.randn(5, T, H, dim, device="cuda").bfloat16()
    due = rt.attention_paged_with_lse(q, cache, mask, backend="eager")
    assert_close(rt.attention_paged_with_lse(q, cache, mask), due)


# around the ends of pages and of blocks, nothing at all, and many in a part of the work and many parts of one
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 3000, 0, 40_000, *range(20, 300, 7)]

DECODING = pytest.mark.parametrize(
    ("H", "Hk", "dim", "size", "mask", "options"),
    [
        *((32, 8, 128, size, rt.CAUSAL, {}) for size in (16, 32, 64, 256)),
        *((H, Hk, 64, size, rt.CAUSAL, {}) for H, Hk, size in ((2, 2, 16), (14, 2, 128), (64, 1, 16), (20, 2, 16))),
        *((32, 8, 128, 16, mask, {}) for mask in MASKS if mask != rt.CAUSAL),
        (32, 8, 128, 16, rt.CAUSAL & rt.Window(0), {}),
        (32, 8, 128, 16, rt.CAUSAL, {"softcap": 20.0, "scale": 0.3}),
        (32, 8, 64, 16, rt.CAUSAL & rt.Window(99), {"sinks": True}),
    ],
    ids=str,
)


@pytest.mark.parametrize("by", ["hopper", "triton"])
@DECODING
def test_decoding(by: str, H: int, Hk: int, dim: int, size: int, mask: Mask, options: dict[str, Any]) -> None:
    """One token per sequence, without synchronisation; NaN in unwritten slots has no effect, and repeated calls are bit-equal."""
    if by == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    cache = cache_of(LENGTHS, Hk, dim, size)
    q = torch.randn(len(LENGTHS), 1, H, dim, device="cuda").bfloat16()
    if "sinks" in options:
        options = {"sinks": torch.randn(H, device="cuda")}
    found = rt.attention_paged_with_lse(q, cache, mask, backend=by, **options)
    assert_close(found, rt.attention_paged_with_lse(q, cache, mask, backend="eager", **options))
    for _ in range(3):
        again = rt.attention_paged_with_lse(q, cache, mask, backend=by, **options)
        assert torch.equal(again[0], found[0])
        assert torch.equal(again[1], found[1])


def in_fp8(cache: PagedKV) -> PagedKV:
    """The same in FP8, with scales; what is NaN stays so, and its scales are NaN too."""

    def coded(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.float().abs().amax(-1).clamp_min(1e-12) / 448
        return (x.float() / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale

    (k, k_scale), (v, v_scale) = coded(cache.k), coded(cache.v)
    return PagedKV(k, v, cache.table, cache.lengths, None, k_scale, v_scale)


def forget(cache: PagedKV, seen: int) -> None:
    """NaN in codes and scales of all but the last keys of each sequence."""
    size = cache.k.shape[1]
    for b, length in enumerate(cache.lengths.tolist()):
        j = torch.arange(max(length - seen, 0), device=cache.k.device)
        slots = cache.table[b, j // size] * size + j % size
        for codes in (cache.k, cache.v):
            codes.view(torch.uint8).flatten(0, 1)[slots] = 0x7F
        for scales in (cache.k_scale, cache.v_scale):
            assert scales is not None
            scales.flatten(0, 1)[slots] = torch.nan


@pytest.mark.parametrize("by", ["hopper", "triton"])
@DECODING
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decoding_from_a_cache_in_fp8(
    by: str, H: int, Hk: int, dim: int, size: int, mask: Mask, options: dict[str, Any], dtype: torch.dtype
) -> None:  # fmt: skip
    """Values a thousand times larger in some tokens than in others, and numbers of a query too: nothing small is lost.

    What a window hides is NaN, scales too.
    """
    if torch.cuda.get_device_capability() < (8, 9) or (by == "hopper" and torch.cuda.get_device_capability() != (9, 0)):
        pytest.skip("no FP8 here, or no Hopper")
    plain = cache_of(LENGTHS, Hk, dim, size, torch.float32)
    spread = 10 ** torch.empty(plain.v.shape[:3], device="cuda").uniform_(-1.5, 1.5)
    cache = in_fp8(PagedKV(plain.k, plain.v * spread.unsqueeze(-1), plain.table, plain.lengths))
    q = torch.randn(len(LENGTHS), 1, H, dim, device="cuda") * 10 ** torch.empty(dim, device="cuda").uniform_(-6, 0)
    q = (q * 3).to(dtype)
    if "sinks" in options:
        options = {"sinks": torch.randn(H, device="cuda")}
    # in fp32, which rounds no key that is times its scale
    due = rt.attention_paged_with_lse(q.float(), cache, mask, backend="eager", **options)
    if mask.left is not None:
        forget(cache, mask.left + 1)
    found = rt.attention_paged_with_lse(q, cache, mask, backend=by, **options)
    assert found[0].dtype == dtype
    # a weight has 8 bits or more
    largest = due[0].abs().amax(-1, keepdim=True)
    assert ((found[0] - due[0]).abs() <= 1e-2 * largest + 1e-6).all()
    torch.testing.assert_close(found[1], due[1], rtol=1e-4, atol=1e-3)
    for _ in range(3):
        again = rt.attention_paged_with_lse(q, cache, mask, backend=by, **options)
        assert torch.equal(again[0], found[0])
        assert torch.equal(again[1], found[1])


@pytest.mark.parametrize("by", ["hopper", "triton"])
def test_a_scale_that_fp16_has_no_number_for(by: str) -> None:
    """Though it has one for each value."""
    if torch.cuda.get_device_capability() < (8, 9) or (by == "hopper" and torch.cuda.get_device_capability() != (9, 0)):
        pytest.skip("no FP8 here, or no Hopper")
    cache = in_fp8(cache_of([300, 17, 3000], 2, 128, 16, torch.float32))
    small = (cache.v.float() / 2048).to(torch.float8_e4m3fn)
    cache = replace(cache, v=small, v_scale=cache.v_scale * 0 + 1e5)
    q = torch.randn(3, 1, 8, 128, device="cuda").half()
    due = rt.attention_paged(q.float(), cache, rt.CAUSAL, backend="eager")
    found = rt.attention_paged(q, cache, rt.CAUSAL, backend=by)
    assert due.abs().max() > 1e3
    assert ((found - due).abs() <= 1e-2 * due.abs().amax(-1, keepdim=True)).all()


def test_decoding_goes_by_the_kernel_of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that TMA cannot read are gathered; several queries per sequence run in the portable kernel."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    from rooftile.exact.backends.triton import paged_decode, paged_fwd

    cache = cache_of([300, 20], 2, 128, 16)
    q = torch.randn(2, 2, 8, 128, device="cuda").bfloat16()
    due = rt.attention_paged_with_lse(q[:, :1], cache, rt.CAUSAL, backend="eager")
    called: list[str] = []
    for module in (paged_decode, paged_fwd):
        name = module.__name__
        monkeypatch.setattr(module, "attend", lambda *a, name=name, attend=module.attend: (called.append(name), attend(*a))[1])
    assert_close(rt.attention_paged_with_lse(q[:, :1], cache, rt.CAUSAL), due)
    assert not called
    # keys that do not begin at a multiple of 16 bytes
    k, v = (torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x).copy_(x) for x in (cache.k, cache.v))
    assert_close(rt.attention_paged_with_lse(q[:, :1], PagedKV(k, v, cache.table, cache.lengths), rt.CAUSAL), due)
    assert not called
    coded = in_fp8(cache)
    due = rt.attention_paged_with_lse(q[:, :1], coded, rt.CAUSAL, backend="eager")
    assert_near(rt.attention_paged_with_lse(q[:, :1], coded, rt.CAUSAL), due)
    assert not called
    rt.attention_paged(q, cache, rt.CAUSAL)
    assert len(called) == 1


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_packed_queries_without_waiting() -> None:
    cache = cache_of([3000, 17, 1024, 0, 1], 2, 128, 16)
    counts = torch.tensor([0, 200, 1, 1, 0, 1]).cumsum(0).int().cuda()
    cache = PagedKV(cache.k, cache.v, cache.table, cache.lengths, counts)
    q = torch.randn(203, 8, 128, device="cuda").bfloat16()
    rt.attention_paged(q, cache, rt.CAUSAL)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        found = rt.attention_paged_with_lse(q, cache, rt.CAUSAL)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(found, rt.attention_paged_with_lse(q, cache, rt.CAUSAL, backend="eager"))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_shared_prefix_without_waiting() -> None:
    cache = cache_of([2300, 2060, 2048 + 77, 2050], 8, 128, 16)
    table = cache.table.clone()
    table[:, :128] = table[0, :128]
    cache = PagedKV(cache.k, cache.v, table, cache.lengths)
    q = torch.randn(4, 2, 32, 128, device="cuda").bfloat16()
    rt.attention_paged(q, cache, rt.CAUSAL, shared_prefix=2048)
    try:
        torch.cuda.set_sync_debug_mode("error")
        found = rt.attention_paged_with_lse(q, cache, rt.CAUSAL, shared_prefix=2048)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(found, rt.attention_paged_with_lse(q, cache, rt.CAUSAL, backend="eager"))


def test_bits_do_not_depend_on_the_batch() -> None:
    """Alone a sequence's chunks go to programs of their own; among a hundred others they do not."""
    lengths = [5000, 3000, *[700] * 120]
    cache = cache_of(lengths, 8, 128, 16)
    q = torch.randn(len(lengths), 1, 32, 128, device="cuda").bfloat16()
    together = rt.attention_paged(q, cache, rt.CAUSAL, deterministic=True)
    for b in (0, 1, 50):
        one = PagedKV(cache.k, cache.v, cache.table[b : b + 1], cache.lengths[b : b + 1])
        assert torch.equal(rt.attention_paged(q[b : b + 1], one, rt.CAUSAL, deterministic=True)[0], together[b])


@pytest.mark.parametrize(
    ("mask", "dim", "size"),
    [
        *((rt.CAUSAL, dim, size) for dim, size in ((128, 8), (128, 16), (128, 64), (128, 256), (64, 16), (96, 32), (256, 16))),
        *((mask, dim, size) for mask in MASKS if mask != rt.CAUSAL for dim, size in ((128, 16), (64, 128))),
    ],
    ids=str,
)
def test_prompts_go_by_the_kernels_of_hopper(mask: Mask, dim: int, size: int) -> None:
    """Read in place, or gathered without waiting; a NaN in what nobody wrote harms nobody."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    cache = cache_of([3000, 170, 1024, 1, 512], 2, dim, size)
    counts = torch.tensor([0, 300, 170, 24, 1, 512]).cumsum(0).int().cuda()
    cache = PagedKV(cache.k, cache.v, cache.table, cache.lengths, counts)
    q = torch.randn(1007, 8, dim, device="cuda").bfloat16()
    torch.empty(1 << 28, device="cuda").fill_(torch.nan)
    found = rt.attention_paged_with_lse(q, cache, mask, backend="hopper")
    assert_close(found, rt.attention_paged_with_lse(q, cache, mask, backend="eager"))
    assert_close(found, rt.attention_paged_with_lse(q, cache, mask))


def test_long_prompts_go_by_the_kernels_of_hopper() -> None:
    """Small pages are gathered; the heads of a group have separate tiles."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    for size in (16, 128):
        cache = cache_of([9000, 8500], 1, 128, size)
        counts = torch.tensor([0, 8800, 8300]).cumsum(0).int().cuda()
        cache = PagedKV(cache.k, cache.v, cache.table, cache.lengths, counts)
        q = torch.randn(17100, 4, 128, device="cuda").bfloat16()
        found = rt.attention_paged_with_lse(q, cache, rt.CAUSAL, backend="hopper")
        assert_close(found, rt.attention_paged_with_lse(q, cache, rt.CAUSAL, backend="triton"))


@pytest.mark.parametrize(("size", "coded"), [(16, False), (16, True), (8, False)])
def test_prompts_of_all_lengths_have_the_same_kernels(size: int, coded: bool) -> None:
    """A server meets every length, and a kernel takes seconds to compile."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    from rooftile.exact.backends.hopper.flash_fwd import launch_forward

    def read(lengths: list[int]) -> int:
        cache = cache_of(lengths, 2, 64, size)
        cache = in_fp8(cache) if coded else cache
        counts = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
        q = torch.randn(sum(lengths), 8, 64, device="cuda").bfloat16()
        rt.attention_paged(q, replace(cache, cu_q=counts), rt.CAUSAL, backend="hopper")
        return launch_forward._kernel.cache_info().currsize

    known = read([9000]), read([70])
    assert [read(lengths) for lengths in ([600], [4000], [9000, 9000], [80] * 50, [200, 6000])] == [known[1]] * 5


def test_a_captured_graph_sees_new_lengths() -> None:
    cache = cache_of([900, 40], 2, 64, 16)
    q = torch.randn(2, 1, 4, 64, device="cuda").bfloat16()
    rt.attention_paged(q, cache, rt.CAUSAL)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = rt.attention_paged(q, cache, rt.CAUSAL)
    cache.lengths.copy_(torch.tensor([130, 33], dtype=torch.int32))
    graph.replay()
    assert_close((o, cache.lengths), (rt.attention_paged(q, cache, rt.CAUSAL, backend="eager"), cache.lengths))


def assert_near(found: tuple[Tensor, Tensor], due: tuple[Tensor, Tensor]) -> None:
    """The definition rounds a key to 16 bits once it is times its scale; a kernel gives the scale to the score."""
    torch.testing.assert_close(found[0], due[0], rtol=1.6e-2, atol=1e-2)
    torch.testing.assert_close(found[1], due[1], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_a_cache_in_fp8(mask: Mask, dim: int) -> None:
    """Written by the kernel; read in every way there is."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 here")
    lengths = [3000, 17, 1024, 700]
    plain = cache_of(lengths, 2, dim, 16)
    pages = Pages(plain.k.shape[0], layers=2, heads=2, dim=dim, dtype=torch.float8_e4m3fn, device="cuda")
    slots = torch.arange(plain.k.shape[0] * 16, device="cuda")
    k, v = (torch.nan_to_num(x).flatten(0, 1) for x in (plain.k, plain.v))
    pages.write(1, k, v, slots)
    cache = pages.view(1, plain.table, plain.lengths)
    q = torch.randn(4, 2, 8, dim, device="cuda").bfloat16()
    due = rt.attention_paged_with_lse(q, cache, mask, backend="eager")
    for deterministic in (False, True):
        assert_near(rt.attention_paged_with_lse(q, cache, mask, deterministic=deterministic), due)
    counts = torch.tensor([0, 500, 517, 617, 717], dtype=torch.int32, device="cuda")
    rows = torch.randn(717, 8, dim, device="cuda").bfloat16()
    packed = pages.view(1, plain.table, plain.lengths, counts)
    due = rt.attention_paged_with_lse(rows, packed, mask, backend="eager")
    assert_near(rt.attention_paged_with_lse(rows, packed, mask), due)
