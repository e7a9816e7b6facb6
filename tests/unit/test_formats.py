"""Number formats: compared with the bits of torchao, compressed-tensors and microxcaling, and at their limits."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rooftile import numerics
from rooftile.errors import InvalidInput
from rooftile.numerics import BLOCK_FORMATS, FORMATS, decode, encode, quantise, quantise_blocks, quantise_nvfp4

VECTORS = json.loads((Path(__file__).parent / "format_vectors.json").read_text())
INPUTS = torch.tensor(VECTORS["inputs"], dtype=torch.int32).view(torch.float32)


def codes(values: Tensor) -> list[list[int]]:
    return (values if values.dtype == torch.int8 else values.view(torch.uint8)).tolist()


def ours(name: str) -> dict[str, list[list[int]]]:
    if name.startswith("mx"):
        kind, rule = name.split()
        blocks = quantise_blocks(INPUTS, kind, rule=rule)
        return {"codes": codes(blocks.values), "scales": blocks.exponents.tolist()}
    scaled = quantise(INPUTS[:, None, :], name, granularity="row")
    found = {"codes": codes(scaled.values[:, 0])}
    return found if name.startswith("fp8") else found | {"scales": scaled.scales.flatten().view(torch.int32).tolist()}


def without_zero_rows(found: dict[str, list[list[int]]], name: str) -> dict[str, list[list[int]]]:
    """Ignores the scale of rows of zeros: any is correct, and torchao uses its minimum."""
    zero = (INPUTS == 0).all(1).tolist()
    if not name.startswith("int"):
        return found
    return {part: [row for row, skip in zip(rows, zero, strict=True) if not skip] for part, rows in found.items()}


# formats that torchao does not have
OTHERS = ("nvfp4", "mxint8")


@pytest.mark.parametrize("name", [name for name in VECTORS["formats"] if name not in OTHERS])
def test_bits_are_those_of_torchao(name: str) -> None:
    assert without_zero_rows(ours(name), name) == without_zero_rows(VECTORS["formats"][name], name)


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed; the vectors above are its")
def test_vectors_are_what_torchao_makes() -> None:
    from scripts.write_format_vectors import by_torchao, inputs

    assert torch.equal(inputs(), INPUTS)
    assert by_torchao(INPUTS) == {name: found for name, found in VECTORS["formats"].items() if name not in OTHERS}


def test_bits_of_nvfp4_are_those_of_compressed_tensors() -> None:
    due = VECTORS["formats"]["nvfp4"]
    for row, codes_, scales, factor in zip(INPUTS, due["codes"], due["scales"], due["factors"], strict=True):
        made = quantise_nvfp4(row)
        # its zeros lose their sign, and any scale is correct for a row of zeros
        assert [0 if code == 8 else code for code in made.values.tolist()] == [0 if code == 8 else code for code in codes_]
        if row.any():
            assert codes(made.scales) == scales
            assert made.outer == 1 / torch.tensor(factor, dtype=torch.int32).view(torch.float32)


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed; see above")
def test_vectors_are_what_compressed_tensors_makes() -> None:
    from scripts.write_format_vectors import by_compressed_tensors

    assert by_compressed_tensors(INPUTS) == {"nvfp4": VECTORS["formats"]["nvfp4"]}


def test_numbers_of_mxint8_are_those_of_microxcaling() -> None:
    due = torch.tensor(VECTORS["formats"]["mxint8"]["numbers"], dtype=torch.int32).view(torch.float32)
    assert torch.equal(quantise_blocks(INPUTS, "mxint8").dequantise(), due)


@pytest.mark.skipif(find_spec("neural_compressor") is None, reason="neural-compressor-pt is not installed; see above")
def test_vectors_are_what_microxcaling_makes() -> None:
    from scripts.write_format_vectors import by_microxcaling

    assert by_microxcaling(INPUTS) == {"mxint8": VECTORS["formats"]["mxint8"]}


# the values of the 256 codes, by the rules of the standards
def _float_codes(exponent_bits: int, mantissa_bits: int, bias: int) -> list[float]:
    found = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        fraction = mantissa / 2**mantissa_bits
        found.append(2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction))
    return found


POSITIVE = {
    "fp8_e4m3": [x for x in _float_codes(4, 3, 7) if x <= 448],
    "fp8_e5m2": [x for x in _float_codes(5, 2, 15) if x <= 57344],
    "int8": [float(n) for n in range(128)],
    "int4": [float(n) for n in range(8)],
    "fp4_e2m1": _float_codes(2, 1, 1),
    "fp6_e3m2": _float_codes(3, 2, 3),
    "fp6_e2m3": _float_codes(2, 3, 1),
    "int8_64ths": [n / 64 for n in range(128)],
}


def format_named(name: str) -> numerics.Format:
    return next(kind for kind in (*FORMATS.values(), *BLOCK_FORMATS.values()) if kind.name == name)


@pytest.mark.parametrize("name", POSITIVE)
def test_every_number_of_a_format_is_itself(name: str) -> None:
    kind = format_named(name)
    numbers = torch.tensor([sign * x for x in POSITIVE[name] for sign in (1, -1)])
    assert torch.equal(decode(encode(numbers, kind), kind), numbers)
    assert max(POSITIVE[name]) == kind.largest


@pytest.mark.parametrize("name", POSITIVE)
def test_nearest_ties_to_even_and_saturation(name: str) -> None:
    kind = format_named(name)
    numbers = torch.tensor(POSITIVE[name], dtype=torch.float64)
    low, high = numbers[:-1], numbers[1:]
    middle = (low + high) / 2
    even = torch.where(torch.arange(len(low)) % 2 == 0, low, high)
    for sign in (1, -1):
        for x, due in (
            (middle, even),
            (torch.nextafter(middle.float(), torch.tensor(torch.inf)).double(), high),
            (torch.nextafter(middle.float(), torch.tensor(-torch.inf)).double(), low),
        ):
            assert torch.equal(decode(encode((sign * x).float(), kind), kind).double(), sign * due)
        beyond = torch.tensor([kind.largest * 1.2, 3e38, torch.inf]) * sign
        assert decode(encode(beyond, kind), kind).tolist() == [sign * kind.largest] * 3


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("granularity", numerics.GRANULARITIES)
def test_what_is_not_finite_is_nan_where_it_stands(name: str, granularity: numerics.Granularity) -> None:
    x = torch.randn(2, 140, 3, 16)
    clean = quantise(x, name, granularity=granularity).dequantise()
    bad = torch.zeros(x.shape, dtype=torch.bool)
    bad[0, 5, 1, 3] = bad[1, 130, 0, 0] = bad[1, 131, 0, 15] = True
    largest = x.abs().amax()
    for value in (torch.nan, torch.inf, -torch.inf):
        # the replaced number must not be the largest of a part, or the scales would change
        x[bad] = largest * 1e-3
        clean = quantise(x, name, granularity=granularity).dequantise()
        found = quantise(x.masked_fill(bad, value), name, granularity=granularity).dequantise()
        assert found[bad].isnan().all()
        assert torch.equal(found[~bad], clean[~bad])


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_block_with_a_nan_is_nan_and_no_other(name: str) -> None:
    x = torch.randn(3, 96)
    clean = quantise_blocks(x, name).dequantise()
    x[1, 40] = torch.nan
    x[2, 0] = torch.inf
    found = quantise_blocks(x, name).dequantise()
    lost = torch.zeros(3, 96, dtype=torch.bool)
    lost[1, 32:64] = lost[2, :32] = True
    assert found[lost].isnan().all()
    assert torch.equal(found[~lost], clean[~lost])


@given(
    st.sampled_from(sorted(FORMATS)),
    st.sampled_from(numerics.GRANULARITIES),
    st.integers(1, 200),
    st.integers(1, 3),
    st.floats(-30, 30),
)
def test_the_error_is_at_most_half_a_step(name: str, granularity: numerics.Granularity, T: int, H: int, log_size: float) -> None:
    x = torch.randn(T, H, 16) * 2.0**log_size
    scaled = quantise(x, name, granularity=granularity)
    kind, scale = scaled.format, scaled.row_scales()
    error = (scaled.dequantise() - x).abs()
    if kind.is_integer:
        step = scale.expand_as(x)
    else:
        mantissa = 3 if name == "fp8_e4m3" else 2
        least = {"fp8_e4m3": 2.0**-6, "fp8_e5m2": 2.0**-14}[name]
        _, exponent = torch.frexp((x / scale).abs().clamp(min=least))
        step = scale * torch.exp2((exponent - 1 - mantissa).float())
    assert (error <= step * 0.5 * (1 + 1e-5) + 1e-45).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-38, 3e38])
def test_the_smallest_and_the_largest_numbers_leave_zeros_alone(name: str, size: float) -> None:
    x = torch.tensor([size, 0.0, -size / 3]).view(3, 1, 1)
    found = quantise(x, name).dequantise()
    assert found[1] == 0
    assert ((found - x).abs() <= size / 7 + 2.0**-126).all()


@pytest.mark.parametrize("granularity", numerics.GRANULARITIES)
def test_scales_cover_what_they_say(granularity: numerics.Granularity) -> None:
    x = torch.randn(2, 300, 3, 16)
    shape = {
        "tensor": (1, 1, 1, 1), "head": (2, 1, 3, 1), "block": (2, 3, 3, 1), "row": (2, 300, 3, 1), "channel": (2, 1, 3, 16),
    }[granularity]  # fmt: skip
    scaled = quantise(x, "int8", granularity=granularity)
    assert tuple(scaled.scales.shape) == shape
    size = scaled.row_scales().expand_as(x) * 127
    assert (x.abs() <= size * (1 + 1e-6)).all()
    # the scale of a part is reached by one of its numbers
    reached = torch.isclose(x.abs(), size, rtol=1e-6).sum()
    assert reached >= scaled.scales.numel()


@pytest.mark.parametrize("shape", [(0, 2, 16), (2, 0, 3, 16), (3, 0, 16)])
def test_nothing_to_quantise(shape: tuple[int, ...]) -> None:
    for granularity in numerics.GRANULARITIES:
        assert quantise(torch.zeros(shape), granularity=granularity).dequantise().shape == shape


@given(st.sampled_from(sorted(BLOCK_FORMATS)), st.sampled_from(("floor", "round_up")), st.integers(-60, 60))
def test_block_floating_point_scales_with_powers_of_two_and_keeps_what_it_made(name: str, rule: str, power: int) -> None:
    x = torch.randn(4, 64)
    once = quantise_blocks(x, name, rule=rule).dequantise()
    assert torch.equal(quantise_blocks(x * 2.0**power, name, rule=rule).dequantise(), once * 2.0**power)
    assert torch.equal(quantise_blocks(-x, name, rule=rule).dequantise(), -once)
    assert torch.equal(quantise_blocks(once, name, rule=rule).dequantise(), once)


def test_rounding_the_scale_up_saturates_nothing() -> None:
    x = torch.randn(200, 32)
    for name, kind in BLOCK_FORMATS.items():
        size = x.abs().amax(1)
        for rule, most in (("floor", 2.0), ("round_up", 1.0)):
            power = torch.exp2(quantise_blocks(x, name, rule=rule).exponents[:, 0].float() - 127)
            assert (size <= power * kind.largest * most).all()


@pytest.mark.parametrize("name", sorted(BLOCK_FORMATS))
@pytest.mark.parametrize("size", [2.0**-149, 1e-44, 1e-42, 2.0**-126])
def test_tiny_blocks_have_the_smallest_scale(size: float, name: str) -> None:
    """A number below 2^-127 times the format's smallest step becomes 0, and none grows."""
    # the largest number of MXINT8 is below 2, so 2^-126 is not its smallest block
    x = torch.full((1, 32), size / 2 if name == "mxint8" else size)
    blocks = quantise_blocks(x, name, rule="round_up")
    assert blocks.exponents.tolist() == [[0]]
    assert (blocks.dequantise() <= 2 * x).all()


