"""Fills a decoder's projections with quantised weights, one tensor at a time; all else is filled with plain tensors.

Projections that are one here and several in the checkpoint (q, k, v; gate, up) become one weight where their formats go together:
scales for a tensor are scales for its rows, and one scale for all activations becomes the largest of the parts'. Tiles of 128
rows must end where parts end, and columns must be in one order; other parts stay apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.models.checkpoints import quantised_experts, weights
from rooftile.models.checkpoints.experts import expert_names_of
from rooftile.models.checkpoints.names import names_of
from rooftile.models.checkpoints.places import projections_of
from rooftile.models.checkpoints.quantised_head import fill_head
from rooftile.models.checkpoints.stored import Share, StoredTensor, cut_tensors
from rooftile.models.checkpoints.whole_modules import WholeModules, read_whole
from rooftile.models.config import ModelConfig
from rooftile.models.layers import Layer
from rooftile.models.projection import Projection
from rooftile.weights import QuantisedWeight
from rooftile.weights.files.plan import Quantiser, Reader
from rooftile.weights.formats import TILE
from rooftile.weights.two_four import TwoFour

# scales of a cache in FP8, which ours finds anew
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".k_proj.output_scale", ".v_proj.output_scale")


class Filled(Protocol):
    """A decoder, as far as it is filled here."""

    config: ModelConfig
    layers: Sequence[Layer]

    @property
    def embedding(self) -> Tensor:
        """(vocab, hidden)."""
        ...

    @property
    def head(self) -> Tensor:
        """(vocab, hidden)."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the places of plain tensors by their names."""


def load(
    config: ModelConfig, decoder: Filled, files: Iterable[Path], reader: Reader, on_layer: Callable[[Layer], None] | None = None,
    shares: Mapping[str, Share] | None = None,
) -> None:  # fmt: skip
    """Fills a decoder whose projections wait for their weights; calls `on_layer` with each layer that has its projections'.

    `shares` says which part of which plain tensor a rank holds (`rooftile.models.checkpoints.shares`).

    Raises:
        InvalidInput: tensors are missing, unexpected, of other shapes, or cannot be quantised.
    """
    projections = list(_projections(config, decoder))
    experts = quantised_experts.weights_of(config, decoder.layers)
    quantised_experts.check(config, experts, reader)
    head = [] if config.tie else ["lm_head"]
    # patterns for one's own quantising mean projections; a checkpoint's targets may mean the head, too
    modules = [name for _, parts in projections for name in parts] + [name for one in experts for name in one.modules]
    reader.check(modules + head)
    with ExitStack() as stack:
        found = weights.stored_in(config, files, stack)
        has_head = bool(head) and _is_quantised(found, reader)
        whole = read_whole(shares or {}, found, modules + head * has_head, reader, transposed=config.family == "gpt2")
        found = cut_tensors(found, {name: one for name, one in (shares or {}).items() if name not in whole.shares})
        for name in [name for name in found if name.endswith(CACHE_SCALES)]:
            del found[name]
        taken = {name: take_module(found, name, reader) for _, parts in projections for name in parts if reader.covers(name)}
        if has_head:
            tensors, shape = _read_all(take_module(found, "lm_head", reader)), (config.vocab_size, config.hidden)
            first = (shares or {})["lm_head.weight"].cut[0][0].start if shares else 0
            fill_head(decoder.head, _read(config, reader, "lm_head", tensors, shape), first)
        # before the projections: a layer that has them is whole
        filled = quantised_experts.fill(experts, found, expert_names_of(config), reader, whole, decoder.embedding.device)
        separate = _fill(config, decoder, projections, taken, reader, whole, on_layer)
        places = dict(decoder.tensors()) | separate
        for name in filled:
            del places[name]
        _leave_zero_biases(found, places, taken)
        if head and "lm_head.weight" not in found:
            places.pop("lm_head.weight", None)
        for stored_one, place in weights.matched(config, places, found):
            place.copy_(stored_one.get_tensor())
        weights.report_progress(1.0)


