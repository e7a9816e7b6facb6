"""The projections and norms of a layer, which hold its weights; `rooftile.fused` computes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from rooftile import weights as matmul
from rooftile.fused import gated, gated_quantised
from rooftile.fused.one_row import project
from rooftile.models.config import ModelConfig
from rooftile.models.placement import Placement
from rooftile.numerics import QuantisedRows
from rooftile.weights import QuantisedWeight, weight_format
from rooftile.weights.gated import takes as takes_gates
from rooftile.weights.gated import takes_rows
from rooftile.weights.two_four import TwoFour
from rooftile.weights.two_four.product import multiply_two_four

# some rows of a weight
Part = QuantisedWeight | TwoFour | Tensor
# x (total, in), a weight (out, in) and a bias (out,) or None, to (total, out)
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class InputFormat(NamedTuple):
    """How a projection wants its input from the kernel that writes it: the arguments of `rooftile.fused.norm.normalise`."""

    out: str | None = None  # "fp8" or "int8"; None leaves it in the model's dtype
    scale: Tensor | None = None  # the one scale of all rows, where the checkpoint has it


class Addend(Protocol):
    """An addend of a projection's result, such as the adapters of the requests that an engine answers."""

    def add(self, y: Tensor, x: Tensor) -> None:
        """Adds to y (total, out), in place, what belongs to x (total, in)."""


class Projection(nn.Module):
    """A linear projection: a weight (out, in), and a bias (out,) where the family has one.

    The weight may be quantised or 2:4: then `weight` is None, and `parts` are its rows, in one piece or several. `waits` makes a
    projection whose weight comes later (`fill`). With `summed` the ranks add up what they project, so only rank 0 adds the bias.
    """

    def __init__(
        self, outputs: int, inputs: int, *, bias: bool, placement: Placement, waits: bool = False, summed: bool = False
    ) -> None:  # fmt: skip
        super().__init__()
        self.outputs, self.inputs, self.placement = outputs, inputs, placement
        self.adds_bias = not (summed and placement.rank)
        self.weight = None if waits else placement.parameter(outputs, inputs)
        self.bias = placement.parameter(outputs) if bias else None
        self.parts: tuple[Part, ...] = ()
        self.adapters: Addend | None = None
        """What is added to its results; its input is then in the model's dtype, whatever the format of the weight."""

    def fill(self, parts: Sequence[Part] | None) -> None:
        """Takes the rows of the weight, or with None makes an uninitialised one."""
        self.weight = self.placement.parameter(self.outputs, self.inputs) if parts is None else None
        self.parts = () if parts is None else tuple(_in_dtype(self.placement.dtype, part) for part in parts)

    def rows(self, x: Tensor) -> InputFormat:
        """Returns how it wants an input that is computed from x: in codes where all its parts multiply the same ones."""
        quantised = [part for part in self.parts if isinstance(part, QuantisedWeight)]
        if self.adapters is not None or (torch.is_grad_enabled() and x.requires_grad):
            return InputFormat()
        if not quantised or len(quantised) < len(self.parts):
            return InputFormat()
        wanted = {(weight_format(part.format).activations, part.input_scale, part.order is None) for part in quantised}
        (out, scale, in_order), *others = wanted
        if others or out not in ("fp8", "int8") or not in_order:
            return InputFormat()
        return InputFormat(out, scale)

    def dequantised(self) -> Tensor:
        """Returns the weight (out, in), dequantised if it is quantised."""
        if self.weight is not None:
            return self.weight
        return torch.cat([numbers_of(part, self.placement.dtype) for part in self.parts])

    def forward(self, x: Tensor | QuantisedRows, multiply: Multiply = functional.linear) -> Tensor:
        """Projects x (total, in), as it is or in the codes that `rows` asks for, to (total, out)."""
        y = self._weighted(x, multiply)
        if self.adapters is not None:
            assert isinstance(x, Tensor), "beside adapters a weight asks for no codes"
            self.adapters.add(y, x)
        return y

    def _weighted(self, x: Tensor | QuantisedRows, multiply: Multiply) -> Tensor:
        """Returns x times the weight, and the bias."""
        if self.weight is not None:
            assert isinstance(x, Tensor), "a weight in 16 bits asks for no codes"
            return (project if multiply is functional.linear else multiply)(x, self.weight, self.bias if self.adds_bias else None)
        found, start = [], 0
        for part in self.parts:
            stop = start + part.shape[0]
            bias = self.bias[start:stop] if self.bias is not None and self.adds_bias else None
            found.append(_multiply_part(x, part, bias, multiply))
            start = stop
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def gated(
        self, x: Tensor | QuantisedRows, activation: str, reader: Projection, multiply: Multiply = functional.linear
    ) -> Tensor | QuantisedRows:  # fmt: skip
        """Projects x to gates and what they gate, and returns the gated product as the projection that reads it wants it."""
        part = self.parts[0] if len(self.parts) == 1 and self.adapters is None else None
        if isinstance(part, QuantisedWeight) and multiply is functional.linear:
            out, scale = reader.rows(x if isinstance(x, Tensor) else x.codes)
            if isinstance(x, Tensor):
                # to find a scale of the result takes a whole row, and a product's programs have parts of rows
                if out is None and takes_gates(x, part, self.bias):
                    return matmul.multiply_gated(x, part, self.bias, activation)
            elif out == "fp8" and scale is not None and takes_rows(x, part, self.bias):
                return matmul.multiply_gated_rows(x, part, self.bias, activation, scale)
        up = self(x, multiply)
        out, scale = reader.rows(up)
        return gated(up, activation) if out is None else gated_quantised(up, activation, out, scale)


def numbers_of(part: Part, dtype: torch.dtype) -> Tensor:
    """Returns the rows of a weight as plain numbers."""
    if isinstance(part, QuantisedWeight):
        return part.dequantise(dtype)
    return part.dense(dtype) if isinstance(part, TwoFour) else part


def _in_dtype(dtype: torch.dtype, part: Part) -> Part:
    """A part with 2:4 values in the model's dtype, and scales, too, where that changes none: as kernels ask."""
    if isinstance(part, TwoFour):
        return part if part.dtype.itemsize == 1 else replace(part, values=part.values.to(dtype))
    if isinstance(part, Tensor) or part.format not in ("int4", "w8") or dtype.itemsize != 2:
        return part
    scales = part.scales.to(dtype)
    return replace(part, scales=scales) if torch.equal(scales.to(part.scales.dtype), part.scales) else part


def _multiply_part(
    x: Tensor | QuantisedRows, part: Part, bias: Tensor | None, multiply: Multiply
) -> Tensor:  # fmt: skip
    # another product than PyTorch's is the batch-invariant one
    fixed = multiply is not functional.linear
    if not isinstance(part, QuantisedWeight):
        assert isinstance(x, Tensor), "such a part asks for no codes"
        if isinstance(part, TwoFour):
            return multiply_two_four(x, part, bias, out_dtype=x.dtype, deterministic=fixed, backend="")
        return multiply(x, part, bias)
    return matmul.multiply(x, part, bias, out_dtype=x.dtype, deterministic=fixed, backend="")


class Norm(nn.Module):
    """The weights of a norm, and its kind."""

    def __init__(self, config: ModelConfig, size: int, *, placement: Placement) -> None:
        super().__init__()
        self.kind = config.norm
        self.eps = config.norm_eps
        self.plus_one = config.norm_plus_one
        self.rounds_once = config.norm_rounds_once
        self.weight = placement.parameter(size)
        self.bias = placement.parameter(size) if self.kind == "layer" else None
