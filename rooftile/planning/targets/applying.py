"""Puts the formats of a plan into a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

from torch import nn

from rooftile.errors import InvalidInput
from rooftile.models import Decoder
from rooftile.models.checkpoints.quantised import quantise_decoder
from rooftile.nn import QuantisedLinear, SparseLinear
from rooftile.planning.records import PlannedLayer
from rooftile.planning.targets.decoders import parts_of
from rooftile.planning.targets.modules import is_linear, unwrapped, weight_of
from rooftile.qat.convert import put_in_place
from rooftile.weights.files.formats import weight_in
from rooftile.weights.files.plan import Quantiser
from rooftile.weights.two_four import TwoFour

Model = TypeVar("Model", bound=nn.Module)


def apply(layers: Sequence[PlannedLayer], words: Mapping[str, str], model: Model) -> Model:
    """Quantises or masks the layers that `words` names; `layers` are all that the plan is about."""
    check_model(layers, model)
    if isinstance(model, Decoder):
        if words:
            quantise_decoder(model, Quantiser(tuple(words.items())))
        return model
    inside = unwrapped(model)
    made: dict[int, nn.Module] = {}
    for name, word in words.items():
        layer = inside.get_submodule(name)
        weight, bias = weight_in(weight_of(layer), word, name), cast("nn.Parameter | None", layer.bias)
        dtype = weight_of(layer).dtype
        done = SparseLinear(weight, bias, dtype) if isinstance(weight, TwoFour) else QuantisedLinear(weight, bias, dtype=dtype)
        done.is_conv1d = not isinstance(layer, nn.Linear)
        made[id(layer)] = done
    put_in_place(inside, made)
    return model


def check_model(layers: Sequence[PlannedLayer], model: nn.Module) -> None:
    """Checks that a model is the plan's.

    Raises:
        InvalidInput: it is another model.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model is {type(model).__name__}; must be a torch.nn.Module, the one that was planned")
    there = parts_of(model) if isinstance(model, Decoder) else _layers_of(unwrapped(model))
    for layer in layers:
        for part in layer.parts:
            kind, shape = there.get(part.name, ("missing", ()))
            if shape != (part.N, part.K):
                what = f"{kind} {shape}" if shape else kind
                raise InvalidInput(
                    f"the plan is for another model: {part.name} is {what}, and must be a linear layer ({part.N}, {part.K}); "
                    "plan this model"
                )


def _layers_of(model: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names the class of each module, and the shape of a linear layer's weight."""
    named = model.named_modules(remove_duplicate=False)
    return {name: (type(layer).__name__, tuple(weight_of(layer).shape) if is_linear(layer) else ()) for name, layer in named}
