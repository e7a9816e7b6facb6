"""`convert`: quantised weights in place of a prepared model's parameters."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from rooftile.matmul import QuantisedWeight
from rooftile.ops.linear import linear
from rooftile.qat import masking
from rooftile.qat.layers import Prepared, PreparedEmbedding
from rooftile.qat.preparation import prepared_layers
from rooftile.qat.sparse_linear import SparseLinear
from rooftile.sparsity import TwoFour, compress

Model = TypeVar("Model", bound=nn.Module)
_PARTS = ("codes", "scales", "zeros", "order", "outer", "input_scale")


class QuantisedLinear(nn.Module):
    """A linear layer with a quantised weight: `rooftile.linear` as a module. The weight has no gradient, x and the bias have one.

    Args:
        weight: (out_features, in_features), from `rooftile.quantise_weight`.
        bias: (out_features,).

    Its state dict holds the tensors of the weight (codes, scales, ...) and the bias.

    Example:
        >>> layer = QuantisedLinear(rooftile.quantise_weight(torch.randn(8, 64), "int4:32"), None)
        >>> layer(torch.randn(3, 64)).shape
        torch.Size([3, 8])
    """

    bias: nn.Parameter | None

    def __init__(self, weight: QuantisedWeight, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.format, self.group = weight.format, weight.group
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
        return linear(x, self.quantised, self.bias)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        # .to(dtype), .half() and .bfloat16() mean activations: scales keep the dtype that codes were made with
        scales = {name: getattr(self, name) for name in _PARTS}
        super()._apply(fn, recurse)
        for name, before in scales.items():
            after = getattr(self, name)
            if before is not None and after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        return self

    def extra_repr(self) -> str:
        """The sizes and the format."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {self.format}"


def convert(model: Model) -> Model:
    """Replaces each prepared layer by one with the quantised or 2:4 weight that it was trained with, and returns the model.

    Codes come from the parameters as they are, in their own dtype. So a prepared layer and its converted one compute the same
    bits for the same rows. An embedding keeps a parameter, of rounded numbers. A layer that is 2:4 and not rounded becomes a
    `SparseLinear`; one that is both keeps its codes with zeros between.

    Raises:
        InvalidInput: the model is not prepared, or is itself a prepared layer.
    """
    layers = prepared_layers(model)
    made = {id(layer): _converted(layer) for _, layer in layers}
    # a layer may have several names
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if id(child) in made:
                setattr(parent, name, made[id(child)])
    return model


def _converted(layer: Prepared) -> nn.Module:
    if layer.qat.rounding is None:
        return SparseLinear(sparse_weight(layer), layer.bias)  # type: ignore[arg-type]
    codes = layer.codes()
    if not isinstance(layer, PreparedEmbedding):
        return QuantisedLinear(codes, layer.bias)  # type: ignore[arg-type]
    numbers = codes.dequantise(layer.weight.dtype)
    rest = {"padding_idx": layer.padding_idx, "scale_grad_by_freq": layer.scale_grad_by_freq}
    return nn.Embedding.from_pretrained(numbers, freeze=True, **rest)  # type: ignore[arg-type]


def sparse_weight(layer: Prepared) -> TwoFour:
    """Returns the 2:4 weight of a layer that is not rounded, or rounded to FP8."""
    mask = masking.kept(layer)
    if layer.qat.rounding is None:
        return compress(layer.weight, mask)
    codes = layer.codes()
    return compress(codes.codes, mask, codes.scales)
