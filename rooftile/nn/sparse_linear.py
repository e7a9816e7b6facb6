"""The layer that `convert` leaves of a 2:4 one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rooftile.nn.converted import Converted
from rooftile.runtime.words import answers_foreign_words
from rooftile.weights.linear import linear
from rooftile.weights.two_four import TwoFour


class SparseLinear(Converted):
    """A linear layer with a 2:4 weight: `rooftile.linear` as a module. The weight has no gradient, x and the bias have one.

    Args:
        weight: (out_features, in_features), from `rooftile.sparsity.compress`.
        bias: (out_features,).
        dtype: of `layer.weight`, the dense weight, for those who read it; None for the dtype of the values where they are plain
            numbers, else of the bias. `.to(dtype)` changes it.

    Its state dict holds the values and places of the weight, the bias, and a `weight` of one number, at which a plain layer
    refuses to load it. `to_linear()` gives an `nn.Linear`.

    Example:
        >>> w = torch.randn(8, 64)
        >>> layer = SparseLinear(rooftile.sparsity.compress(w, rooftile.sparsity.two_four(w)))
        >>> layer(torch.randn(3, 64)).shape
        torch.Size([3, 8])
    """

    values: Tensor
    places: Tensor
    scales: Tensor | None

    @answers_foreign_words
    def __init__(
        self, weight: TwoFour, bias: nn.Parameter | None = None, dtype: torch.dtype | None = None
    ) -> None:  # fmt: skip
        own = weight.values.dtype if weight.values.element_size() > 1 else None
        super().__init__(weight.shape, dtype or own, bias)
        for name in ("values", "places", "scales"):
            self.register_buffer(name, getattr(weight, name))

    @property
    def sparse(self) -> TwoFour:
        """The weight."""
        return TwoFour(self.values, self.places, (self.out_features, self.in_features), self.scales)

    def numbers(self) -> Tensor:
        """Returns the weight in `dtype`."""
        return self.sparse.dense(self.dtype)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the product of the layer with another bias."""
        return linear(x, self.sparse, bias)

    def keeps_dtype(self, x: Tensor) -> bool:
        """Whether a buffer is part of codes, and no plain number."""
        return self.values.element_size() == 1

    def extra_repr(self) -> str:
        """The sizes and the dtype of the values."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {self.values.dtype}"
