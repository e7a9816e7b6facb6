"""Holds a linear layer whose weight is quantised."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rooftile import weights
from rooftile.nn.converted import Converted
from rooftile.numerics.block_floating import Rule, rounded_activations
from rooftile.runtime.operators import autocast_on
from rooftile.runtime.words import answers_foreign_words
from rooftile.weights import QuantisedWeight
from rooftile.weights.linear import linear

_PARTS = ("codes", "scales", "zeros", "order", "outer", "input_scale")


class QuantisedLinear(Converted):
    """A linear layer with a quantised weight: `rooftile.linear` as a module. The weight has no gradient, x and the bias have one.

    Args:
        weight: (out_features, in_features), from `rooftile.quantise_weight`.
        bias: (out_features,).
        activations: a format that x is rounded to before the product, where `rooftile.qat.prepare` was given one.
        rule: of the powers of two of such activations, as there.
        dtype: of `layer.weight`, the dequantised weight, for those who read it; None for the dtype of the bias, or PyTorch's
            default without one. `.to(dtype)` changes it.

    Its state dict holds the tensors of the weight (codes, scales, ...), the bias, and a `weight` of one number, at which a plain
    layer refuses to load it. `to_linear()` gives an `nn.Linear`.

    Example:
        >>> layer = QuantisedLinear(rooftile.quantise_weight(torch.randn(8, 64), "int4:32"), None)
        >>> layer(torch.randn(3, 64)).shape
        torch.Size([3, 8])
    """

    @answers_foreign_words
    def __init__(
        self, weight: QuantisedWeight, bias: nn.Parameter | None = None, activations: str | None = None, rule: Rule = "floor",
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(weight.shape, dtype, bias)
        self.format, self.group, self.activations, self.rule = weight.format, weight.group, activations, rule
        for name in _PARTS:
            self.register_buffer(name, getattr(weight, name))

    @property
    def quantised(self) -> QuantisedWeight:
        """The weight."""
        codes, scales, zeros, order, outer, given = (getattr(self, name) for name in _PARTS)
        shape = (self.out_features, self.in_features)
        return QuantisedWeight(codes, scales, zeros, order, self.format, self.group, shape, outer, given)

    def numbers(self) -> Tensor:
        """Returns the weight in `dtype`."""
        return weights.dequantise(self.quantised, self.dtype)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the product of the layer with another bias."""
        return linear(self._rounded(x), self.quantised, bias)

    def _rounded(self, x: Tensor) -> Tensor:
        if self.activations is None:
            return x
        kind = x.device.type
        if autocast_on() and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(kind))
        return rounded_activations(x, self.activations, self.rule)

    def extra_repr(self) -> str:
        """The sizes and the format."""
        activations = "" if self.activations is None else f", activations in {self.activations}"
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, {self.format}{activations}"
