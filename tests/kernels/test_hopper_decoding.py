"""Codes that become numbers in Hopper's registers: exact, scaled with one rounding, in the order of x."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.runtime.hopper import ptx as ptx_of  # noqa: E402
from rooftile.weights.hopper import widened  # noqa: E402
from rooftile.weights.packing import pack  # noqa: E402
from rooftile.weights.weight import Parts, dequantised  # noqa: E402
from tests.kernels import emulated  # noqa: E402


def decoded(name: str, packed: torch.Tensor, scales: torch.Tensor, shifts: torch.Tensor | None = None) -> torch.Tensor:
    """The numbers that a thread makes of bytes (rows, bytes), in its own order: a row for a row, (rows, 128)."""
    bf16, dtype, wide = scales.dtype == torch.bfloat16, scales.dtype, name in ("w8", "mxfp8")
    if wide:
        text, constraints, dtypes = ptx_of.bytes_text(name, bf16), "=&r,=&r,r,r,r", dtype
    elif shifts is None:
        text, constraints, dtypes = ptx_of.e2m1_text(bf16), "=&r,=&r,=&r,=&r,r,r,r", (dtype, dtype)
    else:
        text, constraints, dtypes = ptx_of.nibbles_text(bf16), "=&r,=&r,=&r,=&r,r,r,r,r,r", (dtype, dtype)
    given = [packed, *(x.expand(packed.shape) for x in (scales, shifts) if x is not None)]
    found = emulated.interpreted(text, constraints, given, dtypes, True, 4)
    rows = packed.shape[0]
    # as `widened._weights` has it
    if wide:
        return found.reshape(rows, 4, 8, 2, 2).permute(0, 2, 3, 1, 4).reshape(rows, 128)
    return torch.stack(found, -1).reshape(rows, 4, 4, 2, 2, 2).permute(0, 2, 3, 5, 1, 4).reshape(rows, 128)


def test_x_is_put_in_the_order_of_codes() -> None:
    """The sum over K does not change, if x is put in the order in which threads hold their codes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-9, 9, (5, 128), generator=generator).float()
    one = torch.ones(1).bfloat16()
    w = torch.randint(0, 16, (64, 128), generator=generator)
    held = decoded("int4", pack(w), one, torch.full((1,), 136.0).bfloat16())
    assert torch.equal(widened.in_order.fn(x, False) @ held.float().T, x @ (w.float() - 8).T)
    w = torch.randint(-128, 128, (64, 128), generator=generator)
    held = decoded("w8", w.to(torch.int8).view(torch.uint8), one)
    assert torch.equal(widened.in_order.fn(x, True) @ held.float().T, x @ w.float().T)
    number = torch.arange(128).float()[None]
    place = {(4 * w + 2 * a + v) * 8 + 2 * q + e: 32 * q + 8 * w + 4 * e + 2 * a + v
             for q in range(4) for w in range(4) for a in range(2) for v in range(2) for e in range(2)}  # fmt: skip
    assert widened.in_order.fn(number, False)[0].tolist() == [place[n] for n in range(128)]
    place = {(2 * w + a) * 8 + 2 * q + e: 32 * q + 4 * w + 2 * e + a
             for q in range(4) for w in range(8) for a in range(2) for e in range(2)}  # fmt: skip
    assert widened.in_order.fn(number, True)[0].tolist() == [place[n] for n in range(128)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_become_exact_numbers_that_are_scaled_with_one_rounding(dtype: torch.dtype) -> None:
    """All codes of each format, under many scales, as (code - zero) scale in fp32, rounded."""
    scales = torch.rand(1000, 1, generator=torch.Generator().manual_seed(0)).to(dtype)
    back = torch.argsort(widened.in_order.fn(torch.arange(128).float()[None], False)[0])
    nibbles = torch.arange(128) % 16
    packed = pack(nibbles)[None].expand(1000, -1)
    for zero in range(-8, 8):
        shift = torch.tensor([zero + (136.0 if dtype == torch.bfloat16 else 1032.0)]).to(dtype)
        due = ((nibbles.float() - 8 - zero) * scales.float()).to(dtype)
        assert torch.equal(decoded("int4", packed, scales, shift)[:, back], due)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    due = (torch.cat((numbers, -numbers))[nibbles] * scales.float()).to(dtype)
    assert torch.equal(decoded("mxfp4", packed, scales)[:, back], due)
    back = torch.argsort(widened.in_order.fn(torch.arange(128).float()[None], True)[0])
    for half in (0, 128):
        codes_ = torch.arange(half, half + 128).to(torch.uint8)
        found = decoded("w8", codes_[None].expand(1000, -1), scales)[:, back]
        assert torch.equal(found, (codes_.view(torch.int8).float() * scales.float()).to(dtype))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_powers_of_two_from_the_smallest_to_the_largest(name: str) -> None:
    """Numbers of bf16 times each power of two, with those that are subnormal or infinite."""
    exponents = torch.arange(255, dtype=torch.uint8)[:, None]
    bits = torch.where(exponents == 0, 64, exponents.int() << 7)
    wide = name == "mxfp8"
    # no code of NaN
    codes_ = torch.arange(128).to(torch.uint8) % 127 if wide else pack(torch.arange(128) % 16)
    back = torch.argsort(widened.in_order.fn(torch.arange(128).float()[None], wide)[0])
    found = decoded(name, codes_[None].expand(255, -1), bits.to(torch.int16).view(torch.bfloat16))[:, back]
    packed = codes_.view(torch.float8_e4m3fn) if wide else codes_
    parts = Parts(packed[None].expand(255, -1), exponents.expand(-1, 4), None, None, None)
    assert torch.equal(found, dequantised(parts, name, 32, (255, 128), torch.bfloat16))