def _projections(config: ModelConfig, decoder: Filled) -> Iterator[tuple[Projection, dict[str, int]]]:
    """Yields all projections with the checkpoint's names of their parts."""
    folder = names_of(config).layers
    for n, layer in enumerate(decoder.layers):
        for projection, parts in projections_of(layer, config):
            yield projection, {f"{folder}.{n}.{name}": rows for name, rows in parts.items()}


def _is_quantised(found: dict[str, StoredTensor], reader: Reader) -> bool:
    return any(f"lm_head.{name}" in found for name in ("weight_scale", "qweight", "_weight_scale", "weight_values"))


def take_module(found: dict[str, StoredTensor], module: str, reader: Reader) -> dict[str, StoredTensor]:
    """Takes the tensors of a module out of all that are stored."""
    needed, optional = reader.suffixes(module)
    missing = [name for name in needed if f"{module}.{name}" not in found]
    if missing:
        raise InvalidInput(
            f"the checkpoint lacks {', '.join(f'{module}.{name}' for name in missing)}, which its quantization_config asks for; "
            "download it again"
        )
    names = (*needed, *(name for name in optional if f"{module}.{name}" in found))
    return {name: found.pop(f"{module}.{name}") for name in names}


def _leave_zero_biases(found: dict[str, StoredTensor], places: dict[str, Tensor], modules: Iterable[str]) -> None:
    """Leaves biases out that are zeros, where the model has no bias: AutoGPTQ wrote one for each projection."""
    for name in [f"{module}.bias" for module in modules]:
        if name in found and name not in places and not found[name].get_tensor().any():
            del found[name]


def _read(
    config: ModelConfig, reader: Reader, module: str, tensors: dict[str, Tensor], shape: tuple[int, ...]
) -> QuantisedWeight | TwoFour:
    N, K = shape
    if config.family == "gpt2" and "weight" in tensors and tuple(tensors["weight"].shape) == (K, N):
        # GPT-2 keeps its weights as (in, out)
        tensors["weight"] = tensors["weight"].T
    if "weight" in tensors and tuple(tensors["weight"].shape) != (N, K):
        raise InvalidInput(f"{module}.weight is {tuple(tensors['weight'].shape)}, due {(N, K)}")
    return reader.read(module, tensors, (N, K))


def _read_all(stored: dict[str, StoredTensor]) -> dict[str, Tensor]:
    """Reads tensors, which lie in their file: it is mapped."""
    return {name: one.get_tensor() for name, one in stored.items()}


def _owned(
    weight: QuantisedWeight | TwoFour, stored: Iterable[Tensor], device: torch.device
) -> QuantisedWeight | TwoFour:  # fmt: skip
    """The weight on a device, with no tensor in its file: a write to the file would change the model, or end the process."""
    if device.type != "cpu":
        return weight.to(device)
    mapped = {x.untyped_storage().data_ptr() for x in stored}
    parts = {field.name: getattr(weight, field.name) for field in fields(weight)}
    lent = {name: x for name, x in parts.items() if isinstance(x, Tensor) and x.untyped_storage().data_ptr() in mapped}
    copies: dict[str, Any] = {name: x.clone() for name, x in lent.items()}
    return replace(weight, **copies)


def _fill(
    config: ModelConfig, decoder: Filled, projections: list[tuple[Projection, dict[str, int]]],
    taken: dict[str, dict[str, StoredTensor]], reader: Reader, whole: WholeModules, on_layer: Callable[[Layer], None] | None,
) -> dict[str, Tensor]:  # fmt: skip
    """Fills projections; returns the places of weights that stay plain beside quantised ones."""
    separate: dict[str, Tensor] = {}
    layers = list(decoder.layers)
    for done, (projection, names) in enumerate(projections):
        weights.report_progress(done / len(projections))
        # the one before this was the last of its layer
        while on_layer is not None and projection not in layers[0].projections:
            on_layer(layers.pop(0))
        if not taken.keys() & names.keys():
            projection.fill(None)
            continue
        parts: list[QuantisedWeight | TwoFour | Tensor] = []
        for name, rows in names.items():
            if name in taken:
                tensors = _read_all(taken[name])
                found = _read(config, reader, name, tensors, whole.shape(name, (rows, projection.inputs)))
                parts.append(_owned(whole.part(name, found), tensors.values(), decoder.embedding.device))
            else:
                separate[f"{name}.weight"] = projection.placement.parameter(rows, projection.inputs).detach()
                parts.append(separate[f"{name}.weight"])
        projection.fill(merged(parts))
    return separate


