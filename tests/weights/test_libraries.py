"""Quantised weights beside those of compressed-tensors and torchao: the same codes, and layouts read as they read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import rooftile as rt
from rooftile.weights.files.layouts.compressed_tensors import reader_of
from rooftile.weights.packing import OFFSET, unpack

VECTORS = load_file(Path(__file__).parent / "weight_vectors.safetensors")
W = VECTORS["weight"]
# the section of config.json that each scheme writes, in short
INT, FLOAT = {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float"}
FOUR = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
TOKEN = {"num_bits": 8, "dynamic": True, "strategy": "token"}
SECTIONS = {
    "W4A16": ("pack-quantized", FOUR, None),
    "W4A16_ASYM": ("pack-quantized", FOUR | {"symmetric": False}, None),
    "W8A16": ("pack-quantized", FOUR | {"num_bits": 8}, None),
    "W8A8": ("int-quantized", INT | {"strategy": "channel"}, TOKEN | {"type": "int"}),
    "FP8_DYNAMIC": ("float-quantized", FLOAT | {"strategy": "channel"}, TOKEN | {"type": "float"}),
    "FP8_BLOCK": ("float-quantized", FLOAT | {"strategy": "block", "block_structure": [128, 128]}, TOKEN | {"type": "float"}),
    "MXFP8A16": ("mxfp8-quantized", FLOAT | {"strategy": "group", "group_size": 32}, None),
    "MXFP4A16": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, None),
    "NVFP4A16": (
        "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, None,
    ),
}  # fmt: skip


def part(name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): x for key, x in VECTORS.items() if key.startswith(f"{name}.")}


def codes_of(weight: rt.QuantisedWeight) -> Tensor:
    return unpack(weight.codes, 256).int() - OFFSET if weight.format == "int4" else weight.codes.int()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("w8", {"format": "w8"}),
        ("int4", {"format": "int4", "group": 128}),
        ("int4, 32", {"format": "int4", "group": 32}),
        ("int4, zeros", {"format": "int4", "group": 32, "zero_points": True}),
    ],
)
def test_codes_are_those_of_compressed_tensors(name: str, words: dict) -> None:
    weight, due = rt.quantise_weight(W, **words), part(name)
    assert torch.equal(weight.scales, due["scales"])
    assert torch.equal(codes_of(weight), due["codes"].int())


def test_fp8_has_torchaos_scales_and_nearly_all_of_its_codes() -> None:
    weight, due = rt.quantise_weight(W, "fp8"), part("fp8")
    assert torch.equal(weight.scales, due["scales"])
    # torchao divides by the scale, and we multiply by its inverse: ties fall to either side
    apart = (weight.codes.view(torch.uint8).int() - due["codes"].view(torch.uint8).int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 0.001


def test_int8_has_torchaos_codes_for_the_same_scales() -> None:
    weight, due = rt.quantise_weight(W, "int8"), part("int8, 127")
    assert torch.equal(weight.scales, due["scales"])
    assert torch.equal(weight.codes, due["codes"])


def test_int8_scales_of_torchao_leave_room_for_one_more_negative_code() -> None:
    """They are 1/127.5 of the largest number, and ours 1/127, so that codes are symmetric: an eighth of these codes differ."""
    weight, due = rt.quantise_weight(W, "int8"), part("int8")
    assert torch.equal(due["scales"], W.abs().amax(1, keepdim=True) / 127.5)
    assert weight.codes.min() == -127
    assert due["codes"].min() == -128
    gap = (weight.codes.int() - due["codes"].int()).abs()
    assert gap.max() == 1
    assert (gap > 0).float().mean().item() == pytest.approx(0.1257, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "words", "share"),
    [
        ("w8", {"format": "w8"}, 0.073),
        ("int4", {"format": "int4", "group": 128}, 0.006),
        ("int4, 32", {"format": "int4", "group": 32}, 0.011),
    ],
)
def test_a_weight_in_bf16_is_divided_in_fp32_and_by_compressed_tensors_in_bf16(name: str, words: dict, share: float) -> None:
    from scripts.write_weight_vectors import normal

    w = normal()
    weight = rt.quantise_weight(w, **words)
    half = 128 if weight.format == "w8" else 8
    quotients = w / weight.scales.repeat_interleave(weight.group, dim=1)
    assert quotients.dtype == torch.bfloat16
    theirs = quotients.round().clamp(-half, half - 1)
    ours = weight.codes if half == 128 else unpack(weight.codes, w.shape[1]).int() - OFFSET
    gap = (ours - theirs.float()).abs()
    assert gap.max() == 1
    found = (gap > 0).float().mean()
    assert found == VECTORS[f"{name}.apart"]
    assert found.item() == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_layout_is_read_as_its_library_reads_it(name: str) -> None:
    layout, weights, inputs = SECTIONS[name]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    reader = reader_of({"format": layout, "config_groups": {"group_0": group}}, "folder")
    tensors = part(name)
    due = tensors.pop("dequantised")
    must, may = reader.suffixes("layer")
    assert set(must) <= set(tensors) <= {*must, *may}
    found = reader.read("layer", tensors, (24, 256))
    assert torch.equal(found.dequantise(torch.bfloat16), due)


@pytest.mark.parametrize(("library", "parts"), [("compressed_tensors", ("stored", "codes", "apart")), ("torchao", ("rows",))])
def test_vectors_are_what_the_library_makes(library: str, parts: tuple[str, ...]) -> None:
    pytest.importorskip(library, reason=f"pip install {library}; the vectors above are its")
    from scripts import write_weight_vectors as script

    assert torch.equal(script.weight(), W)
    for name in parts:
        made = getattr(script, name)(W)
        assert made
        for key, x in made.items():
            assert torch.equal(x, VECTORS[key]), key
