"""Fills experts with quantised weights, as a checkpoint has them or as `weights=` asks for.

The parts of all experts of a layer become one weight where their formats go together; where they do not, or a product has no such
weight, they are dequantised, one part at a time. Routers stay in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.models.checkpoints.experts import ExpertNames, expert_names_of
from rooftile.models.checkpoints.gpt_oss import BlockTensor
from rooftile.models.checkpoints.names import names_of
from rooftile.models.checkpoints.stored import StoredTensor
from rooftile.models.checkpoints.whole_modules import WholeModules
from rooftile.models.config import ModelConfig
from rooftile.models.experts.feed_forward import QUANTISED, ExpertFeedForward
from rooftile.models.layers import Layer
from rooftile.moe.quantised import joined, stacked
from rooftile.weights import QuantisedWeight
from rooftile.weights.files.plan import Quantiser, Reader
from rooftile.weights.two_four import TwoFour


class Weight(NamedTuple):
    """A weight of a layer's experts, or of their shared network, and the modules that it is in a checkpoint, in its order."""

    layer: int
    feed_forward: ExpertFeedForward
    name: str
    modules: tuple[str, ...]
    rows: int  # in each module, and of each expert of one that has all
    has_all: bool
    """Whether each module has the rows of all experts."""

    @property
    def inputs(self) -> int:
        """The numbers of a row."""
        return self.feed_forward.shapes[self.name][-1]


def weights_of(config: ModelConfig, layers: Sequence[Layer]) -> list[Weight]:
    """Returns all weights of experts that may be quantised."""
    if config.experts is None:
        return []
    names, folder = expert_names_of(config), names_of(config).layers
    found = []
    for n, layer in enumerate(layers):
        if isinstance(layer.feed_forward, ExpertFeedForward):
            each = (name for name in QUANTISED if name in layer.feed_forward.shapes)
            found += [_weight(n, layer.feed_forward, name, names, f"{folder}.{n}") for name in each]
    return found


def _weight(n: int, feed_forward: ExpertFeedForward, name: str, names: ExpertNames, folder: str) -> Weight:
    parts = names.parts[:-1] if name.endswith("up") else names.parts[-1:]
    rows = feed_forward.shapes[name][-2] // len(parts)
    has_all = names.stacked and not name.startswith("shared")
    if name.startswith("shared"):
        networks = [names.shared]
    elif has_all:
        networks = [names.experts]
    else:
        first = feed_forward.first
        networks = [f"{names.experts}.{e}" for e in range(first, first + feed_forward.sizes.held)]
    modules = tuple(f"{folder}.{one}.{part}" for one in networks for part in parts)
    return Weight(n, feed_forward, name, modules, rows, has_all)


def check(config: ModelConfig, weights: Sequence[Weight], reader: Reader) -> None:
    """Refuses formats that experts have not.

    Raises:
        InvalidInput: a pattern gives them 2:4, or a checkpoint that has all experts in one tensor has them quantised.
    """
    for weight in weights:
        name = next((module for module in weight.modules if reader.covers(module)), None)
        if name is None:
            continue
        if isinstance(reader, Quantiser) and reader.word(name) == "2:4":
            raise InvalidInput(
                f'weights gives {name} the format "2:4", which experts and what is beside them have not; name what else there '
                f'is, as in {{"*.{names_of(config).attention}.*": "2:4"}}'
            )
        if weight.has_all and not isinstance(reader, Quantiser):
            raise InvalidInput(
                f"the checkpoint has {name} quantised, with all experts in one tensor, which is read in 16 bits; give the 16-bit "
                "checkpoint and weights="
            )


def fill(
    weights: Sequence[Weight], found: dict[str, StoredTensor], names: ExpertNames, reader: Reader, whole_modules: WholeModules,
    device: torch.device,
) -> set[str]:  # fmt: skip
    """Fills weights that are quantised, and makes places for the others; returns the names of places that are filled."""
    filled: set[str] = set()
    for weight in weights:
        feed_forward, name = weight.feed_forward, weight.name
        blocks = [found[module] for module in weight.modules if isinstance(found.get(module), BlockTensor)]
        if len(blocks) == 1 == len(weight.modules) and isinstance(blocks[0], BlockTensor):
            del found[weight.modules[0]]
            codes = whole_modules.part_of_stack(weight.modules[0], blocks[0].quantised())
            assert isinstance(codes, QuantisedWeight)
            feed_forward.fill(name, codes.to(device))
            continue
        covered = [module for module in weight.modules if reader.covers(module)]
        read = {module: _read(weight, module, found, names, reader, whole_modules, device) for module in covered}
        whole = _whole(weight, read)
        feed_forward.fill(name, whole)
        if whole is None and read:
            filled |= _dequantise(weight, read)
    return filled


