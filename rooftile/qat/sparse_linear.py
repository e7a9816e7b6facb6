"""The layer that `convert` leaves of a 2:4 one."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from rooftile.ops.linear import linear
from rooftile.sparsity import TwoFour


class SparseLinear(nn.Module):
    """A linear layer with a 2:4 weight: `rooftile.linear` as a module. The weight has no gradient, x and the bias have one.

    Args:
        weight: (out_features, in_features), from `rooftile.sparsity.compress`.
        bias: (out_features,).

    Its state dict holds the values and places of the weight, and the bias.

    Example:
        >>> w = torch.randn(8, 64)
        >>> layer = SparseLinear(rooftile.sparsity.compress(w, rooftile.sparsity.two_four(w)))
        >>> layer(torch.randn(3, 64)).shape
        torch.Size([3, 8])
    """

    values: Tensor
    places: Tensor
    scales: Tensor | None
    bias: nn.Parameter | None

    def __init__(self, weight: TwoFour, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        for name in ("values", "places", "scales"):
            self.register_buffer(name, getattr(weight, name))
        self.register_parameter("bias", bias)

    @property
    def sparse(self) -> TwoFour:
        """The weight."""
        return TwoFour(self.values, self.places, (self.out_features, self.in_features), self.scales)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) to (..., out_features), in the dtype of x, or in that of autocast."""
        return linear(x, self.sparse, self.bias)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        before = held(self, ("values", "scales") if self.values.element_size() == 1 else ())
        super()._apply(fn, recurse)
        keep_dtypes(self, before)
        return self

    def extra_repr(self) -> str:
        """The sizes and the dtype of the values."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {self.values.dtype}"


def held(module: nn.Module, names: Iterable[str]) -> dict[str, Tensor | None]:
    """Returns buffers by their names."""
    return {name: getattr(module, name) for name in names}


def keep_dtypes(module: nn.Module, before: dict[str, Tensor | None]) -> None:
    """Gives buffers the dtypes back that they had: `.to(dtype)`, `.half()` and `.bfloat16()` mean activations, not codes."""
    for name, x in before.items():
        after = getattr(module, name)
        if x is not None and after.dtype != x.dtype:
            setattr(module, name, x.to(after.device))
