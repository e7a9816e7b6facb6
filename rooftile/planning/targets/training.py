"""Prepares a model to be trained for a plan: rounded layers and 2:4 ones, each as `rooftile.qat.prepare` makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import nn

from rooftile import qat
from rooftile.errors import InvalidInput
from rooftile.models import Decoder
from rooftile.planning.records import PlannedLayer
from rooftile.planning.targets.applying import check_model
from rooftile.planning.targets.modules import unwrapped
from rooftile.qat.patterns import Name
from rooftile.qat.prepared.found import prepared_in
from rooftile.qat.prepared.layers import Prepared
from rooftile.qat.prepared.tensors import is_conv1d
from rooftile.weights.files.formats import SPARSE
from rooftile.weights.two_four import Recipe

Model = TypeVar("Model", bound=nn.Module)


def prepare(
    layers: Sequence[PlannedLayer], words: Mapping[str, str], model: Model, estimator: str, start_step: int,
    sparsity: Recipe | None,
) -> Model:  # fmt: skip
    """Prepares the layers that `words` names; `layers` are all that the plan is about.

    Raises:
        InvalidInput: the model is another one or cannot be trained, or an argument is wrong; the model is then as it was.
    """
    for name, _ in prepared_in(model) if isinstance(model, nn.Module) else ():
        raise InvalidInput(f"{name.removeprefix('_orig_mod.')} is prepared already; restore the model first")
    check_model(layers, model)
    inside = unwrapped(model)
    _check_trainable(words, inside)
    sparse = [name for name, word in words.items() if word == SPARSE]
    if sparsity is not None and not sparse:
        raise InvalidInput(f"sparsity is {sparsity}, and the plan has no 2:4 layer; leave it out")
    rounded: dict[str, str | None] = {Name(name): word for name, word in words.items() if word != SPARSE}
    if rounded:
        qat.prepare(inside, rounded, estimator=estimator, start_step=start_step, verbose=False)
    try:
        for name in sparse:
            _make_sparse(inside.get_submodule(name), name, start_step, Recipe() if sparsity is None else sparsity)
    except InvalidInput:
        if any(True for _ in prepared_in(inside)):
            qat.restore(inside)
        raise
    return model


def _check_trainable(words: Mapping[str, str], model: nn.Module) -> None:
    if isinstance(model, Decoder):
        raise InvalidInput("model is a Decoder, which has no gradients; plan and prepare a module, such as a TrainableDecoder")
    others = {
        name: type(layer).__name__
        for name, layer in ((name, model.get_submodule(name)) for name in words)
        if type(layer) is not nn.Linear and (not is_conv1d(layer) or words[name] == SPARSE)
    }
    if others:
        name, kind = next(iter(others.items()))
        skip = [f"*.{last}" for last in dict.fromkeys(name.rpartition(".")[2] for name in others)]
        raise InvalidInput(f"{name} is {kind}, which rooftile.qat does not train as {words[name]}; plan with skip={skip}")


def _make_sparse(layer: nn.Module, name: str, start_step: int, sparsity: Recipe) -> None:
    """Prepares one layer as a model of its own: `qat.prepare` masks all layers of a model, or none."""
    try:
        qat.prepare(layer, None, skip=(), start_step=start_step, sparsity=sparsity, verbose=False)
    except InvalidInput as error:
        # its sentences begin with the name of the layer, which is empty in a model that is the layer
        raise InvalidInput(f"{name}{error}" if str(error).startswith(".") else str(error)) from None
    assert isinstance(layer, Prepared), "it was made so"
    layer.qat.name = name
