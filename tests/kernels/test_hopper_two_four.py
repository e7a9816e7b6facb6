"""Few rows times a 2:4 weight on Hopper, without a GPU: its decoding, launches, machine code, and its code run by Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.numerics import quantise_rows  # noqa: E402
from rooftile.runtime.hopper import ptx as ptx_of  # noqa: E402
from rooftile.weights.hopper import launch, two_four  # noqa: E402
from rooftile.weights.two_four import TwoFour, compress  # noqa: E402
from rooftile.weights.two_four import two_four as mask_of  # noqa: E402
from rooftile.weights.two_four.product import definition, hopper  # noqa: E402
from rooftile.weights.two_four.product.definition import Sparse, SparseProduct  # noqa: E402
from tests.grids import swept  # noqa: E402
from tests.kernels import emulated  # noqa: E402
from tests.kernels.test_hopper_products_compile import assert_fits, described, read  # noqa: E402

FP8 = torch.float8_e4m3fn


def weight_of(N: int, K: int, dtype: torch.dtype) -> TwoFour:
    """A random weight in which every pattern of a group is as frequent as the others."""
    kept = mask_of(torch.randn(N, K))
    w = torch.randn(N, K)
    if dtype != FP8:
        return compress(w.to(dtype), kept)
    scales = w.abs().amax(1, keepdim=True) / 448
    return compress((w / scales).to(FP8), kept, scales)


def sparse(weight: TwoFour) -> Sparse:
    return Sparse(weight.values, weight.places, weight.scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_thread_spreads_eight_groups(dtype: torch.dtype) -> None:
    """All patterns in all places of a word, bit for bit, with values of any bits."""
    weight = weight_of(1000, 128, dtype)
    bits = torch.randint(-(2**15), 2**15, weight.values.shape).to(torch.int16)
    bits = torch.where(bits.view(dtype).isnan(), 0, bits)
    weight = TwoFour(bits.view(dtype), weight.places, weight.shape)
    words = weight.places.view(torch.int32).repeat_interleave(16, 1)
    low, high = emulated.interpreted(
        ptx_of.GROUPS, ptx_of.GROUPS_CONSTRAINTS, [bits, words], (torch.int16, torch.int16), True, 16
    )
    found = torch.stack((low, high), -1).reshape(1000, 4, 8, 2, 2).permute(0, 2, 4, 1, 3).reshape(1000, 128)
    due = two_four.in_pairs.fn(weight.dense())
    assert torch.equal(found.as_subclass(torch.Tensor), due.view(torch.int16))


def test_x_is_put_in_the_order_of_weights() -> None:
    number = torch.arange(128).float()[None]
    place = {8 * s + 2 * q + e: 32 * q + 2 * s + e for q in range(4) for s in range(16) for e in range(2)}
    assert two_four.in_pairs.fn(number)[0].tolist() == [place[n] for n in range(128)]


def asked(M: int, N: int = 512, K: int = 1024, *, fixed: bool = False) -> tuple[torch.Tensor, Sparse, SparseProduct]:
    values, places = torch.zeros(N, K // 2).bfloat16(), torch.zeros(N, -(-K // 8), dtype=torch.uint8)
    return torch.zeros(M, K).bfloat16(), Sparse(values, places, None), SparseProduct(N, K, torch.bfloat16, fixed)


def test_refusals_say_what_came_and_what_is_there() -> None:
    assert not list(hopper.refusals(*asked(512)))
    assert not list(hopper.refusals(*asked(513, fixed=True)))
    assert list(hopper.refusals(*asked(2049))) == ["2,049 rows; has up to 2,048"]
    assert list(hopper.refusals(*asked(1, N=8))) == ["N is 8; has 16 and more"]
    assert list(hopper.refusals(*asked(1, K=1056))) == ["K is 1056; has multiples of 128"]
    x, weight, product = asked(1)
    moved = torch.zeros(weight.values.numel() + 1).bfloat16()[1:].view(weight.values.shape)
    assert "has aligned ones" in next(hopper.refusals(x, weight._replace(values=moved), product))
    moved = torch.zeros(weight.places.numel() + 1, dtype=torch.uint8)[1:].view(weight.places.shape)
    assert "has aligned ones" in next(hopper.refusals(x, weight._replace(places=moved), product))


@pytest.fixture(params=[3, 11])
def processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Launches run in Python, on so many processors; all counters are zero before and after."""
    monkeypatch.setattr(hopper, "Kernel", emulated.emulate(monkeypatch))
    monkeypatch.setattr(hopper, "product_of_two_four", two_four.product_of_two_four)
    monkeypatch.setattr(hopper, "kernel_of", hopper.kernel_of.__wrapped__)
    monkeypatch.setattr(launch, "processors_of", lambda device: request.param)
    # tiles are shared wherever they can be, as if that cost nothing
    chosen = launch._programs_of
    monkeypatch.setattr(launch, "_programs_of", lambda sizes, processors, sharing: chosen(sizes, processors, (0, 0)))
    monkeypatch.setattr(launch, "_DTYPES", {dtype: dtype for dtype in launch._DTYPES})
    # in a graph the ring fills before x is there
    monkeypatch.setattr(hopper, "may_read_early", lambda: request.param == 11)
    monkeypatch.setattr(hopper, "in_order", ordered)
    count = torch.zeros(10_000, dtype=torch.int32)
    monkeypatch.setattr(launch.counters, "zeros", lambda count_, device: count[:count_])
    yield request.param
    assert not count.any(), "counters are left at zero"


