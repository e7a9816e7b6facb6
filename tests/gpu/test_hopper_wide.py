"""Outputs and gradients in fp32 from the Hopper kernels are what they round to 16 bits otherwise."""

from __future__ import annotations

import pytest
import torch

from rooftile.exact.masks import CAUSAL, FULL, Chunk, Mask, Window
from rooftile.exact.spec import NO_OPTIONS, CallSettings
from rooftile.parallel.local import local_call

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

PLAIN = CallSettings(None, None, 0, None, True, "native", True, None)
WIDE = PLAIN._replace(wide_grads=True)
PARTIAL = PLAIN._replace(wide_grads=True, partial=True)
# offsets of packed sequences: empty, short, and beyond a tile
CU = (0, 1, 1, 130, 463)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("dims", "mask", "packed", "dtype"),
    [
        ((128, 128), CAUSAL, False, torch.bfloat16),
        ((128, 128), FULL, False, torch.float16),
        ((128, 128), CAUSAL & Window(100), True, torch.bfloat16),
        ((64, 64), CAUSAL, True, torch.bfloat16),
        ((96, 96), Window(50, 20), False, torch.bfloat16),
        ((256, 256), CAUSAL & Chunk(128), False, torch.bfloat16),
        ((192, 128), CAUSAL, True, torch.bfloat16),
    ],
)
def test_rounded_once_they_are_the_16_bit_kernels_own(
    dims: tuple[int, int], mask: Mask, packed: bool, dtype: torch.dtype, deterministic: bool
) -> None:
    torch.manual_seed(0)
    shape = (463,) if packed else (2, 463)
    q, k, v, do = (
        torch.randn(*shape, heads, dim, device="cuda", dtype=dtype)
        for heads, dim in zip((8, 2, 2, 8), (dims[0], *dims, dims[1]), strict=True)
    )
    needs, cu = (True, True, True, False, False), (CU, CU) if packed else None
    found = {}
    for name, settings in (("narrow", PLAIN), ("wide", WIDE), ("partial", PARTIAL)):
        call = local_call(q, k, v, mask, NO_OPTIONS, settings._replace(deterministic=deterministic), "hopper", needs, cu)
        o, lse = call.forward(q, k, v)
        found[name] = o, lse, *call.backward(do, None, q, k, v, o.to(dtype), lse)[0]
    assert [x.dtype for x in found["wide"][2:]] == [torch.float32] * 3
    assert found["partial"][0].dtype == torch.float32
    for name in ("wide", "partial"):
        for place, (a, b) in enumerate(zip(found[name], found["narrow"], strict=True)):
            if place >= 2 and not deterministic:
                # dq is added up in any order, and dk and dv by parts of a group
                torch.testing.assert_close(a, b.float(), rtol=2e-2, atol=2e-2)
            else:
                assert torch.equal(a.to(b.dtype), b)


def test_a_part_of_the_keys_takes_the_lse_as_it_is() -> None:
    """Rows far from 0, whose weights over a part of the keys do not add up to 1."""
    torch.manual_seed(1)
    q, k, v, do = (torch.randn(1, 200, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    q, k = q + 40, k + 40
    half = slice(0, 77)
    needs = (True, True, True, False, False)
    whole = local_call(q, k, v, FULL, NO_OPTIONS, PARTIAL, "hopper", needs)
    o, lse = whole.forward(q, k, v)
    assert float(lse.abs().min()) > 8192
    due = local_call(q, k, v, FULL, NO_OPTIONS, PARTIAL, "triton", needs).backward(do, None, q, k[:, half], v[:, half], o, lse)[0]
    got = whole.backward(do, None, q, k[:, half], v[:, half], o.bfloat16(), lse)[0]
    for a, b in zip(got, due, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2 * float(b.abs().max()))
