"""A converted model as a checkpoint: its codes are there already."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from rooftile.errors import InvalidInput
from rooftile.nn.converted import Converted
from rooftile.nn.quantised_linear import QuantisedLinear
from rooftile.nn.sparse_linear import SparseLinear
from rooftile.qat.rounding.codes import Rounding
from rooftile.weights.files import two_four
from rooftile.weights.files.compressed_tensors import tensors_of
from rooftile.weights.files.two_four import LAYOUT
from rooftile.weights.formats import ROW, TILE


def converted_layers(model: nn.Module) -> dict[str, Converted]:
    """Returns the converted layers of a model by their names, each once."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Converted)}


def check_converted(layers: dict[str, Converted], layout: str) -> None:
    """Checks that converted layers can be stored.

    Raises:
        InvalidInput: a layout does not have one of them.
    """
    for name, layer in layers.items():
        if layout == LAYOUT and not isinstance(layer, SparseLinear):
            what = getattr(layer, "format", "codes")
            raise InvalidInput(f"{name} is converted to {what}; the layout {LAYOUT!r} has 2:4 alone: leave layout out")
        if layout == "dense" and isinstance(layer, SparseLinear) and layer.scales is not None:
            raise InvalidInput(f"{name} is 2:4 with scales; write layout={LAYOUT!r}, or save the model before it is converted")
        if layout == "dense" and isinstance(layer, QuantisedLinear):
            given = [part for part in ("zeros", "order", "input_scale") if getattr(layer, part) is not None]
            if given:
                raise InvalidInput(f"{name} has {given[0]}, which rooftile.qat.save does not write; call its to_linear() first")


def stored(model: nn.Module, layers: dict[str, Converted], layout: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a converted model by their names in a checkpoint, each tensor once."""
    seen: set[int] = set()
    tied = tied_head(model)
    own = {f"{name}.{suffix}" for name, layer in layers.items() for suffix in (*dict(layer.named_buffers()), "weight")}
    for name, x in model.state_dict(keep_vars=True).items():
        if name not in own and id(x) not in seen:
            seen.add(id(x))
            yield name, x.detach()
    for name, layer in layers.items():
        if layer is tied:
            continue
        if layer.is_conv1d:
            yield f"{name}.weight", layer.numbers().T
            continue
        if layout == "numbers":
            yield f"{name}.weight", layer.numbers()
            continue
        for suffix, part in _parts(layer, layout).items():
            yield f"{name}.{suffix}", part


def _parts(layer: Converted, layout: str) -> dict[str, Tensor]:
    if isinstance(layer, QuantisedLinear):
        return tensors_of(layer.quantised)
    assert isinstance(layer, SparseLinear), "there is no other kind"
    return two_four.tensors_of(layer.sparse) if layout == LAYOUT else {"weight": layer.numbers()}


def rounding_of(layer: QuantisedLinear, by_rows: bool) -> Rounding:
    """Returns how a converted layer was rounded, as a configuration describes it."""
    group = None
    if layer.format == "int4":
        group = ROW if by_rows else layer.group
        # the value that stands for the default in a prepared layer
        group = None if group == TILE else group
    return Rounding(layer.format, group, "straight", layer.activations, layer.rule)


def tied_head(model: nn.Module) -> nn.Module | None:
    """Returns the head of a model of Transformers that is stored as its embedding; None if there is none."""
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return None
    found: nn.Module | None = model.get_output_embeddings()  # type: ignore[operator]
    return found


def roundings(model: nn.Module, layers: dict[str, Converted]) -> tuple[dict[str, Rounding], list[str]]:
    """Returns how the layers that are stored as codes were rounded, and the names of linear layers that are stored as numbers."""
    tied = tied_head(model)
    coded = {
        name: layer
        for name, layer in layers.items()
        if isinstance(layer, QuantisedLinear) and layer is not tied and not layer.is_conv1d
    }
    # a group of a whole row is one scale for each row, whatever the model's sizes are
    by_rows = all(layer.group == layer.in_features for layer in coded.values() if layer.format == "int4")
    formats = {name: rounding_of(layer, by_rows) for name, layer in coded.items()}
    linear = (name for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Converted))
    return formats, [name for name in linear if name not in formats]
