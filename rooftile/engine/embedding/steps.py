"""Operations on vectors after pooling: projections, which a folder has beside the model, and norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.engine.embedding.folder import Step
from rooftile.errors import InvalidInput
from rooftile.weights.files.settings import check_readable

ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": functional.relu, "gelu": functional.gelu,
}  # fmt: skip


class Steps:
    """The steps of a recipe, with their weights in fp32, on a device.

    Raises:
        InvalidInput: the folder of a projection has no safetensors, or tensors that do not fit.
    """

    def __init__(self, steps: Sequence[Step], width: int, device: torch.device) -> None:
        self._steps: list[tuple[Step, Tensor | None, Tensor | None]] = []
        self.width = width
        """The numbers of a vector at the end."""
        for step in steps:
            weight, bias = (None, None) if step.kind == "normalise" else _tensors(step, self.width)
            if weight is not None:
                self.width = weight.shape[0]
            self._steps.append((step, _moved(weight, device), _moved(bias, device)))

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the vectors (B, width) of pooled vectors."""
        for step, weight, bias in self._steps:
            if weight is None:
                x = functional.normalize(x, dim=-1)
            else:
                x = ACTIVATIONS[step.activation](functional.linear(x, weight, bias))
        return x


def _moved(x: Tensor | None, device: torch.device) -> Tensor | None:
    return None if x is None else x.to(device)


def _tensors(step: Step, width: int) -> tuple[Tensor, Tensor | None]:
    from safetensors.torch import load_file

    assert step.folder is not None
    file = step.folder / "model.safetensors"
    check_readable(file)
    try:
        found = load_file(file)
    except Exception as error:
        raise InvalidInput(f"{file} is not a complete safetensors file ({error}); download it again") from None
    weight, bias = found.pop("linear.weight", None), found.pop("linear.bias", None)
    if weight is None or weight.dim() != 2 or weight.shape[1] != width or found:
        raise InvalidInput(f"{file} must have linear.weight (outputs, {width}), and may have linear.bias; download it again")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidInput(f"{file} has linear.bias {tuple(bias.shape)}; due ({weight.shape[0]},)")
    return weight.float(), None if bias is None else bias.float()
