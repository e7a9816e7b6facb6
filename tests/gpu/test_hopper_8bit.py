"""Attention in 8 bits on Hopper: the recipe's integers bit for bit, and the definition's output."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.exact.backends.hopper import DIMS_8BIT
from rooftile.exact.masks import Mask
from rooftile.numerics import QuantisedQKV
from rooftile.numerics.recipe import part_of_rows
from tests.columns import columns_of

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

MASKS = [rt.FULL, rt.CAUSAL, rt.CAUSAL & rt.Window(300), rt.Window(100, 7), rt.Chunk(90)]
RECIPES = {
    "fp8": rt.Precision(),
    "int8": rt.Precision(qk="int8"),
    "fp8, plain": rt.Precision(incoherent=False, smooth_k=False),
    "int8, not smoothed": rt.Precision(qk="int8", smooth_k=False),
}
recipes = pytest.mark.parametrize("precision", RECIPES.values(), ids=RECIPES)
dims = pytest.mark.parametrize("dim", [dim for dim, _ in DIMS_8BIT])


def inputs(B: int, T: int, S: int, H: int, Hk: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """Some outliers, and keys that share something."""
    made = []
    for n, h in ((T, H), (S, Hk), (S, Hk)):
        rare = torch.rand(B, n, h, dim, device="cuda") < 1e-3
        made.append(torch.randn(B, n, h, dim, device="cuda") + 10 * torch.randn(B, n, h, dim, device="cuda") * rare)
    made[1] += 2 * torch.randn(Hk, dim, device="cuda")
    return tuple(x.to(dtype) for x in made)


def offsets() -> tuple[Tensor, Tensor]:
    """Lengths of packed queries and keys: ragged, short, empty, whole blocks, and more keys than the mean key uses."""
    lengths = [(130, 200), (1, 5), (0, 7), (300, 300), (128, 256), (4, 2100)]
    cu_q, cu_k = (torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32) for n in zip(*lengths, strict=True))
    return cu_q, cu_k


def same(found: QuantisedQKV, due: QuantisedQKV) -> None:
    for name in ("q", "k"):
        a, b = getattr(found, name).cpu(), getattr(due, name).cpu()
        assert torch.equal(a.view(torch.int8), b.view(torch.int8)), name
    # parts that hold a row; packed ones may hold none
    for name, x, cu in (("q", due.q, due.cu_q), ("k", due.k, due.cu_k), ("v", due.v, due.cu_k)):
        used = part_of_rows(x, "block", cu)[0].unique().cpu()
        a, b = getattr(found, f"{name}_scales").cpu(), getattr(due, f"{name}_scales").cpu()
        assert torch.equal(a[used], b[used]), name
    columns = columns_of(due.v, due.cu_k).cpu().view(torch.int8)
    filled = columns_of(torch.ones_like(due.v.float()).to(torch.float8_e4m3fn), due.cu_k).cpu().view(torch.int8) != 0
    assert torch.equal(found.v.cpu().view(torch.int8)[filled], columns[filled])
    assert (found.shift is None) == (due.shift is None)
    if due.shift is not None:
        torch.testing.assert_close(found.shift.cpu(), due.shift.cpu(), rtol=1e-5, atol=1e-4)


@recipes
@dims
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("T", "S"), [(1, 300), (256, 256), (1153, 641), (40, 3100)])
def test_integers_are_those_of_the_cpu(precision: rt.Precision, dim: int, dtype: torch.dtype, T: int, S: int) -> None:
    q, k, v = inputs(2, T, S, 4, 2, dim, dtype)
    found = rt.quantise_qkv(q, k, v, precision, backend="hopper")
    same(found, rt.quantise_qkv(q.cpu(), k.cpu(), v.cpu(), precision))


@recipes
@dims
def test_packed_integers_are_those_of_the_cpu(precision: rt.Precision, dim: int) -> None:
    cu_q, cu_k = offsets()
    q, k, v = (x[0] for x in inputs(1, int(cu_q[-1]), int(cu_k[-1]), 4, 2, dim))
    found = rt.quantise_qkv(q, k, v, precision, cu_q=cu_q, cu_k=cu_k, backend="hopper")
    same(found, rt.quantise_qkv(q.cpu(), k.cpu(), v.cpu(), precision, cu_q=cu_q, cu_k=cu_k))


def assert_as_emulated(found: tuple[Tensor, Tensor], due: tuple[Tensor, Tensor], exact: Tensor, precision: rt.Precision) -> None:
    """Closer to the definition of the recipe than that is to exact attention, by far; the same lse."""
    (o, lse), (emulated, due_lse) = found, due
    assert o.isfinite().all()
    # products of integers are exact; sums of products in FP8 are cut to 14 bits of the largest, every 32 columns
    steps = max(o.shape[-1] // 128, 1)
    close = {"rtol": 1e-5, "atol": 1e-5} if precision.qk == "int8" else {"rtol": 1e-3 * steps, "atol": 5e-3 * steps}
    torch.testing.assert_close(lse, due_lse, **close)
    apart = (o.double() - emulated.double()).square().mean().sqrt()
    lost = (emulated.double() - exact).square().mean().sqrt()
    assert apart <= 0.2 * lost + 4e-3 * exact.abs().mean()


@recipes
@dims
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("T", "S"), [(1, 300), (257, 257), (1153, 640), (640, 1153)])
def test_output_is_the_definitions(precision: rt.Precision, dim: int, mask: Mask, T: int, S: int) -> None:
    q, k, v = inputs(2, T, S, 4, 2, dim)
    found = rt.attention_with_lse(q, k, v, mask, precision=precision, backend="hopper")
    due = rt.attention_with_lse(q, k, v, mask, precision=precision, backend="eager")
    exact = rt.attention(q.double(), k.double(), v.double(), mask)
    assert_as_emulated(found, due, exact, precision)


@recipes
@dims
@pytest.mark.parametrize("mask", MASKS[:3], ids=str)
def test_packed_output_is_the_definitions(precision: rt.Precision, dim: int, mask: Mask) -> None:
    cu_q, cu_k = (cu.cuda() for cu in offsets())
    q, k, v = (x[0] for x in inputs(1, int(cu_q[-1]), int(cu_k[-1]), 4, 2, dim))
    call = (q, k, v, cu_q, cu_k, mask)
    found = rt.attention_packed_with_lse(*call, precision=precision, backend="hopper")
    due = rt.attention_packed_with_lse(*call, precision=precision, backend="eager")
    exact = rt.attention_packed(q.double(), k.double(), v.double(), cu_q, cu_k, mask)
    assert_as_emulated(found, due, exact, precision)


@pytest.mark.parametrize(("dim", "fp8", "int8"), [(64, 1.5, 2.6), (128, 1.7, 2.6)])
def test_recipes_are_as_much_better_than_one_scale_as_they_promise(dim: int, fp8: float, int8: float) -> None:
    plain = rt.Precision(granularity="tensor", incoherent=False, smooth_k=False)
    errors = dict.fromkeys(("plain", "fp8", "int8"), 0.0)
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        shape = (1, 2048, 2, dim)
        q, k, v = (
            torch.randn(shape, generator=generator)
            + 10 * torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 1e-3)
            for _ in range(3)
        )
        q, k, v = (x.cuda().bfloat16() for x in (q, k, v))
        exact = rt.attention(q.double(), k.double(), v.double())
        for name, precision, backend in (("plain", plain, "eager"), ("fp8", "fp8", "hopper"), ("int8", "int8", "hopper")):
            o = rt.attention(q, k, v, precision=precision, backend=backend)
            errors[name] += (o.double() - exact).square().mean().sqrt().item()
    assert errors["plain"] / errors["fp8"] >= fp8
    assert errors["plain"] / errors["int8"] >= int8


@dims
@pytest.mark.parametrize("step", [3.0, 40.0, 2000.0])
@pytest.mark.parametrize("mask", [rt.FULL, rt.CAUSAL, rt.Window(200)], ids=str)
def test_scores_may_grow_from_block_to_block(dim: int, step: float, mask: Mask) -> None:
    """Weights refer to scores of blocks that came before, from the last keys on: these are far above them, and below."""
    for heads in (1, 3):
        k = torch.zeros(1, 700, heads, dim, device="cuda", dtype=torch.bfloat16)
        rise = step * torch.arange(700, device="cuda").flip(0).div(128, rounding_mode="floor")
        k[0, :, :, 0] = (rise[:, None] * torch.tensor([1.0, -1.0, 0.3], device="cuda")[:heads]).bfloat16()
        q, v = torch.ones_like(k), torch.randn_like(k)
        for precision in (rt.Precision(incoherent=False, smooth_k=False), rt.Precision(qk="int8", incoherent=False)):
            found = rt.attention_with_lse(q, k, v, mask, scale=1.0, precision=precision, backend="hopper")
            due = rt.attention_with_lse(q, k, v, mask, scale=1.0, precision=precision, backend="eager")
            torch.testing.assert_close(found[0], due[0], rtol=0, atol=0.06)
            torch.testing.assert_close(found[1], due[1], rtol=1e-3, atol=5e-3)


@dims
def test_repeated_runs_are_bit_equal(dim: int) -> None:
    q, k, v = inputs(4, 1000, 1000, 4, 4, dim)
    for precision in ("fp8", "int8"):
        first = rt.attention(q, k, v, rt.CAUSAL, precision=precision, backend="hopper")
        for _ in range(20):
            assert torch.equal(rt.attention(q, k, v, rt.CAUSAL, precision=precision, backend="hopper"), first)


@recipes
@dims
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_nan_stays_where_it_is_seen(precision: rt.Precision, dim: int, mask: Mask) -> None:
    q, k, v = inputs(1, 400, 400, 4, 2, dim)
    q[0, 3, 1, 5] = torch.nan
    k[0, 100, 0, 0] = torch.inf
    k[0, 311, 1, 3] = torch.nan
    v[0, 80, 0, 7] = -torch.inf
    v[0, 299, 1, dim - 1] = torch.nan
    cu = torch.tensor([0, 130, 400], device="cuda", dtype=torch.int32)
    found = rt.attention_with_lse(q, k, v, mask, precision=precision, backend="hopper")
    due = rt.attention_with_lse(q, k, v, mask, precision=precision, backend="eager")
    packed = (q[0], k[0], v[0], cu, cu, mask)
    found += rt.attention_packed_with_lse(*packed, precision=precision, backend="hopper")
    due += rt.attention_packed_with_lse(*packed, precision=precision, backend="eager")
    for a, b in zip(found, due, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert not a.isinf().any() or torch.equal(a.isinf(), b.isinf())


@dims
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_never_waits(dim: int) -> None:
    q, k, v = inputs(2, 300, 300, 4, 2, dim)
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for precision in RECIPES.values():
                rt.attention(q, k, v, precision=precision, backend="hopper")
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_gradients_are_native_attentions() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(2, 300, 300, 4, 2, 64))
    do = torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16)
    native = torch.autograd.grad(rt.attention(q, k, v, rt.CAUSAL, backend="hopper", deterministic=True), (q, k, v), do)
    o = rt.attention(q, k, v, rt.CAUSAL, backend="hopper", deterministic=True, precision="fp8")
    for a, b in zip(torch.autograd.grad(o, (q, k, v), do), native, strict=True):
        assert torch.equal(a, b)


def test_the_kernels_are_chosen_and_refuse_in_sentences() -> None:
    q = torch.randn(1, 10, 2, 64, device="cuda", dtype=torch.bfloat16)
    assert "hopper   runs it" in rt.explain(q, q, q, precision="int8")
    with pytest.raises(rt.Unsupported, match="softcap with precision fp8; has masks, groups and packed sequences with it"):
        rt.attention(q, q, q, precision="fp8", softcap=5.0, backend="hopper")
    qkv = rt.quantise_qkv(q, q, q)
    assert qkv.v_order == "columns"
    with pytest.raises(rt.Unsupported, match="softcap with precision fp8"):
        rt.attention_quantised(qkv, softcap=5.0)
    with pytest.raises(rt.Unsupported, match="values quantised in columns; reads rows"):
        rt.attention_quantised(qkv, backend="triton")
    with pytest.raises(rt.Unsupported, match="values quantised in rows; reads columns"):
        rt.attention_quantised(rt.quantise_qkv(q, q, q, backend="triton"), backend="hopper")