def merged(parts: Sequence[QuantisedWeight | TwoFour | Tensor]) -> list[QuantisedWeight | TwoFour | Tensor]:
    """Joins neighbours whose formats go together."""
    found: list[QuantisedWeight | TwoFour | Tensor] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, QuantisedWeight) and isinstance(last, QuantisedWeight) and _go_together(last, part):
            found[-1] = _joined(last, part)
        elif isinstance(part, TwoFour) and isinstance(last, TwoFour) and _alike(last, part):
            found[-1] = _joined_sparse(last, part)
        else:
            found.append(part)
    return found


def _go_together(a: QuantisedWeight, b: QuantisedWeight) -> bool:
    if (a.format, a.group) != (b.format, b.group) or a.scales.dtype != b.scales.dtype:
        return False
    if (a.zeros is None) != (b.zeros is None) or (a.input_scale is None) != (b.input_scale is None):
        return False
    if a.format == "fp8_tile" and a.shape[0] % TILE:
        return False
    if a.order is None or b.order is None:
        return a.order is b.order
    return torch.equal(a.order, b.order)


def _joined(a: QuantisedWeight, b: QuantisedWeight) -> QuantisedWeight:
    codes, scales = (torch.cat(pair) for pair in ((a.codes, b.codes), (a.scales, b.scales)))
    zeros = None if a.zeros is None or b.zeros is None else torch.cat((a.zeros, b.zeros))
    outer = given = None
    if a.outer is not None and b.outer is not None:
        outer = torch.cat([x.outer.expand(x.shape[0], 1) for x in (a, b) if x.outer is not None])
    if a.input_scale is not None and b.input_scale is not None:
        given = torch.maximum(a.input_scale, b.input_scale)
    shape = (a.shape[0] + b.shape[0], a.shape[1])
    return QuantisedWeight(codes, scales, zeros, a.order, a.format, a.group, shape, outer, given)


def _alike(a: TwoFour, b: TwoFour) -> bool:
    return a.dtype == b.dtype and (a.scales is None) == (b.scales is None)


def _joined_sparse(a: TwoFour, b: TwoFour) -> TwoFour:
    values, places = (torch.cat(pair) for pair in ((a.values, b.values), (a.places, b.places)))
    scales = None if a.scales is None or b.scales is None else torch.cat((a.scales, b.scales))
    return TwoFour(values, places, (a.shape[0] + b.shape[0], a.shape[1]), scales)


def quantise_decoder(decoder: Filled, quantiser: Quantiser) -> None:
    """Quantises the projections of a decoder in place, as they are when a checkpoint is read."""
    projections = list(_projections(decoder.config, decoder))
    experts = quantised_experts.weights_of(decoder.config, decoder.layers)
    quantised_experts.check(decoder.config, experts, quantiser)
    quantiser.check([name for _, names in projections for name in names] + [name for one in experts for name in one.modules])
    quantised_experts.quantise(experts, quantiser)
    for projection, names in projections:
        if projection.weight is None:
            raise InvalidInput("the decoder's weights are quantised already; leave weights out")
        rows = projection.weight.detach().split(list(names.values()))
        if any(quantiser.covers(name) for name in names):
            parts = [_of_plain(quantiser, name, w) for name, w in zip(names, rows, strict=True)]
            projection.fill(merged(parts))


def _of_plain(quantiser: Quantiser, name: str, w: Tensor) -> QuantisedWeight | TwoFour | Tensor:
    if not quantiser.covers(name):
        return w.clone()
    return quantiser.read(name, {"weight": w}, (w.shape[0], w.shape[1]))
