"""The prepared layers of a model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from rooftile.errors import InvalidInput
from rooftile.qat.prepared.layers import Prepared
from rooftile.qat.prepared.rounded import Rounded
from rooftile.qat.prepared.tensors import PreparedModule


def prepared_layers(model: nn.Module) -> list[tuple[str, Rounded]]:
    """Returns the prepared layers by their names.

    Raises:
        InvalidInput: there is none.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model is {type(model).__name__}; must be a torch.nn.Module")
    found = list(prepared_in(model))
    if not found:
        raise InvalidInput("the model is not prepared; call rooftile.qat.prepare first")
    return found


def prepared_in(model: nn.Module) -> Iterator[tuple[str, Rounded]]:
    """Yields the prepared layers, and prepared weights of other modules, by their names."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model is {type(model).__name__}; must be a torch.nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, Prepared):
            yield name, module
        elif isinstance(module, PreparedModule):
            yield from ((tensor.qat.name, tensor) for tensor in module.qat_tensors.values())
