"""A layer, and the parts of it that hold weights; `rooftile.fused` computes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from rooftile import weights as matmul
from rooftile.fused import ACTIVATIONS, gated, gated_quantised
from rooftile.fused.rope import Rotation
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


class Projection(nn.Module):
    """A linear projection: a weight (out, in), and a bias (out,) where the family has one.

    The weight may be quantised or 2:4: then `weight` is None, and `parts` are its rows, in one piece or several. `waits` makes a
    projection whose weight comes later (`fill`).
    """

    def __init__(self, outputs: int, inputs: int, *, bias: bool, placement: Placement, waits: bool = False) -> None:
        super().__init__()
        self.outputs, self.inputs, self.placement = outputs, inputs, placement
        self.weight = None if waits else placement.parameter(outputs, inputs)
        self.bias = placement.parameter(outputs) if bias else None
        self.parts: tuple[Part, ...] = ()

    def fill(self, parts: Sequence[Part] | None) -> None:
        """Takes the rows of the weight, or with None makes an uninitialised one."""
        self.weight = self.placement.parameter(self.outputs, self.inputs) if parts is None else None
        self.parts = () if parts is None else tuple(_in_dtype(self.placement.dtype, part) for part in parts)

    def rows(self, x: Tensor) -> InputFormat:
        """Returns how it wants an input that is computed from x: in codes where all its parts multiply the same ones."""
        quantised = [part for part in self.parts if isinstance(part, QuantisedWeight)]
        if not quantised or len(quantised) < len(self.parts) or (torch.is_grad_enabled() and x.requires_grad):
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
        if self.weight is not None:
            assert isinstance(x, Tensor), "a weight in 16 bits asks for no codes"
            return multiply(x, self.weight, self.bias)
        found, start = [], 0
        for part in self.parts:
            stop = start + part.shape[0]
            bias = None if self.bias is None else self.bias[start:stop]
            found.append(_multiply_part(x, part, bias, multiply))
            start = stop
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def gated(
        self, x: Tensor | QuantisedRows, activation: str, reader: Projection, multiply: Multiply = functional.linear
    ) -> Tensor | QuantisedRows:  # fmt: skip
        """Projects x to gates and what they gate, and returns the gated product as the projection that reads it wants it."""
        part = self.parts[0] if len(self.parts) == 1 else None
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


class Attend(Protocol):
    """Mixes the tokens of a layer; the caller brings it, and decides which tokens see which and where they are kept.

    A layer gives what its kind gives (`ModelConfig.mixers`), and takes one row of `Layer.o.inputs` numbers a token, in any shape:

        "attention"      q (total, H, D), k and v (total, Hk, D), rotation
        "native_sparse"  the same, and gates (total, H, 3)
        "mamba"          x, before the convolution (total, W)
        "mamba2"         x, B and C side by side, before the convolution (total, W + 2 G N), and time steps (total, H)

    Queries and keys are normalised but not yet rotated (see `rooftile.kvcache.rotate`), so that keys can be rotated while they
    are written into a cache; the rotation is (total, D / 2) each, or None where queries and keys do not rotate. All tensors are
    views with gaps between their tokens. Scale, softcap and windows are in the decoder's configuration: config.scale,
    config.softcap, config.windows[layer].

    A layer with "native_sparse" has three times as many heads of keys and values: the heads of the compressed, the selected and
    the near branch, one branch after the other. `AttentionLayer.compression` maps blocks of the first. What a recurrence is made
    of, such as the weights of its convolution, is in `MambaLayer`
    and `Mamba2Layer`.
    """

    def __call__(self, layer: int, /, *given: Any, **named: Any) -> Tensor:
        """Mixes the tokens of one layer."""
        ...


class Layer(nn.Module):
    """One layer: what mixes tokens, for which each kind of layer has a class of its own, and a feed-forward or nothing.

    Gate and up are one projection.

    Args:
        config: the model.
        n: the number of the layer.
        placement: where its tensors are.
        waits: whether its projections get their weights later.
    """

    o: Projection
    """The projection that reads what the caller has mixed."""

    def __init__(self, config: ModelConfig, n: int, placement: Placement, *, waits: bool = False) -> None:
        super().__init__()
        self.config = config
        hidden, ffn = config.hidden, config.ffn
        self.mixer_norm = Norm(config, hidden, placement=placement) if config.pre_norms else None
        self.mixer_post_norm = Norm(config, hidden, placement=placement) if config.post_norms else None
        self.up = self.down = self.ffn_norm = self.ffn_post_norm = None
        if config.feed_forwards[n] is not None:
            up = 2 * ffn if config.gated else ffn
            self.up = Projection(up, hidden, bias=config.mlp_bias, placement=placement, waits=waits)
            self.down = Projection(hidden, ffn, bias=config.mlp_bias, placement=placement, waits=waits)
            self.ffn_norm = Norm(config, hidden, placement=placement) if config.pre_norms else None
            self.ffn_post_norm = Norm(config, hidden, placement=placement) if config.post_norms else None

    @property
    def reader(self) -> Projection:
        """The projection that reads the normalised stream, for what mixes tokens."""
        raise NotImplementedError

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The projections that a checkpoint may have quantised."""
        return tuple(one for one in (self.reader, self.o, self.up, self.down) if one is not None)

    def draw(self, generator: torch.Generator) -> None:
        """Draws the weights that random numbers near 0 would be no example of."""

    def rows_of_mixer(self, x: Tensor) -> InputFormat:
        """Returns how `mix` wants its input, computed from x."""
        return self.reader.rows(x)

    def mix(
        self, n: int, x: Tensor | QuantisedRows, rotation: Rotation | None, attend: Attend, multiply: Multiply = functional.linear
    ) -> Tensor:
        """Returns what mixing tokens in layer n adds to the residual stream, before its post norm; x is normalised."""
        raise NotImplementedError

    def feed_forward(self, x: Tensor | QuantisedRows, multiply: Multiply = functional.linear) -> Tensor:
        """Returns what the feed-forward adds to the residual stream, before its post norm; x is normalised."""
        assert self.up is not None, "a layer without a feed-forward"
        assert self.down is not None
        activation = self.config.activation
        if self.config.gated:
            inner = self.up.gated(x, activation, self.down, multiply)
        else:
            inner = ACTIVATIONS[activation](self.up(x, multiply))
        return self._scaled(self.down(inner, multiply))

    def _scaled(self, x: Tensor) -> Tensor:
        scale = self.config.residual_scale
        return x if scale is None else x * scale


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Applies a softcap, cap tanh(x / cap), which keeps scores within (-cap, cap); None leaves them as they are."""
    return x if cap is None else cap * torch.tanh(x / cap)
