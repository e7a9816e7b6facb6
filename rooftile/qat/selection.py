"""Finds the layers of a model that are prepared, and the format of each, and checks whether they can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from rooftile.errors import InvalidInput
from rooftile.numerics.block_floating import RULES, Rule
from rooftile.qat.patterns import check_patterns, means, skip_given, skipped
from rooftile.qat.prepared.described import word_of
from rooftile.qat.prepared.layers import PREPARED
from rooftile.qat.prepared.tensors import NamedWeight, places_in
from rooftile.qat.rounding.codes import Rounding
from rooftile.qat.rounding.learned import RANGES
from rooftile.weights.formats import TILE, group_of, parsed, weight_format
from rooftile.weights.quantise import check_rule
from rooftile.weights.two_four import Recipe

Layer = nn.Module | NamedWeight


def chosen_in(
    model: nn.Module, format: str | Mapping[str, str | None] | None, group: int | None, skip: Sequence[str], estimator: str,
    activations: str | None, rule: Rule, has_sparsity: bool,
) -> dict[str, tuple[Layer, Rounding | None]]:  # fmt: skip
    """Returns the layers to prepare by their names, each layer once, however many names it has."""
    if isinstance(format, Mapping):
        if group is not None:
            raise InvalidInput(f"group is {group} and format a dictionary; write the group into its words, as in 'int4:{group}'")
        if skip_given(skip) is not None:
            raise InvalidInput(f"skip is {skip!r} and format a dictionary; write {{pattern: 'auto'}} into it for what stays")
        words = dict(format)
        kinds: tuple[type[nn.Module], ...] = tuple(PREPARED)
    else:
        kinds = (nn.Linear,)
    layers: dict[str, Layer] = {name: layer for name, layer in model.named_modules() if type(layer) in kinds}
    if not has_sparsity and estimator != "lsq":
        layers |= places_in(model)
    if not layers:
        raise InvalidInput(f"{type(model).__name__} has no layer of the class nn.Linear itself, so there is nothing to prepare")
    if isinstance(format, Mapping):
        check_patterns("format", words, list(layers), list(layers))
    else:
        words = {**dict.fromkeys(skipped(skip, model, list(layers)), "auto"), "*": format}
    chosen: dict[str, tuple[Layer, Rounding | None]] = {}
    for name, layer in layers.items():
        word = next((word for pattern, word in words.items() if means(pattern, name)), "auto")
        if word == "auto":
            continue
        if word is None:
            chosen[name] = layer, None
            continue
        kind, its_group = parsed(word)
        if group is not None and its_group is not None:
            raise InvalidInput(f"group is {group!r} and format {word!r}, which has its own; leave group out")
        # an embedding has no activations, and other modules multiply themselves
        inputs = activations if isinstance(layer, nn.Linear) else None
        its_rule = rule if weight_format(kind).has_exponents else RULES[0]
        chosen[name] = layer, Rounding(kind, its_group if its_group is not None else group, estimator, inputs, its_rule)
    if not chosen:
        raise InvalidInput(f"format leaves all {len(layers)} layers as they are; give one of them a format")
    has_exponents = any(rounding and weight_format(rounding.format).has_exponents for _, rounding in chosen.values())
    check_rule(rule, has_exponents, "no layer is in such a format")
    return chosen


def check_sparse(name: str, layer: Layer, sparsity: Recipe | None) -> None:
    """Raises InvalidInput where a layer cannot be so."""
    if sparsity is None or not isinstance(layer, nn.Linear):
        return
    rows, columns = layer.weight.shape
    if columns % 4 or (sparsity.transposable and rows % 4):
        due = "both sizes must be multiples of 4" if sparsity.transposable else "K must be a multiple of 4"
        raise InvalidInput(f"{name}.weight ({rows}, {columns}) cannot be 2:4; {due}: skip this layer")
    if not layer.weight.requires_grad:
        raise InvalidInput(f"{name}.weight is frozen, and 2:4 trains all of a weight; unfreeze it, or skip this layer")


def check_masked_alone(name: str, layer: Layer, estimator: str, activations: str | None) -> None:
    """Checks a layer that is not rounded."""
    if isinstance(layer, nn.Embedding):
        raise InvalidInput(f"{name} is an embedding, and its format is None; only linear layers are made 2:4: leave it out")
    if activations is not None:
        raise InvalidInput(
            f"{name} has the format None and its activations {activations}; both must be in one format: give it {activations}, "
            "or leave activations out"
        )
    if estimator == "lsq":
        raise InvalidInput(f"{name} has the format None; lsq learns scales of {', '.join(RANGES)}: take another estimator")


def check_fits(name: str, layer: Layer, rounding: Rounding) -> None:
    """Raises InvalidInput where a layer cannot be so."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    is_transposed = isinstance(layer, NamedWeight) and layer.transposed
    *outer, rows, columns = weight.mT.shape if is_transposed else weight.shape
    if outer and rounding.format == "fp8_tile" and rows % TILE:
        raise InvalidInput(
            f"{name} has experts of {rows} rows, which tiles of {TILE} would cross; skip it, or take another format"
        )
    if not weight.numel():
        raise InvalidInput(f"{name}.weight ({rows}, {columns}) has no numbers; skip this layer")
    if rounding.activations not in (None, rounding.format):
        raise InvalidInput(
            f"{name} is {rounding.format} and its activations {rounding.activations}; both must be in one format: give it "
            f"{rounding.activations}, or leave activations out"
        )
    if rounding.estimator == "lsq" and rounding.format not in RANGES:
        raise InvalidInput(f"{name} is {rounding.format}; lsq learns scales of {', '.join(RANGES)}: take another estimator")
    try:
        group_of(weight_format(rounding.format), columns, rounding.group)
    except InvalidInput as error:
        raise InvalidInput(f"{name}.weight ({rows}, {columns}) cannot be {word_of(rounding)}: {error}") from None
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.sparse):
        raise InvalidInput(f"{name} is an embedding with max_norm or sparse gradients; prepare it without, or leave it out")
