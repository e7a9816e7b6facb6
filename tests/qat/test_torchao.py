"""Weights in training beside torchao's QAT: the same bits where the rule is the same, and elsewhere the rule in the docs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import rooftile as rt
from rooftile.numerics import quantise_blocks, quantise_rows
from rooftile.numerics.formats import FP4_E2M1, decode, encode
from rooftile.weights.packing import OFFSET, unpack
from scripts.write_qat_vectors import VECTORS, VERSION

FOUND = load_file(VECTORS)
W = FOUND["weight"]


def layer(word: str, w: Tensor = W, estimator: str = "straight") -> nn.Linear:
    plain = nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
    plain.weight.data = w.clone()
    return rt.qat.prepare(nn.Sequential(plain), word, estimator=estimator)[0]


def numbers(word: str, w: Tensor = W) -> Tensor:
    """Returns the weight with which a prepared layer multiplies."""
    return layer(word, w).codes().dequantise(w.dtype)


@pytest.mark.parametrize("word", ["int8", "w8", "int4:128", "int4:32"])
def test_with_our_scales_torchao_rounds_to_the_same_bits(word: str) -> None:
    assert torch.equal(numbers(word), FOUND[f"given, {word}"])


@pytest.mark.parametrize("word", ["w8", "int4:128", "int4:32"])
def test_torchao_stops_the_gradients_that_clip_stops(word: str) -> None:
    prepared = layer(word, estimator="clip")
    prepared(torch.eye(256)).sum().backward()
    inside = FOUND[f"inside, {word}"]
    assert 0 < (~inside).sum() < 0.05 * inside.numel()
    assert torch.equal(prepared.weight.grad, inside.float())


@pytest.mark.parametrize(("word", "name"), [("fp8", "fp8"), ("mxfp8", "mxfp8, floor"), ("mxfp4", "mxfp4, floor")])
def test_by_its_own_scales_torchao_rounds_these_to_the_same_bits(word: str, name: str) -> None:
    assert torch.equal(numbers(word), FOUND[name])


def test_activations_in_fp8_are_rounded_to_the_same_bits() -> None:
    assert torch.equal(quantise_rows(W, "fp8").dequantise(), FOUND["fp8"])


def in_groups(w: Tensor, size: int) -> Tensor:
    return w.unflatten(1, (-1, size))


def by_integers(w: Tensor, scales: Tensor, least: int, most: int, zeros: Tensor | float = 0.0) -> Tensor:
    """The numbers of integer codes: multiplied by the inverse of the scale, as torchao does."""
    return ((w * (1 / scales)).round() + zeros).clamp(least, most).sub(zeros) * scales


def by_half_codes(w: Tensor, size: int, bits: int) -> Tensor:
    """Scales in fp32 of the largest number by 127.5 or 7.5."""
    groups, half = in_groups(w, size), 2 ** (bits - 1)
    scales = (groups.abs().amax(-1, keepdim=True) / (half - 0.5)).clamp(min=torch.finfo(torch.float32).smallest_normal)
    return by_integers(groups, scales, -half, half - 1).flatten(1)


def by_range(w: Tensor) -> Tensor:
    """15 steps from a group's smallest number to its largest, neither of which need be a multiple of the step."""
    groups = in_groups(w, 128)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = (high - low).clamp(min=1e-6) / 15
    return (((groups - low) / scales).round().clamp(0, 15).sub(8) * scales + (low + scales * 8)).flatten(1)


def by_fp8_first(w: Tensor) -> Tensor:
    """Rounded to FP8 before, and then scales of the largest number by 8."""
    groups = in_groups(numbers("fp8", w), 128)
    return by_integers(groups, (groups.abs().amax(-1, keepdim=True) / 8).clamp(min=1e-6), -8, 7).flatten(1)


def with_zero_points(x: Tensor) -> Tensor:
    """255 steps from a token's smallest number to its largest, with zero among the codes."""
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    scales = (high - low) / 255
    return by_integers(x, scales, -128, 127, -128 - (low / scales).round())


def with_scales_in_bf16(w: Tensor) -> Tensor:
    scales = (w.bfloat16().abs().amax(1, keepdim=True) / 448).float()
    return ((w.bfloat16().float() / scales).to(torch.float8_e4m3fn).float() * scales).bfloat16()


