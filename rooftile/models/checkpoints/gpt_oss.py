"""The experts of gpt-oss as its files have them: transposed in 16 bits, or in MXFP4; gates and what they gate alternate.

    in 16 bits   gate_up_proj (E, d, 2 h), gate_up_proj_bias (E, 2 h), down_proj (E, h, d)
    in MXFP4     gate_up_proj_blocks (E, 2 h, d / 32, 16), gate_up_proj_scales (E, 2 h, d / 32); down_proj_* alike

A byte of a block has two numbers, the first in its low half; a scale is the exponent of a power of two with 127 added. Experts in
MXFP4 are dequantised while they are read, one at a time: bf16 and fp32 have every number of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.models.checkpoints.stored import Cut, StoredTensor
from rooftile.weights import QuantisedWeight

_MODULE = ".mlp.experts."
# numbers that share a scale
_GROUP = 32


def rearranged(found: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns stored tensors with experts as the decoder has them: (E, 2 h, d) with gate rows first, and (E, d, h).

    Raises:
        InvalidInput: one of two tensors of a weight in MXFP4 is missing, or their shapes do not go together.
    """
    kept = dict(found)
    for name, stored in found.items():
        layer, is_experts, part = name.partition(_MODULE)
        if not is_experts:
            continue
        if part in ("gate_up_proj", "down_proj"):
            kept[name] = TransposedTensor(stored, has_pairs=part == "gate_up_proj")
        elif part == "gate_up_proj_bias":
            kept[name] = PairedBias(stored)
        elif part.endswith(("_blocks", "_scales")):
            module = f"{layer}{_MODULE}{part[: -len('_blocks')]}"
            kept.pop(name)
            kept[module] = BlockTensor(module, found, has_pairs="gate_up" in part)
    return kept


def _halves(x: Tensor) -> Tensor:
    """(2 h, ...) with pairs of neighbours to (2 h, ...) with the first of all pairs first."""
    return x.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)


def _pairs(halves: tuple[slice, ...]) -> tuple[slice, ...]:
    """Returns the slice of pairs that becomes a slice of the first half, and one of the second."""
    first, _ = halves
    return (slice(2 * first.start, 2 * first.stop),)


class _Rearranged(StoredTensor):
    def __init__(self, stored: StoredTensor) -> None:
        super().__init__(stored.file, stored.name)
        self.stored = stored


class TransposedTensor(_Rearranged):
    """(E, in, out) in files, (E, out, in) here."""

    def __init__(self, stored: StoredTensor, *, has_pairs: bool) -> None:
        super().__init__(stored)
        self.has_pairs = has_pairs

    def get_tensor(self) -> Tensor:
        return self._arranged(self.stored.get_tensor())

    def get_part(self, cut: Cut) -> Tensor:
        experts, outputs, inputs = cut
        return self._arranged(self.stored.get_part((experts, inputs, _pairs(outputs) if self.has_pairs else outputs)))

    def _arranged(self, x: Tensor) -> Tensor:
        return torch.stack([_halves(expert) for expert in x.mT]) if self.has_pairs else x.mT

    def shape(self) -> tuple[int, ...]:
        *first, inputs, outputs = self.stored.shape()
        return *first, outputs, inputs


class PairedBias(_Rearranged):
    """(E, 2 h), whose pairs become halves."""

    def get_tensor(self) -> Tensor:
        return _halves(self.stored.get_tensor().mT).mT

    def get_part(self, cut: Cut) -> Tensor:
        experts, outputs = cut
        return _halves(self.stored.get_part((experts, _pairs(outputs))).mT).mT


class BlockTensor(StoredTensor):
    """A weight in MXFP4, (E, out, in), in two tensors."""

    def __init__(self, module: str, found: dict[str, StoredTensor], *, has_pairs: bool) -> None:
        missing = [name for name in (f"{module}_blocks", f"{module}_scales") if name not in found]
        if missing:
            raise InvalidInput(f"the checkpoint lacks {missing[0]}, without which the other half says nothing; download it again")
        self.blocks, self.scales = found[f"{module}_blocks"], found[f"{module}_scales"]
        super().__init__(self.blocks.file, self.blocks.name)
        self.has_pairs = has_pairs
        shape = self.blocks.shape()
        if len(shape) != 4 or shape[3] * 2 != _GROUP or self.scales.shape() != shape[:3]:
            raise InvalidInput(
                f"{self.blocks.name} is {shape} and {self.scales.name} {self.scales.shape()}; due are (E, out, in / {_GROUP}, "
                f"{_GROUP // 2}) and (E, out, in / {_GROUP})"
            )
        if {self.blocks.dtype(), self.scales.dtype()} != {"U8"}:
            raise InvalidInput(f"{self.blocks.name} is {self.blocks.dtype()} and its scales {self.scales.dtype()}; due are bytes")

    def quantised(self) -> QuantisedWeight:
        """Returns the weight in its 4 bits, one expert below the other, gate rows first."""
        codes, scales = self.blocks.get_tensor().flatten(2), self.scales.get_tensor()
        if self.has_pairs:
            codes, scales = (torch.stack([_halves(expert) for expert in x]) for x in (codes, scales))
        experts, outputs, inputs = self.shape()
        shape = (experts * outputs, inputs)
        # not in its file, which is mapped
        codes, scales = codes.flatten(0, 1).clone(), scales.flatten(0, 1).clone()
        return QuantisedWeight(codes, scales, None, None, "mxfp4", _GROUP, shape)

    def get_tensor(self) -> Tensor:
        blocks, scales = self.blocks.get_tensor(), self.scales.get_tensor()
        found = torch.empty(self.shape(), dtype=torch.bfloat16)
        for expert, codes, exponents in zip(found, blocks.flatten(2), scales, strict=True):
            shape = (expert.shape[0], expert.shape[1])
            numbers = QuantisedWeight(codes, exponents, None, None, "mxfp4", _GROUP, shape).dequantise(torch.bfloat16)
            expert.copy_(_halves(numbers) if self.has_pairs else numbers)
        return found

    def shape(self) -> tuple[int, ...]:
        experts, outputs, groups, _ = self.blocks.shape()
        return experts, outputs, groups * _GROUP

    def dtype(self) -> str:
        return "BF16"
