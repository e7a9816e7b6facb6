"""`convert`: quantised weights in place of a prepared model's parameters; and `dequantise`, the way back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard, TypeVar, cast

import torch
from torch import nn

from rooftile.errors import InvalidInput
from rooftile.nn.converted import Converted, guard_saving, unguard_saving
from rooftile.nn.quantised_linear import QuantisedLinear
from rooftile.nn.sparse_linear import SparseLinear
from rooftile.qat.prepared import fast_paths
from rooftile.qat.prepared.found import prepared_layers
from rooftile.qat.prepared.layers import Prepared, PreparedEmbedding
from rooftile.qat.prepared.rounded import Rounded
from rooftile.qat.prepared.tensors import PreparedModule, PreparedTensor, restore_module
from rooftile.qat.sharded import shards
from rooftile.runtime.words import answers_foreign_words
from rooftile.weights.two_four import TwoFour, compress

Model = TypeVar("Model", bound=nn.Module)


@answers_foreign_words
def convert(model: Model) -> Model:
    """Replaces each prepared layer by one with the quantised or 2:4 weight that it was trained with, and returns the model.

    Codes come from the parameters as they are, in their own dtype. So a prepared layer and its converted one compute the same
    bits for the same rows. An embedding keeps a parameter, of rounded numbers, and so do modules that multiply themselves: fused
    experts and `nn.MultiheadAttention`. A layer that is 2:4 and not rounded becomes a
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
    # a buffer that is made in inference mode would keep all other layers from being trained
    with torch.inference_mode(False), torch.no_grad():
        made = {id(_module_of(layer)): _converted(layer) for _, layer in layers if not _stays(layer)}
        kept = [(layer, layer.rounded_parameter()) for _, layer in layers if _stays(layer)]
    for tensor, numbers in kept:
        tensor.module._parameters[tensor.attribute] = numbers
    for module in {id(tensor.module): tensor.module for tensor, _ in kept}.values():
        restore_module(cast("PreparedModule", module))
    put_in_place(model, made)
    return model


@answers_foreign_words
def dequantise(model: Model) -> Model:
    """Turns the converted layers of a model into `nn.Linear` again, with the numbers that their codes stand for, and returns it.

    Layers that shared a weight before `convert` have one each.

    Raises:
        InvalidInput: the model has no converted layer.

    Example:
        >>> model = rooftile.quantise_model(torch.nn.Sequential(torch.nn.Linear(64, 8)), "int4:32")
        >>> rooftile.qat.dequantise(model)[0]
        Linear(in_features=64, out_features=8, bias=True)
    """
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model is {type(model).__name__}; must be a torch.nn.Module")
    made = {id(layer): layer.to_linear() for layer in model.modules() if isinstance(layer, Converted)}
    if not made:
        raise InvalidInput("the model has no converted layer; rooftile.qat.convert and rooftile.quantise_model make them")
    if isinstance(model, Converted):
        raise InvalidInput("the model is itself a converted layer, which has no place to be replaced in; call its to_linear()")
    put_in_place(model, made)
    unguard_saving(model.modules())
    fast_paths.reopen(model)
    return model


def put_in_place(model: nn.Module, made: Mapping[int, nn.Module]) -> None:
    """Replaces modules inside a model, by their ids. A module may have several names, also in one parent."""
    for parent in list(model.modules()):
        # named_children names a child once
        for name, child in list(parent._modules.items()):
            if id(child) in made:
                setattr(parent, name, made[id(child)])
    if any(isinstance(one, Converted) for one in made.values()):
        guard_saving(model.modules())
        fast_paths.close(model, Converted)


def _stays(layer: Rounded) -> TypeGuard[PreparedTensor]:
    """Whether a weight is one of a module that stays, such as fused experts."""
    return isinstance(layer, PreparedTensor) and layer.stays


def _module_of(layer: Rounded) -> nn.Module:
    module = layer.module if isinstance(layer, PreparedTensor) else layer
    assert isinstance(module, nn.Module)
    return module


def _converted(layer: Rounded) -> nn.Module:
    rounding, dtype = layer.qat.rounding, layer.parameter.dtype
    if isinstance(layer, PreparedEmbedding):
        rest = {"padding_idx": layer.padding_idx, "scale_grad_by_freq": layer.scale_grad_by_freq}
        return nn.Embedding.from_pretrained(layer.codes().dequantise(dtype), freeze=True, **rest)  # type: ignore[arg-type]
    bias = cast("nn.Parameter | None", _module_of(layer).bias)
    if rounding is None:
        return SparseLinear(sparse_weight(layer), bias, dtype).train(layer.training)
    made = QuantisedLinear(layer.codes(), bias, rounding.activations, rounding.rule, dtype)
    made.is_conv1d = isinstance(layer, PreparedTensor)
    return made.train(layer.training)


def sparse_weight(layer: Rounded) -> TwoFour:
    """Returns the 2:4 weight of a layer that is not rounded, or rounded to FP8 or INT8."""
    mask = layer.held_mask
    assert mask is not None, "a 2:4 layer has a mask"
    # either chooses the mask anew where that is due
    if layer.qat.rounding is None:
        kept = layer.kept_weight()
        return compress(kept, mask)
    codes = layer.codes()
    return compress(codes.codes, mask, codes.scales)