def with_larger_scales(w: Tensor) -> Tensor:
    """NVFP4 whose e4m3 scales are normal numbers."""
    groups, outer = in_groups(w, 16), w.abs().max() / (448 * 6)
    inner = (groups.abs().amax(-1, keepdim=True) / 6 / outer).clamp(2**-6, 448).to(torch.float8_e4m3fn).float()
    codes = encode(groups * (1 / outer / inner), FP4_E2M1)
    return (decode(codes, FP4_E2M1) * (outer * inner)).flatten(1)


# torchao rounds these by a rule of its own: that rule, and our word for the format
RULES = {
    "int8": (lambda w: by_half_codes(w, w.shape[1], 8), "int8"),
    "int4:32": (lambda w: by_half_codes(w, 32, 4), "int4:32"),
    "int4:128, bf16 activations": (by_range, "int4:128"),
    "int4:128, fp8 activations": (by_fp8_first, "int4:128"),
    "activations in int8": (with_zero_points, "int8"),
    "fp8, bf16": (with_scales_in_bf16, "fp8"),
    "mxfp8, round_up": (lambda w: quantise_blocks(w, "mxfp8_e4m3", rule="round_up").dequantise(), "mxfp8"),
    "mxfp4, round_up": (lambda w: quantise_blocks(w, "mxfp4", rule="round_up").dequantise(), "mxfp4"),
    "nvfp4": (with_larger_scales, "nvfp4"),
}


@pytest.mark.parametrize("name", RULES)
def test_elsewhere_torchao_follows_the_rule_that_the_docs_state(name: str) -> None:
    rule, word = RULES[name]
    assert torch.equal(rule(W), FOUND[name])
    ours = numbers(word, W.to(FOUND[name].dtype))
    assert not torch.equal(ours, FOUND[name])


# the docs state these shares

NORMAL = torch.randn(256, 4096, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("word", "size", "share"), [("int8", 4096, 0.105), ("int4:32", 32, 0.011), ("int4:128", 128, 0.005)])
def test_the_share_of_codes_that_differ_by_the_scale(word: str, size: int, share: float) -> None:
    codes, half, groups = layer(word, NORMAL).codes().codes, 128 if word == "int8" else 8, in_groups(NORMAL, size)
    theirs = (groups / (groups.abs().amax(-1, keepdim=True) / (half - 0.5))).round().clamp(-half, half - 1).flatten(1)
    gap = (theirs - (codes if half == 128 else unpack(codes, 4096).int() - OFFSET)).abs()
    assert gap.max() == 1
    assert (gap > 0).float().mean().item() == pytest.approx(share, abs=1e-3)


def test_the_share_of_fp8_codes_that_differ_by_a_scale_in_bf16() -> None:
    w = NORMAL.bfloat16()
    scales = (w.abs().amax(1, keepdim=True) / 448).float()
    theirs, ours = (w.float() / scales).to(torch.float8_e4m3fn), layer("fp8", w).codes().codes
    assert (theirs.float() != ours.float()).float().mean().item() == pytest.approx(0.02, abs=1e-3)


@pytest.mark.parametrize(("format", "share"), [("mxfp8_e4m3", 0.172), ("mxfp4", 0.297)])
def test_the_share_of_blocks_whose_exponent_differs(format: str, share: float) -> None:
    down, up = (quantise_blocks(NORMAL, format, rule=rule).exponents for rule in ("floor", "round_up"))
    assert (down != up).float().mean().item() == pytest.approx(share, abs=1e-3)


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.0), (torch.bfloat16, 0.0007)])
def test_the_share_of_nvfp4_codes_that_differ(dtype: torch.dtype, share: float) -> None:
    w = NORMAL.to(dtype)
    theirs, ours = with_larger_scales(w.float()), numbers("nvfp4", w.float())
    # the last bit is not a code
    assert (theirs - ours).abs().gt(1e-5 * ours.abs()).float().mean().item() == pytest.approx(share, abs=1e-4)


def test_vectors_are_what_torchao_makes() -> None:
    try:
        found = version("torchao")
    except PackageNotFoundError:
        found = "none"
    if found != VERSION:
        pytest.skip(f"torchao {VERSION} wrote the file, and {found} is installed")
    from scripts.write_qat_vectors import by_torchao, inputs

    assert torch.equal(inputs(), W)
    made = by_torchao(W)
    assert made.keys() == FOUND.keys() - {"weight"}
    for name, x in made.items():
        assert torch.equal(x, FOUND[name]), name