def ordered(x: torch.Tensor, order: str, dtype: torch.dtype | None) -> torch.Tensor:
    """`rooftile.weights.hopper.ordered.in_order`, which is a kernel."""
    assert order == "pairs"
    padded = torch.nn.functional.pad(x.to(dtype or x.dtype), (0, -x.shape[1] % 128))
    return two_four.in_pairs(padded.reshape(-1, 128)).reshape(padded.shape)


@pytest.mark.parametrize("fixed", [False, True], ids=["any-order", "fixed-order"])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 301, 640), (13, 301, 768), (64, 130, 640), (70, 301, 384), (515, 64, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8])
def test_emulated_products(dtype: torch.dtype, M: int, N: int, K: int, fixed: bool, processors: int) -> None:
    """The kernel's own code, run by Python, says what the definition says."""
    if M > 512 and not fixed:
        pytest.skip("more rows than a launch takes")
    weight, bias = weight_of(N, K, dtype), torch.randn(N)
    x = torch.randn(M, K)
    rows = quantise_rows(x)
    codes, scales = (rows.codes, rows.scales) if dtype == FP8 else (x.to(dtype), None)
    product = SparseProduct(N, K, torch.float32, fixed)
    assert not list(hopper.refusals(codes, sparse(weight), product))
    found = hopper.multiply(codes, scales, sparse(weight), bias, product)
    due = definition.multiply(
        codes if scales is not None else codes.double(), scales, sparse(weight), bias, product._replace(out_dtype=torch.float64)
    )
    torch.testing.assert_close(found.double(), due, rtol=3e-6, atol=3e-6 * float(due.abs().max()))


def test_bits_of_a_row_do_not_depend_on_the_others(processors: int) -> None:
    weight, x = sparse(weight_of(301, 640, torch.bfloat16)), torch.randn(130, 640).bfloat16()
    product = SparseProduct(301, 640, torch.bfloat16, True)
    assert torch.equal(hopper.multiply(x, None, weight, None, product)[:3], hopper.multiply(x[:3], None, weight, None, product))


# each number of rows; each dtype with x in either order, and with few rows and with more
@pytest.mark.parametrize(
    ("dtype", "M", "is_ordered"),
    swept(
        [
            (dtype, M, is_ordered)
            for dtype in (torch.bfloat16, FP8)
            for M, is_ordered in [(1, False), (16, False), (32, False), (16, True), (32, True), (64, True), (128, True)]
        ],
        lambda case: (case[1], (case[0], case[2]), (case[0], case[1] > 32)),
    ),
    ids=str,
)
def test_machine_code(dtype: torch.dtype, M: int, is_ordered: bool) -> None:
    is_fp8 = dtype == FP8
    tile = hopper.tile_of(M, is_fp8, not is_ordered)
    _, constants = hopper.kernel_of(is_fp8, is_ordered, True, tile)
    kinds = {"counters_ptr": "*i32", "bias_ptr": "*bf16", "o_ptr": "*bf16"}
    of_x = torch.float16 if is_fp8 and is_ordered else dtype
    kinds |= {"w_desc": described((tile.block_n, 64), dtype), "x_desc": described((tile.block_m, 128), of_x)}
    kinds["places_desc"] = described((tile.block_n, 4), torch.int32)
    found, ptx = read(two_four.product_of_two_four, constants, kinds)
    assert_fits(found, 64)
    # before the kernel in front has ended nothing is read but the weight, and x in two copies of 128 bytes where it has 16 bits
    assert "ld.global" not in ptx.split("griddepcontrol.wait")[0]
    copies = [part.count("cp.async.bulk.tensor") for part in ptx.split("griddepcontrol.wait")]
    assert copies == [0, 0, 2, 3 if of_x == FP8 else 4]
    kind = "f16.f16" if is_fp8 else "bf16.bf16"
    assert ptx.count(f"wgmma.mma_async.sync.aligned.m64n{tile.COLUMNS}k16.f32.{kind}") == 8 * tile.blocks
    # a thread reads 16 bytes of values at once, and gets its places from no other
    assert "ld.shared.v4.b32" in ptx
    assert "shfl" not in ptx[: ptx.index("wgmma.mma_async")].split("mbarrier.try_wait")[-1]
    # per group and row of a block: eight permutations for four groups at a time, and two for each
    assert ptx.count("prmt.b32") >= 2 * 32 * tile.blocks