def test_numbers_of_a_float_format_are_multiplied_by_a_factor_that_is_rounded_once() -> None:
    # near the middle of two codes, so that one unit in the factor's last place shows
    size = torch.rand(200_000, generator=torch.Generator().manual_seed(0)) + 0.5
    once = (448 / size.double()).float()
    twice = (1 / size) * 448
    ties = torch.tensor([1.0625, 17.0, 33.0, 208.0, 432.0])
    x = (ties / once[:, None]).repeat_interleave(2, dim=1)
    x[:, 0] = size
    found = quantise(x[:, None], granularity="row").values[:, 0]
    due, other = ((x * factor[:, None]).to(torch.float8_e4m3fn).view(torch.uint8) for factor in (once, twice))
    assert not torch.equal(due, other)
    assert torch.equal(found.view(torch.uint8), due)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: quantise(x, "fp8"), "format is 'fp8'; has fp8_e4m3, fp8_e5m2, int8, int4"),
        (lambda x: quantise(x, granularity="page"), "granularity is 'page'; has tensor, head, block, row, channel"),
        (lambda x: quantise(x[0, 0]), r"x is \(2, 16\); must have at least three axes"),
        (lambda x: quantise(x.int()), "x is torch.int32; must be a float tensor"),
        (lambda x: quantise_blocks(x), r"x is torch.float32 \(1, 4, 2, 16\); must be a float tensor whose last axis"),
        (lambda x: quantise_blocks(x, "mxfp6"), "format is 'mxfp6'; has mxfp8_e4m3, mxfp8_e5m2, mxfp6_e3m2, mxfp6_e2m3, mxfp4"),
        (lambda x: quantise_nvfp4(x[..., :8]), r"x is torch.float32 \(1, 4, 2, 8\); must be a float tensor whose last axis is"),
        (lambda x: quantise_nvfp4(x, outer=torch.ones(2)), r"outer is \(2,\); must be a tensor of one number, or None"),
        (lambda x: quantise_nvfp4(x, outer=2.0), "outer is float; must be a tensor of one number, or None"),
        (lambda x: quantise_blocks(x, rule="even"), "rule is 'even'; has floor, round_up"),
        (lambda x: numerics.hadamard(x[..., :10]), "head dim 10 has no Hadamard transform; must be a multiple of 16"),
        (lambda x: numerics.hadamard(x, torch.ones(8)), r"signs is \(8,\); must be \(D,\) = \(16,\)"),
    ],
)
def test_bad_input_is_told(call, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        call(torch.randn(1, 4, 2, 16))


def test_mxint8_by_its_definition_in_fp64() -> None:
    """The standard's: numbers of 64ths, times two to the exponent of the block's largest number."""
    x = torch.randn(50, 32, dtype=torch.float64) * torch.exp2(torch.arange(-100, 100, 4.0, dtype=torch.float64))[:, None]
    x[0] = 0.0
    x = x.float().double()
    made = quantise_blocks(x.float(), "mxint8")
    exponent = torch.floor(torch.log2(x.abs().amax(1).clamp(min=2.0**-127)))
    steps = (x / torch.exp2(exponent)[:, None] * 64).round().clamp(-127, 127)
    assert torch.equal(made.values, steps.to(torch.int8))
    assert torch.equal(made.exponents[:, 0].double() - 127, exponent)
    assert torch.equal(made.dequantise(torch.float64), (steps / 64 * torch.exp2(exponent)[:, None]).float().double())
    # a file may hold the code that we never write
    assert decode(torch.tensor([-128], dtype=torch.int8), BLOCK_FORMATS["mxint8"]).item() == -2.0


def test_nvfp4_loses_only_the_group_of_a_nan() -> None:
    x = torch.randn(3, 64)
    outer = quantise_nvfp4(x).outer
    clean = quantise_nvfp4(x, outer=outer).dequantise()
    x[0, 40] = torch.nan
    x[2, 0] = -torch.inf
    made = quantise_nvfp4(x, outer=outer)
    lost = torch.zeros(3, 64, dtype=torch.bool)
    lost[0, 32:48] = lost[2, :16] = True
    assert made.dequantise()[lost].isnan().all()
    assert torch.equal(made.dequantise()[~lost], clean[~lost])
    # what is not finite has no part in the scale of the whole
    assert quantise_nvfp4(x).outer.isfinite()


@given(st.integers(-100, 100))
def test_nvfp4_scales_with_powers_of_two_and_its_outer_scale_survives_a_file(power: int) -> None:
    x = torch.randn(4, 64) * 3
    once, other = quantise_nvfp4(x), quantise_nvfp4(x * 2.0**power)
    assert torch.equal(other.values, once.values)
    assert torch.equal(other.dequantise(), once.dequantise() * 2.0**power)
    # files hold the inverse
    assert 1 / (1 / other.outer) == other.outer
    assert quantise_nvfp4(x.half()).outer.dtype == torch.float32


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-30, 3e38])
def test_nvfp4_of_the_smallest_and_the_largest_numbers(size: float) -> None:
    x = torch.tensor([size, 0.0, -size / 4, 0.0] * 4)
    found = quantise_nvfp4(x).dequantise()
    assert found.isfinite().all()
    assert (found - x).abs().max() <= size / 6 + 2.0**-130
