"""torchao, as Transformers saves it: plain tensors for each quantised one, and in the file's header what they are parts of."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.weights import QuantisedWeight
from rooftile.weights.files.folder import files_of
from rooftile.weights.files.methods import FROM_16_BITS
from rooftile.weights.files.tensors import checked_codes, checked_scales, int4_weight, refused, w8_weight
from rooftile.weights.formats import TILE
from rooftile.weights.packing import OFFSET, pack

READ = ("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")
# a weight consists of these; other tensors are scales of activations that were found before
_PARTS = ("qdata", "scale", "zero_point")
_CONVERT = f"save the model with one of these, or {FROM_16_BITS}"


@dataclass(frozen=True, slots=True)
class TorchAOWeight:
    """One weight, as a header describes it."""

    kind: str
    parts: tuple[str, ...]
    block: tuple[int, ...]
    bits: int
    dynamic: bool  # whether activations are quantised at run time


@dataclass(frozen=True, slots=True)
class TorchAO:
    """The weights of a folder by their modules."""

    stored: Mapping[str, TorchAOWeight]

    def check(self, modules: Collection[str]) -> None:
        """The headers name what is quantised, so there is nothing to match."""

    def formats(self) -> Collection[str]:
        """Returns FP8 where a header has it: other formats have products everywhere."""
        return ("fp8",) if any(stored.kind == "Float8Tensor" for stored in self.stored.values()) else ()

    def covers(self, module: str) -> bool:
        """Whether a header says so."""
        return module in self.stored

    def suffixes(self, module: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The parts that the header lists."""
        return tuple(f"_weight_{part}" for part in self.stored[module].parts), ()

    def read(self, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantisedWeight:
        """The weight (N, K)."""
        stored, (N, K) = self.stored[module], shape
        is_float = stored.kind == "Float8Tensor"
        dtype = torch.float8_e4m3fn if is_float else torch.int8
        codes = checked_codes(module, "_weight_qdata", tensors["_weight_qdata"], shape, dtype)
        rows, group = (min(size, whole) for size, whole in zip(stored.block, shape, strict=True))
        if is_float and stored.block == (TILE, TILE):
            due = (-(-N // TILE), -(-K // TILE))
            scales = checked_scales(module, "_weight_scale", tensors["_weight_scale"], due).float()
            return QuantisedWeight(codes, scales, None, None, "fp8_tile", TILE, shape)
        if K % group or rows not in (1, N):
            raise InvalidInput(
                f"{module} has a scale for blocks of {stored.block}; read are rows, parts of rows and whole weights: {_CONVERT}"
            )
        scales = checked_scales(module, "_weight_scale", tensors["_weight_scale"], (N, K // group))
        if is_float:
            return QuantisedWeight(codes, scales.float(), None, None, "fp8", K, shape)
        zeros = _zero_points(module, tensors, scales)
        if stored.bits == 4:
            if int(codes.min()) < -OFFSET or int(codes.max()) >= OFFSET:
                raise InvalidInput(
                    f"{module}._weight_qdata holds {codes.min().item()} to {codes.max().item()}; must be from -8 to 7: download "
                    "the file again"
                )
            points = None if zeros is None else zeros.to(torch.int16) + OFFSET
            return int4_weight(pack(codes + OFFSET), scales, points, None, group, shape)
        if zeros is not None:
            raise InvalidInput(
                f"{module}._weight_zero_point has zero points for 8 bits; 8 bits are read without: quantise it symmetrically"
            )
        if stored.dynamic:
            return QuantisedWeight(codes, scales.float(), None, None, "int8", K, shape)
        return w8_weight(codes, scales, None, group)


def _zero_points(module: str, tensors: Mapping[str, Tensor], scales: Tensor) -> Tensor | None:
    """Zero points like scales; None where all are zero."""
    zeros = tensors.get("_weight_zero_point")
    if zeros is None or not zeros.any():
        return None
    if zeros.shape != scales.shape or int(zeros.min()) < -OFFSET or int(zeros.max()) >= OFFSET:
        raise InvalidInput(
            f"{module}._weight_zero_point is {tuple(zeros.shape)} from {zeros.min().item()} to {zeros.max().item()}; must be "
            f"{tuple(scales.shape)} from -8 to 7: download the file again"
        )
    return zeros


def reader_of(section: Mapping[str, Any], folder: str) -> TorchAO:
    """Returns the reader of a folder of torchao.

    Raises:
        InvalidInput: its files have no such header, or weights in what is not read.
    """
    from safetensors import safe_open

    stored: dict[str, TorchAOWeight] = {}
    for path in files_of(Path(folder)):
        with safe_open(path, framework="pt") as file:
            header: dict[str, str] = file.metadata() or {}
        if "tensor_names" not in header:
            raise refused(folder, f"names torchao, and the header of {path.name} says nothing of its tensors: save it again")
        for name in json.loads(header["tensor_names"]):
            described = json.loads(header[name])
            if described["_type"] != "Tensor":
                module = name.removeprefix("model.").removesuffix(".weight")
                stored[module] = _described(module, described, folder)
    return TorchAO(stored)


def _described(module: str, header: Mapping[str, Any], folder: str) -> TorchAOWeight:
    kind, data = header["_type"], header["_data"]
    if kind not in READ:
        raise refused(folder, f"has {kind} of torchao for {module}; read are {', '.join(READ)}: {_CONVERT}")
    activations = data.get("act_quant_kwargs") or data.get("activation_quantization")
    bits = {"int4": 4, "int8": 8}.get(data["target_dtype"]["_data"]) if "target_dtype" in data else 8
    if bits is None:
        raise refused(folder, f"has {module} in {data['target_dtype']['_data']}; read are int4 and int8: {_CONVERT}")
    if kind == "Float8Tensor" and activations is None:
        raise refused(
            folder, f"has FP8 weights with activations in 16 bits for {module}; read are quantised ones: "
            f"{FROM_16_BITS}"
        )  # fmt: skip
    others = [part for part in header["_tensor_data_names"] if part not in _PARTS]
    if others:
        raise refused(folder, f"has {', '.join(others)} for {module}; read are {', '.join(_PARTS)}: {_CONVERT}")
    if isinstance(activations, dict) and activations["_data"].get("mapping_type", {}).get("_data") == "ASYMMETRIC":
        raise refused(folder, f"has activations with zero points for {module}; read are those without: {_CONVERT}")
    if kind == "IntxUnpackedToInt8Tensor" and activations is not None:
        raise refused(folder, f"has {activations} for {module}; {kind} is read with activations in 16 bits: {_CONVERT}")
    return TorchAOWeight(kind, tuple(header["_tensor_data_names"]), tuple(data["block_size"]), bits, activations is not None)