def _read(
    weight: Weight, module: str, found: dict[str, StoredTensor], names: ExpertNames, reader: Reader,
    whole_modules: WholeModules, device: torch.device,
) -> list[QuantisedWeight]:  # fmt: skip
    """Reads a module: one weight, or one for each expert of a module that has all."""
    shape = (weight.rows, weight.inputs)
    if weight.has_all:
        stored = _taken(found, f"{module}{names.weight}", (weight.feed_forward.sizes.held, *shape))
        return [_quantised(reader, module, {"weight": one}, shape, device) for one in stored]
    needed, optional = reader.suffixes(module)
    missing = [one for one in needed if f"{module}.{one}" not in found]
    if missing:
        raise InvalidInput(
            f"the checkpoint lacks {', '.join(f'{module}.{one}' for one in missing)}, which its quantization_config asks for; "
            "download it again"
        )
    tensors = {one: found.pop(f"{module}.{one}").get_tensor() for one in (*needed, *optional) if f"{module}.{one}" in found}
    if isinstance(reader, Quantiser) and tuple(tensors["weight"].shape) != shape:
        raise InvalidInput(f"{module}.weight is {tuple(tensors['weight'].shape)}, due {shape}")
    codes = whole_modules.part(module, reader.read(module, tensors, whole_modules.shape(module, shape)))
    assert isinstance(codes, QuantisedWeight), "2:4 is refused by check"
    return [codes.to(device)]


def _taken(found: dict[str, StoredTensor], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in found:
        raise InvalidInput(f"the checkpoint lacks {name}; its config.json asks for it")
    stored = found.pop(name)
    if stored.shape() != shape:
        raise InvalidInput(f"{stored.name} is {stored.shape()}, due {shape}")
    return stored.get_tensor()


def _quantised(
    reader: Reader, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], device: torch.device
) -> QuantisedWeight:  # fmt: skip
    weight = reader.read(module, tensors, shape)
    assert not isinstance(weight, TwoFour), "refused by check"
    return weight.to(device)


def _whole(weight: Weight, read: Mapping[str, list[QuantisedWeight]]) -> QuantisedWeight | None:
    """One weight of all modules: the parts of the first expert, then of the second, and so on; None where there is none."""
    if len(read) < len(weight.modules):
        return None
    each = [read[module] for module in weight.modules]
    parts = [part for parts in zip(*each, strict=True) for part in parts] if weight.has_all else [one for (one,) in each]
    return joined(parts) if weight.name.startswith("shared") else stacked(parts)


def _dequantise(weight: Weight, read: Mapping[str, list[QuantisedWeight]]) -> set[str]:
    """Writes dequantised parts into their places, and returns the names of these."""
    whole = getattr(weight.feed_forward, weight.name)
    for module, place in _places(weight, whole):
        for part, one in zip(read.get(module, ()), place if weight.has_all else [place], strict=False):
            one.copy_(part.dequantise(whole.dtype))
    return {f"{module}.weight" for module in read}


def _places(weight: Weight, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields each module with its place in a plain weight, (rows, in), or (E, rows, in) where it has all experts."""
    if weight.has_all:
        yield from zip(weight.modules, whole.split(weight.rows, -2), strict=True)
    else:
        yield from zip(weight.modules, whole.flatten(0, -2).split(weight.rows), strict=True)


def quantise(weights: Sequence[Weight], quantiser: Quantiser) -> None:
    """Quantises the experts of a decoder in place, as they are when a checkpoint is read."""
    for weight in weights:
        whole = getattr(weight.feed_forward, weight.name)
        if not isinstance(whole, Tensor):
            raise InvalidInput("the decoder's weights are quantised already; leave weights out")
        if not any(quantiser.covers(module) for module in weight.modules):
            continue
        shape, read = (weight.rows, weight.inputs), dict[str, list[QuantisedWeight]]()
        for module, place in _places(weight, whole.detach()):
            if quantiser.covers(module):
                each = place if weight.has_all else [place]
                read[module] = [_quantised(quantiser, module, {"weight": w}, shape, w.device) for w in each]
        found = _whole(weight, read)
        if found is None:
            _dequantise(weight, read)
        else:
            weight.feed_forward.fill(weight.name, found)
