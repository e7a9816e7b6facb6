"""Compression and expansion are exact, for every dtype and every number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.errors import InvalidInput
from rooftile.weights.two_four import TwoFour, compress, two_four
from rooftile.weights.two_four.definition import bits_of
from tests.weights.two_four.test_masks import DTYPES, some


def assert_same_bits(found: Tensor, due: Tensor) -> None:
    assert (found.dtype, found.shape) == (due.dtype, due.shape)
    assert torch.equal(bits_of(found.contiguous()), bits_of(due.contiguous()))


def masked(w: Tensor, mask: Tensor) -> Tensor:
    """w with zeros, by its bits."""
    return torch.where(mask, bits_of(w.contiguous()), 0).view(w.dtype)


@pytest.mark.parametrize("K", [4, 12, 64, 516])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_expanded_bits(dtype: torch.dtype, K: int) -> None:
    for transposable in (False, True):
        w = some(8, K, dtype)
        mask = two_four(w, transposable)
        weight = compress(w, mask)
        assert (weight.values.shape, weight.places.shape) == ((8, K // 2), (8, -(-K // 8)))
        assert_same_bits(weight.dense(), masked(w, mask))


@pytest.mark.parametrize("K", [4, 12, 64, 516])
def test_codes_of_int8(K: int) -> None:
    w = torch.randint(-128, 128, (8, K), dtype=torch.int8, generator=torch.Generator().manual_seed(K))
    w[0, :4] = -128
    mask = two_four(some(8, K))
    weight = compress(w, mask)
    assert weight.dtype == torch.int8
    assert_same_bits(weight.dense(), masked(w, mask))
    # -128 has no size in its own dtype, so a mask comes from the weight before
    with pytest.raises(InvalidInput, match=r"weight is torch.int8 \(8, .*\); must be a tensor \(N, K\) of .* or float8_e4m3fn"):
        two_four(w)


def test_all_pairs_of_places_and_hostile_values() -> None:
    masks = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]]).bool()
    w = torch.tensor([[-0.0, math.inf, -math.inf, math.nan]]).expand(6, 4)
    weight = compress(w, masks)
    # the second place in bits 2 and 3; a half of the byte has no group
    assert weight.places.flatten().tolist() == [0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110]
    assert_same_bits(weight.dense(), masked(w, masks))


def test_bytes() -> None:
    shares = {torch.bfloat16: 9 / 16, torch.float16: 9 / 16, torch.float8_e4m3fn: 5 / 8, torch.float32: 17 / 32}
    for dtype, share in shares.items():
        w = some(64, 256, dtype)
        assert compress(w, two_four(w)).nbytes == share * w.nbytes


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_scales_of_codes(format: str) -> None:
    w = torch.randn(16, 64)
    mask = two_four(w)
    codes = rt.quantise_weight(w * mask, format)
    weight = compress(codes.codes, mask, codes.scales)
    assert torch.equal(weight.dense(), codes.dequantise())
    assert weight.dense(torch.bfloat16).dtype == torch.bfloat16
    assert weight.nbytes == 5 / 8 * 16 * 64 + 64


def test_strides_modes_and_transforms() -> None:
    wide, mask = some(16, 64), two_four(some(16, 64))
    w = wide.T.contiguous().T[:, ::2]
    some_mask = two_four(w)
    due = masked(w, some_mask)
    assert_same_bits(compress(w, some_mask.T.contiguous().T).dense(), due)
    with torch.inference_mode():
        assert_same_bits(compress(w, some_mask).dense(), due)
    assert not compress(torch.nn.Parameter(wide), mask).values.requires_grad
    several = torch.stack([some(4, 16, seed=n) for n in range(3)])
    found = torch.vmap(lambda w: compress(w, two_four(w)).dense())(several)
    assert_same_bits(found, torch.stack([compress(w, two_four(w)).dense() for w in several]))
    one_mask = two_four(several[0])
    found = torch.vmap(lambda w: compress(w, one_mask).dense())(several)
    assert_same_bits(found, torch.stack([masked(w, one_mask) for w in several]))


def test_compiled_and_meta() -> None:
    def run(w: Tensor) -> Tensor:
        return compress(w, two_four(w)).dense()

    w = some(8, 32)
    assert_same_bits(torch.compile(run, fullgraph=True, backend="eager")(w), run(w))
    empty = torch.empty(8, 32, device="meta")
    assert run(empty).shape == (8, 32)
    with torch._subclasses.FakeTensorMode():
        assert run(torch.empty(8, 32)).shape == (8, 32)
    assert run(torch.empty(0, 32)).shape == (0, 32)


def test_moved_and_printed() -> None:
    w = some(8, 32)
    weight = compress(w, two_four(w)).to("meta")
    assert weight.device.type == "meta"
    assert repr(weight) == "TwoFour((8, 32), float32, 544 bytes on meta)"


def test_bad_input() -> None:
    w = some(8, 32)
    mask = two_four(w)
    for bad, sentence in (
        (mask[:4], r"mask is torch.bool \(4, 32\); must be bool \(8, 32\)"),
        (mask.float(), r"mask is torch.float32 \(8, 32\); must be bool"),
        (None, "mask is NoneType; must be bool"),
        (mask.to("meta"), "weight is on cpu and mask on meta; must be on one device"),
        (torch.ones_like(mask), "mask keeps 4 of columns 0 to 3 in row 0; must keep two"),
    ):
        with pytest.raises(InvalidInput, match=sentence):
            compress(w, bad)  # type: ignore[arg-type]
    weight = compress(w, mask)
    with pytest.raises(InvalidInput, match=r"values of a 2:4 weight \(8, 64\) are torch.float32 \(8, 16\); must be"):
        TwoFour(weight.values, weight.places, (8, 64))
    with pytest.raises(InvalidInput, match=r"shape is \(8, 30\); K must be a multiple of 4"):
        TwoFour(weight.values, weight.places, (8, 30))
    with pytest.raises(InvalidInput, match=r"scales are given and values are torch.float32; only FP8 and INT8 have scales"):
        compress(w, mask, torch.ones(8, 1))
