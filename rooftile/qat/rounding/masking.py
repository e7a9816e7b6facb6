"""SR-STE: a layer multiplies with W * mask, its gradient passes to all of W, and what is left out is decayed.

A mask is a buffer of its layer, outside of the state dict. It is chosen from the weight after an optimiser's step, and in an
eager forward where the weight has changed since. `rooftile.qat.state_dict` saves it.

Zhou et al., arXiv:2102.04010; Hu et al., arXiv:2404.01847.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from rooftile.errors import InvalidInput
from rooftile.qat.sharded import is_sharded, whole
from rooftile.runtime.operators import transforms_active
from rooftile.weights.two_four import Recipe
from rooftile.weights.two_four.mask_choice import mask_of


@dataclass(slots=True)
class Masking:
    """The state of a layer's mask.

    Args:
        recipe: how masks are chosen.
        chosen_at: the optimiser's step at which the mask was chosen.
        flips: changed places over all places when it was last chosen anew, a tensor ().
        seen: what tells whether the weight is still the one that it was chosen for.
    """

    recipe: Recipe
    chosen_at: int = 0
    flips: Tensor | None = None
    seen: Any = None

    def is_due(self, weight: Tensor, steps: int, *, is_counted: bool) -> bool:
        """Whether the mask has to be chosen anew.

        is_counted: whether an optimiser whose steps are counted is all that changes the weight. Else a copy into `weight.data`,
            such as a copy of averaged weights, may have changed it without a sign.
        """
        recipe = self.recipe
        if steps and recipe.freeze_from is not None and steps >= recipe.freeze_from:
            return False
        if steps and recipe.refresh > 1:
            return steps - self.chosen_at >= recipe.refresh
        # a sharded weight is filled anew without a sign of it
        is_distributed = distributed.is_available() and distributed.is_initialized()
        return is_distributed or not is_counted or self.seen is None or self.seen != _version(weight, steps)


def _version(weight: Tensor, steps: int) -> Any:
    return None if weight.is_inference() else (weight.data_ptr(), weight._version, steps)


def check_trains(layer: Any) -> None:
    """Raises InvalidInput in a training forward whose weight was frozen after `prepare`, which refuses one frozen before."""
    weight = layer.parameter
    # torch.func puts other tensors in the parameter's place, whose gradients are its own affair
    is_frozen = isinstance(weight, nn.Parameter) and not weight.requires_grad
    if is_frozen and layer.training and torch.is_grad_enabled():
        raise InvalidInput(
            f"{layer.qat.name}.weight is frozen, and 2:4 trains all of a weight; unfreeze it, or put the layer in evaluation mode"
        )


def begin(layer: Any, name: str) -> None:
    """Gives a layer its first mask."""
    layer.register_buffer("mask", _chosen(layer, whole(layer.parameter), name), persistent=False)


def kept(layer: Any, weight: Tensor, *, in_forward: bool) -> Tensor:
    """Returns the mask of a layer for its weight as it is now, all of it."""
    masking = layer.qat.masking
    if not torch.compiler.is_compiling() and not transforms_active():
        is_counted = in_forward and layer.training and torch.is_grad_enabled() and layer.qat.steps > 0
        if masking.is_due(weight, layer.qat.steps, is_counted=is_counted):
            refresh(layer, weight)
    found: Tensor = layer.mask
    return found


def refresh(layer: Any, weight: Tensor) -> None:
    """Chooses the mask anew, for a whole weight."""
    masking, steps = layer.qat.masking, layer.qat.steps
    with torch.no_grad():
        found = _chosen(layer, weight, layer.qat.name)
        # within a step the mask is the same, so the flips since the step before stay
        if steps != masking.chosen_at:
            masking.flips = (found != layer.mask).float().mean()
        # in place: a captured graph and compiled code read this memory
        layer.mask.copy_(found)
    masking.chosen_at, masking.seen = steps, _version(weight, steps)


def _chosen(layer: Any, weight: Tensor, name: str) -> Tensor:
    steps, transposable = layer.qat.steps, layer.qat.masking.recipe.transposable
    try:
        # a check waits for the GPU, at every layer and step; there a loss that is NaN tells
        return mask_of(weight, transposable, check=not weight.is_cuda)
    except InvalidInput as error:
        after = f" after {steps} steps" if steps else ""
        raise InvalidInput(f"{name}.weight{after} cannot be 2:4: {error}") from None


def masked(weight: Tensor, mask: Tensor) -> Tensor:
    """Returns weight * mask, whose gradient passes to all of the weight."""
    found: Tensor = _Masked.apply(weight, mask)
    return found


class _Masked(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, mask: Tensor) -> Tensor:
        # no product: infinity times zero is NaN
        return torch.where(mask, weight, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> Any:
        return dw, None


@torch.no_grad()
def decay(layer: Any, factor: float | Tensor) -> None:
    """Adds decay * factor * (1 - mask) * W to the weight's gradient, where it has one."""
    weight, rate = layer.parameter, layer.qat.masking.recipe.decay
    if weight.grad is None:
        return
    mask, gradient = layer.mask, weight.grad
    if is_sharded(weight):
        from torch.distributed.tensor import distribute_tensor

        # each process has the whole mask, so none is sent
        mask = distribute_tensor(mask, weight.device_mesh, weight.placements, src_data_rank=None).to_local()
        weight, gradient = weight.to_local(), gradient.to_local()
    gradient.add_((torch.where(mask, 0.0, weight) * (rate * factor)).to(gradient.dtype))


def follow(layer: Any) -> None:
    """Chooses a mask after a weight has changed, for compiled forwards; a sharded weight's is chosen in the forward alone."""
    weight, masking = layer.parameter, layer.qat.masking
    if not is_sharded(weight) and masking.is_due(weight, layer.qat.steps, is_counted=True):
        refresh(layer, weight)
