"""Saves and loads what a resumed run needs beside the parameters: counted steps, and masks of 2:4 weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rooftile.errors import InvalidInput
from rooftile.qat.prepared.found import prepared_layers
from rooftile.runtime.words import answers_foreign_words


@answers_foreign_words
def state_dict(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Returns what a resumed run needs beside the parameters: of each prepared layer its steps, and its mask.

    It is apart from the model's state dict, so that this fits a model that is not prepared. `torch.save` takes it.

    Raises:
        InvalidInput: the model is not prepared.

    Example:
        >>> model = rooftile.qat.prepare(nn.Sequential(nn.Linear(8, 8)), None, sparsity=rooftile.sparsity.Recipe(refresh=10))
        >>> sorted(rooftile.qat.state_dict(model)["0"])
        ['chosen_at', 'mask', 'steps']
    """
    found: dict[str, dict[str, Any]] = {}
    for name, layer in prepared_layers(model):
        found[name] = {"steps": layer.qat.steps}
        mask = layer.held_mask
        if layer.qat.masking is not None and mask is not None:
            found[name] |= {"mask": mask.clone(), "chosen_at": layer.qat.masking.chosen_at}
    return found


@answers_foreign_words
def load_state_dict(model: nn.Module, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Resumes a run: sets the steps and masks of a prepared model to those that `state_dict` returned. Load its parameters, too.

    Raises:
        InvalidInput: the model is not prepared, or its layers or masks differ from the state's.
    """
    layers = dict(prepared_layers(model))
    if not isinstance(state, Mapping):
        raise InvalidInput(f"state is {type(state).__name__}; must be what rooftile.qat.state_dict returned")
    if layers.keys() != dict(state).keys():
        name = sorted(layers.keys() ^ state.keys())[0]
        raise InvalidInput(f"{name} is prepared in {'the model' if name in layers else 'the state'} alone; prepare as before")
    for name, layer in layers.items():
        mask = state[name].get("mask")
        if (mask is None) != (layer.qat.masking is None):
            raise InvalidInput(f"{name} is 2:4 in {'the model' if mask is None else 'the state'} alone; prepare as before")
        own = layer.held_mask
        if isinstance(mask, Tensor) and own is not None and mask.shape != own.shape:
            raise InvalidInput(f"the mask of {name} is {tuple(mask.shape)}; must be {tuple(own.shape)}")
    for name, layer in layers.items():
        layer.qat.reach(int(state[name]["steps"]))
        layer.qat.kept = None
        held = layer.held_mask
        if layer.qat.masking is not None and held is not None:
            with torch.no_grad():
                held.copy_(state[name]["mask"])
            layer.qat.masking.chosen_at, layer.qat.masking.seen = int(state[name]["chosen_at"]), None
