"""`convert`: quantised weights in place of a prepared model's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from rooftile.errors import InvalidInput
from rooftile.matmul import QuantisedWeight
from rooftile.numerics.block_floating import Rule
from rooftile.operators import autocast_on
from rooftile.ops.linear import linear
from rooftile.qat.layers import Prepared, PreparedEmbedding
from rooftile.qat.preparation import prepared_layers
from rooftile.qat.product import rounded_activations
from rooftile.qat.sharded import shards
from rooftile.qat.sparse_linear import SparseLinear, held, keep_dtypes
from rooftile.sparsity import TwoFour, compress
from rooftile.words import answers_foreign_words

Model = TypeVar("Model", bound=nn.Module)
_PARTS = ("codes", "scales", "zeros", "order", "outer", "input_scale")


class QuantisedLinear(nn.Module):
    """A linear layer with a quantised weight: `rooftile.linear` as a module. The weight has no gradient, x and the bias have one.

    Args:
        weight: (out_features, in_features), from `rooftile.quantise_weight`.
        bias: (out_features,).
        activations: a format that x is rounded to before the product, where `rooftile.qat.prepare` was given one.
        rule: of the powers of two of such activations, as there.

    Its state dict holds the tensors of the weight (codes, scales, ...) and the bias.

    Example:
        >>> layer = QuantisedLinear(rooftile.quantise_weight(torch.randn(8, 64), "int4:32"), None)
        >>> layer(torch.randn(3, 64)).shape
        torch.Size([3, 8])
    """

    bias: nn.Parameter | None

    def __init__(
        self, weight: QuantisedWeight, bias: nn.Parameter | None = None, activations: str | None = None, rule: Rule = "floor"
    ) -> None:
        super().__init__()
        self.format, self.group, self.activations, self.rule = weight.format, weight.group, activations, rule
        self.out_features, self.in_features = weight.shape
        for name in _PARTS:
            self.register_buffer(name, getattr(weight, name))
        self.register_parameter("bias", bias)

    @property
    def quantised(self) -> QuantisedWeight:
        """The weight."""
        codes, scales, zeros, order, outer, given = (getattr(self, name) for name in _PARTS)
        shape = (self.out_features, self.in_features)
        return QuantisedWeight(codes, scales, zeros, order, self.format, self.group, shape, outer, given)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) to (..., out_features), in the dtype of x, or in that of autocast."""
        return linear(self._rounded(x), self.quantised, self.bias)

    def _rounded(self, x: Tensor) -> Tensor:
        if self.activations is None:
            return x
        kind = x.device.type
        if autocast_on() and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(kind))
        return rounded_activations(x, self.activations, self.rule)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        before = held(self, _PARTS)
        super()._apply(fn, recurse)
        keep_dtypes(self, before)
        return self

    def extra_repr(self) -> str:
        """The sizes and the format."""
        activations = "" if self.activations is None else f", activations in {self.activations}"
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, {self.format}{activations}"


@answers_foreign_words
def convert(model: Model) -> Model:
    """Replaces each prepared layer by one with the quantised or 2:4 weight that it was trained with, and returns the model.

    Codes come from the parameters as they are, in their own dtype. So a prepared layer and its converted one compute the same
    bits for the same rows. An embedding keeps a parameter, of rounded numbers. A layer that is 2:4 and not rounded becomes a
    `SparseLinear`; one that is both keeps its codes with zeros between.

    Raises:
        InvalidInput: the model is not prepared, is itself a prepared layer, or is sharded.
    """
    layers = prepared_layers(model)
    if isinstance(model, Prepared):
        raise InvalidInput("the model is itself a linear layer, which has no place to be replaced in; put it into nn.Sequential")
    sharded = shards(model)
    if sharded is not None:
        raise InvalidInput(
            f"{sharded} is sharded, and FSDP would go on gathering the parameters that convert replaces; call rooftile.qat.save, "
            "which gathers them, and load its folder"
        )
    put_in_place(model, {id(layer): _converted(layer) for _, layer in layers})
    return model


def put_in_place(model: nn.Module, made: Mapping[int, nn.Module]) -> None:
    """Replaces modules inside a model, by their ids. A module may have several names, also in one parent."""
    for parent in list(model.modules()):
        # named_children names a child once
        for name, child in list(parent._modules.items()):
            if id(child) in made:
                setattr(parent, name, made[id(child)])


def _converted(layer: Prepared) -> nn.Module:
    rounding = layer.qat.rounding
    if rounding is None:
        return SparseLinear(sparse_weight(layer), layer.bias)  # type: ignore[arg-type]
    codes = layer.codes()
    if not isinstance(layer, PreparedEmbedding):
        return QuantisedLinear(codes, layer.bias, rounding.activations, rounding.rule)  # type: ignore[arg-type]
    numbers = codes.dequantise(layer.weight.dtype)
    rest = {"padding_idx": layer.padding_idx, "scale_grad_by_freq": layer.scale_grad_by_freq}
    return nn.Embedding.from_pretrained(numbers, freeze=True, **rest)  # type: ignore[arg-type]


def sparse_weight(layer: Prepared) -> TwoFour:
    """Returns the 2:4 weight of a layer that is not rounded, or rounded to FP8 or INT8."""
    # either chooses the mask anew where that is due
    if layer.qat.rounding is None:
        kept = layer.kept_weight()
        return compress(kept, layer.mask)
    codes = layer.codes()
    return compress(codes.codes, layer.mask, codes.scales)
