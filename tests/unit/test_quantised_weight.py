"""Codes and scales of quantised weights: known answers, hostile groups, packing, and a sentence for each wrong argument."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import rooftile as rt
from rooftile.numerics import quantise, quantise_blocks
from rooftile.weights import WEIGHT_FORMATS
from rooftile.weights.packing import pack, pack_words, unpack, unpack_words, words_to_bytes
from tests.weights.cases import FORMATS, ordered, weight_of

# the largest error of a weight, as a share of the largest of its group: half a step, of e4m3 and e2m1 half of the widest. Scales
# in bf16 are up to a 256th too small, which cuts the largest number
HALF_STEP = {
    "fp8": 1 / 28, "fp8_tile": 1 / 28, "int8": 0.5 / 127, "w8": 1.0 / 127.5, "int4": 0.54 / 7.5, "mxfp8": 1 / 7.9,
    "mxfp4": 0.26, "nvfp4": 0.2,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_each_number_is_near(name: str, dtype: torch.dtype) -> None:
    w = torch.randn(200, 384, dtype=torch.float64).to(dtype)
    weight = rt.quantise_weight(w, **FORMATS[name])
    found = weight.dequantise(torch.float64)
    groups = (w.double() - found).abs().unflatten(1, (-1, min(weight.group, 384)))
    size = w.double().abs().unflatten(1, (-1, min(weight.group, 384))).amax(-1)
    if name == "fp8_tile":
        size = size.amax()
    if name == "int4, 32, zeros":
        # the zero point is rounded, too, and a group's range is at most twice its largest number
        size = size * 2
    assert (groups.amax(-1) <= HALF_STEP[weight.format] * size * 1.02).all()
    assert weight.nbytes == sum(x.nbytes for x in weight.parts if x is not None)
    assert weight.shape == (200, 384)


def test_known_answers_of_int4() -> None:
    w = torch.zeros(1, 32)
    w[0, :4] = torch.tensor([7.5, -7.5, 1.5, 2.5])
    weight = rt.quantise_weight(w, "int4", group=32)
    # the scale is 1, and ties go to even: 7.5 is cut to 7, -7.5 is -8, 1.5 is 2 and 2.5 is 2
    assert weight.scales.tolist() == [[1.0]]
    assert unpack(weight.codes, 32)[0, :5].tolist() == [15, 0, 10, 10, 8]
    assert weight.dequantise()[0, :5].tolist() == [7.0, -8.0, 2.0, 2.0, 0.0]


def test_known_answers_of_int4_with_zero_points() -> None:
    w = torch.linspace(5.0, 20.0, 32)[None]
    weight = rt.quantise_weight(w, "int4", group=32, zero_points=True)
    # the range is 0 to 20: a step is 20 / 15, rounded to bf16
    assert weight.scales.item() == torch.tensor(20 / 15).bfloat16().item()
    assert weight.zeros.item() == -8
    assert (weight.dequantise() - w).abs().max() <= weight.scales.item() / 2 + 0.01
    negative = rt.quantise_weight(-w, "int4", group=32, zero_points=True)
    assert negative.zeros.item() == 7


def test_known_answers_of_w8() -> None:
    w = torch.tensor([[127.5, -127.5, 0.5, 1.5]])
    weight = rt.quantise_weight(w, "w8")
    assert weight.scales.tolist() == [[1.0]]
    assert weight.codes.tolist() == [[127, -128, 0, 2]]


def test_fp8_and_int8_are_those_of_numerics() -> None:
    w = torch.randn(70, 96)
    for name, format in (("fp8", "fp8_e4m3"), ("int8", "int8")):
        due, weight = quantise(w[:, None], format, granularity="row"), rt.quantise_weight(w, name)
        assert torch.equal(weight.codes.float(), due.values[:, 0].float())
        assert torch.equal(weight.scales, due.scales[:, 0])
    due = quantise_blocks(w, "mxfp4")
    weight = rt.quantise_weight(w, "mxfp4")
    assert torch.equal(unpack(weight.codes, 96), due.values)
    assert torch.equal(weight.scales, due.exponents)
    assert torch.equal(weight.dequantise(), due.dequantise())


def test_scales_are_rounded_before_codes_are_taken() -> None:
    w = torch.randn(8, 128) * 1.003
    weight = rt.quantise_weight(w, "w8")
    scales = (w.abs().amax(1, keepdim=True) / 127.5).bfloat16()
    assert torch.equal(weight.scales, scales)
    assert torch.equal(weight.codes, (w / scales.float()).round().clamp(-128, 127).to(torch.int8))


@pytest.mark.parametrize("name", FORMATS)
def test_groups_of_zeros_and_of_extremes(name: str) -> None:
    w = torch.randn(130, 256)
    w[0], w[1], w[2], w[3] = 0.0, 1e-42, 3e38, -3e38
    w[4, 7] = 1e30
    w[5, ::2] = -0.0
    weight = rt.quantise_weight(w, **FORMATS[name])
    found = weight.dequantise()
    if name not in ("fp8_tile", "nvfp4"):
        assert (found[0] == 0).all()
        assert (found[4, 7] - 1e30).abs() <= 0.2e30
    # asymmetric and saturating codes may pass the largest number by a part of a step
    assert not found.isnan().any()
    zeros = rt.quantise_weight(torch.zeros(3, 256), **FORMATS[name])
    assert (zeros.dequantise() == 0).all()
    if name.startswith(("int4", "w8", "int8", "fp8")):
        assert (zeros.scales.float() == 1).all()


@pytest.mark.parametrize("name", FORMATS)
def test_strides_and_halves_do_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rooftile.weights import quantise as module

    wide = torch.randn(384, 400)
    whole = rt.quantise_weight(wide.T[:, :384].contiguous(), **FORMATS[name])
    strided = rt.quantise_weight(wide.T[:, :384], **FORMATS[name])
    monkeypatch.setattr(module, "AT_ONCE_ON_A_CPU", 1)
    parts = rt.quantise_weight(wide.T[:, :384], **FORMATS[name])
    for other in (strided, parts):
        for x, due in zip(other.parts, whole.parts, strict=True):
            assert (x is None and due is None) or torch.equal(x.view(torch.uint8), due.view(torch.uint8))


def test_dequantised_is_rounded_from_fp32() -> None:
    for name in FORMATS:
        weight = weight_of(name, 33, 256)
        for dtype in (torch.bfloat16, torch.float16):
            assert torch.equal(weight.dequantise(dtype), weight.dequantise().to(dtype))


def test_an_order_is_undone() -> None:
    weight = weight_of("int4, 32, zeros", 5, 64)
    sorted_ = ordered(weight)
    assert torch.equal(sorted_.dequantise()[:, sorted_.order.long()], weight.dequantise())


def test_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.randint(0, 16, (5, 24), dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes), 24), codes)
    assert torch.equal(unpack(pack(codes[:, :23]), 23), codes[:, :23])
    words = pack_words(codes)
    assert torch.equal(unpack_words(words), codes)
    for order in ("little", "big"):
        monkeypatch.setattr("sys.byteorder", order)
        assert torch.equal(words_to_bytes(words), pack(codes))
        assert torch.equal(words_to_bytes(words.T), pack(codes).view(5, 3, 4).transpose(0, 1).flatten(1))
    assert words[0, 0].item() & 15 == codes[0, 0]


def test_a_weight_says_what_it_is() -> None:
    assert repr(weight_of("int4, 64", 33, 256)) == "QuantisedWeight((33, 256), int4, group of 64, 4,488 bytes on cpu)"
    assert repr(weight_of("fp8", 33, 256)) == "QuantisedWeight((33, 256), fp8, 8,580 bytes on cpu)"


@pytest.mark.parametrize(
    ("w", "options", "sentence"),
    [
        (torch.randn(4, 96), {"format": "int4"}, "K = 96 numbers, and 128 of int4 share a scale; .* or take int4:32"),
        (torch.randn(4, 90), {"format": "int4"}, "share a scale; K must be a multiple: .* or take another format"),
        (torch.randn(4, 100), {"format": "mxfp4"}, "K = 100 numbers, and 32 of mxfp4 share"),
        (torch.randn(4, 96), {"format": "int4", "group": 48}, "group is 48; int4 has 32, 64, 128, or K"),
        (torch.randn(4, 96), {"format": "int4", "group": 32.0}, "group is 32.0; int4 has 32, 64, 128, or K"),
        (torch.randn(4, 96).to(torch.float8_e4m3fn), {"format": "int4"}, "weight is torch.float8_e4m3fn"),
        (torch.full((4, 96), 1e300, dtype=torch.float64), {"format": "w8"}, "weight is 1e\\+300 at row 0, column 0; weights"),
        (torch.randn(4, 96), {"format": "fp8", "group": 32}, "group is 32; fp8 has 96: leave it out"),
        (torch.randn(4, 96), {"format": "int3"}, "format is 'int3'; must be one of fp8, fp8_tile, int8, w8, int4, mxfp8"),
        (torch.randn(4, 96), {"format": None}, "format is None; must be one of"),
        (torch.randn(4, 96), {"format": "w8", "zero_points": True}, "only int4 has zero points"),
        (torch.ones(4, 96).long(), {"format": "w8"}, r"weight is torch.int64 \(4, 96\); must be a tensor"),
        (torch.randn(96), {"format": "w8"}, r"weight is torch.float32 \(96,\); must be"),
        (torch.randn(0, 96), {"format": "w8"}, r"\(0, 96\); must be"),
        ([[1.0]], {"format": "w8"}, "weight is list; must be"),
        (torch.zeros(1, 200_000), {"format": "int8"}, "K = 200,000 numbers; int8 sums of at most 132,104 are exact"),
    ],
)
def test_wrong_arguments(w, options, sentence: str) -> None:
    with pytest.raises(rt.InvalidInput, match=sentence):
        rt.quantise_weight(w, **options)


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("int4", {"group": 0}, "group is 0 and rows have K = 256 numbers; K must be a multiple of it"),
        ("w8", {"group": 100}, "group is 100 and rows have K = 256 numbers"),
        ("fp8", {"input_scale": torch.ones(2)}, r"input_scale is torch.float32 \(2,\) for fp8; must be one float, and only fp8"),
        ("int8", {"input_scale": torch.ones(1)}, r"input_scale is torch.float32 \(1,\) for int8; must be one float"),
        ("int4", {"zeros": torch.zeros(3, 2)}, r"zeros of int4 are torch.float32 \(3, 2\); must be int8 \(33, 2\)"),
    ],
)
def test_parts_that_do_not_fit(name: str, changes: dict, sentence: str) -> None:
    with pytest.raises(rt.InvalidInput, match=sentence):
        replace(weight_of(name, 33, 256), **changes)


def test_a_group_may_be_a_number_of_numpy() -> None:
    weight = rt.quantise_weight(torch.randn(4, 64), "int4", group=np.int64(32))
    assert type(weight.group) is int
    assert weight.scales.shape == (4, 2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_weights_must_be_finite(format: str, bad: float) -> None:
    w = torch.randn(4, 128)
    w[2, 5] = bad
    with pytest.raises(rt.InvalidInput, match=f"weight is {bad} at row 2, column 5; weights must be finite"):
        rt.quantise_weight(w, format)


def test_parts_that_do_not_go_together() -> None:
    weight = weight_of("int4", 4, 128)
    codes, scales, _, _, _ = weight.parts
    for change, sentence in (
        ((codes[:, 1:], scales, None, None), r"codes of int4 are torch.uint8 \(4, 63\); must be uint8 \(4, 64\)"),
        ((codes.char(), scales, None, None), "codes of int4 are torch.int8"),
        ((codes, scales.double(), None, None), "must be float32 or bfloat16 or float16"),
        ((codes, scales, None, torch.arange(128)), r"order of int4 are torch.int64 \(128,\); must be int32"),
    ):
        with pytest.raises(rt.InvalidInput, match=sentence):
            rt.QuantisedWeight(*change, "int4", 128, (4, 128))
    with pytest.raises(rt.InvalidInput, match="outer is missing for nvfp4"):
        rt.QuantisedWeight(*weight_of("nvfp4", 4, 128).parts[:4], "nvfp4", 16, (4, 128))
    with pytest.raises(AttributeError):
        weight.codes = codes
