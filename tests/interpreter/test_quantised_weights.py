"""The kernel that quantises weights has the bits of PyTorch's operations."""

from __future__ import annotations

import pytest
import torch

import rooftile as rt
from rooftile.qat.rounding.codes import inside as defined
from rooftile.weights.formats import group_of, weight_format
from rooftile.weights.triton import weights
from rooftile.weights.two_four import two_four

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")


def hostile(N: int, K: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of all sizes, of zeros, of negative zeros, of subnormal numbers, of ties, of the largest numbers."""
    torch.manual_seed(N + K)
    w = torch.randn(N, K) * torch.logspace(-38, 38, N)[:, None]
    w[0], w[1] = 0.0, -0.0
    w[2] = torch.randint(-9, 10, (K,)) * 0.5
    # the interpreter takes a subnormal number in bf16 for 0
    w[3] = torch.finfo(dtype).smallest_normal / (1 if dtype == torch.bfloat16 else 4)
    w[4] = torch.finfo(dtype).max
    w[5, 1:], w[5, 0] = 0.25, 7.5
    w = w.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return torch.where(w.abs() < torch.finfo(dtype).smallest_normal, 0.0, w).to(dtype) if dtype == torch.bfloat16 else w.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "K", "given"),
    [
        ("fp8", 100, None), ("int8", 100, None), ("w8", 96, None), ("int4", 256, 32), ("int4", 384, 128), ("int4", 90, -1),
        ("mxfp8", 96, None), ("mxfp4", 160, None),
    ],
)  # fmt: skip
def test_bits(name: str, K: int, given: int | None, dtype: torch.dtype) -> None:
    kind, w = weight_format(name), hostile(40, K, dtype)
    group = group_of(kind, K, given)
    due = rt.quantise_weight(w, name, group=given)
    # rows with gaps between them
    flag = torch.zeros(1, dtype=torch.int32)
    codes, scales, _ = weights.quantise(torch.cat([w, w], 1)[:, :K], kind, group, flag)
    assert torch.equal(codes.view(torch.uint8), due.codes.view(torch.uint8))
    assert torch.equal(scales.view(torch.uint8), due.scales.view(torch.uint8))
    assert not flag.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_bits_where_powers_of_two_are_rounded_up(name: str, dtype: torch.dtype) -> None:
    kind, w = weight_format(name), hostile(40, 96, dtype)
    # the largest number of the format times powers of two, and the next ones above and below
    largest = 448.0 if name == "mxfp8" else 6.0
    for n, factor in enumerate((1.0, 1 + 2.0**-7, 1 - 2.0**-8)):
        w[2 + n] *= 0
        w[2 + n, 3::32] = torch.tensor([2.0**-6, 1.0, 2.0**3]) * largest * factor
    due = rt.quantise_weight(w, name, rule="round_up")
    assert not torch.equal(due.scales, rt.quantise_weight(w, name).scales)
    flag = torch.zeros(1, dtype=torch.int32)
    codes, scales, _ = weights.quantise(w, kind, 32, flag, rule="round_up")
    assert torch.equal(codes.view(torch.uint8), due.codes.view(torch.uint8))
    assert torch.equal(scales, due.scales)
    assert defined(w, due).all()


def unpacked(bits: torch.Tensor, K: int) -> torch.Tensor:
    return (bits[:, :, None] >> torch.arange(8)[None, None, :] & 1).flatten(1)[:, :K].bool()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "K", "given"),
    [
        ("fp8", 100, None), ("int8", 100, None), ("w8", 96, None), ("w8", 100, None), ("int4", 256, 32), ("int4", 92, -1),
        ("mxfp8", 96, None), ("mxfp4", 160, None),
    ],
)  # fmt: skip
def test_masked_and_clipped_in_one_pass(name: str, K: int, given: int | None, dtype: torch.dtype, sparse: bool) -> None:
    kind, w = weight_format(name), hostile(40, K, dtype)
    group = group_of(kind, K, given)
    clips, mask = name not in ("fp8", "int8"), two_four(w) if sparse else None
    # large numbers are left out, too
    mask = None if mask is None else mask.roll(1, 0)
    kept = w if mask is None else torch.where(mask, w, 0.0)
    due = rt.quantise_weight(kept, name, group=given)
    flag = torch.zeros(1, dtype=torch.int32)
    codes, scales, bits = weights.quantise(w, kind, group, flag, mask, clips)
    assert torch.equal(codes.view(torch.uint8), due.codes.view(torch.uint8))
    assert torch.equal(scales.view(torch.uint8), due.scales.view(torch.uint8))
    assert not flag.item()
    inside = defined(kept, due)
    if not clips:
        # the largest number sets the scale, so all are inside
        assert bits is None
        assert inside.all()
        return
    assert torch.equal(unpacked(bits, K), inside)
    dw = torch.randn(40, K).to(dtype)
    dw[0, 0], dw[1, 1] = torch.inf, torch.nan
    due_dw = dw * inside
    torch.testing.assert_close(weights.keep_inside(dw, bits), due_dw, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["int4", "mxfp4"])
def test_numbers_outside_are_found_in_one_pass(name: str) -> None:
    kind, w = weight_format(name), torch.randn(64, 128)
    group, flag = group_of(kind, 128, 32 if name == "int4" else None), torch.zeros(1, dtype=torch.int32)
    bits = weights.quantise(w, kind, group, flag, None, True)[2]
    inside = unpacked(bits, 128)
    assert torch.equal(inside, defined(w, rt.quantise_weight(w, name, group=32 if name == "int4" else None)))
    assert not inside.all()
    assert inside.float().mean() > 0.9


@pytest.mark.parametrize("lost", [torch.nan, torch.inf])
def test_what_is_left_out_raises_no_flag(lost: float) -> None:
    w, flag = torch.randn(2, 64), torch.zeros(1, dtype=torch.int32)
    w[1, 3] = lost
    mask = torch.ones(2, 64, dtype=torch.bool)
    mask[1, 3] = False
    weights.quantise(w, weight_format("int8"), 64, flag, mask)
    assert flag.item() == 0
    weights.quantise(w, weight_format("int8"), 64, flag, ~mask)
    assert flag.item() == 1


@pytest.mark.parametrize("name", ["fp8", "int4", "mxfp4"])
@pytest.mark.parametrize("lost", [torch.nan, -torch.inf])
def test_a_number_that_is_not_finite_raises_the_flag(name: str, lost: float) -> None:
    kind, w = weight_format(name), torch.randn(6, 128)
    flag = torch.zeros(1, dtype=torch.int32)
    weights.quantise(w, kind, group_of(kind, 128, None), flag)
    assert flag.item() == 0
    w[4, 127] = lost
    for rows in (w, torch.randn(6, 128)):
        weights.quantise(rows, kind, group_of(kind, 128, None), flag)
        # a weight that is finite leaves it as it is
        assert flag.item() == 1
