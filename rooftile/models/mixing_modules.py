"""The modules that may mix the tokens of a layer, by the names that a trained decoder's config.json has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

import rooftile.nn
from rooftile.errors import InvalidInput
from rooftile.exact.masks import CAUSAL
from rooftile.models.config import ModelConfig

# a name, or a name with the options of its module
Mixer = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MixingModule:
    """A module that mixes tokens.

    Args:
        name: its class in `rooftile.nn`.
        takes_mask: whether it takes a mask.
        attends: whether it has queries, keys and values by heads, which rotary positions rotate.
        takes_eps: whether it has a norm.
    """

    name: str
    takes_mask: bool = False
    attends: bool = True
    takes_eps: bool = False

    @property
    def decided(self) -> tuple[str, ...]:
        """The options that the decoder decides."""
        if self.attends:
            return "bias", "context_dim", "device", "dtype", "head_dim", "kv_heads", "mask"
        return "bias", "device", "dim", "dtype", "eps"


MIXERS: dict[str, MixingModule] = {
    "attention": MixingModule("Attention", takes_mask=True),
    "linear": MixingModule("LinearAttention", takes_mask=True),
    "performer": MixingModule("Performer", takes_mask=True),
    "linformer": MixingModule("Linformer"),
    "sparse_transformer": MixingModule("SparseTransformer"),
    "reformer": MixingModule("Reformer", takes_mask=True),
    "routing": MixingModule("Routing", takes_mask=True),
    "native_sparse": MixingModule("NativeSparse"),
    "mamba": MixingModule("Mamba", attends=False),
    "mamba2": MixingModule("Mamba2", attends=False, takes_eps=True),
    "delta": MixingModule("GatedDeltaNet", attends=False, takes_eps=True),
}
# values that config.json can hold
_PLAIN = (bool, int, float, str, type(None))


def check_mixers(mixers: Mixer | Sequence[Mixer], layers: int) -> tuple[dict[str, Any], ...]:
    """One dictionary per layer, with a name and options, from one mixer for all layers or one for each.

    Raises:
        InvalidInput: a name is unknown, an option is not the module's to take, or there are more or fewer mixers than layers.
    """
    if not isinstance(mixers, str | Mapping | Sequence):
        raise InvalidInput(f"mixers is {mixers!r}; must be a mixer, or one for each layer")
    each = [mixers] * layers if isinstance(mixers, str | Mapping) else list(mixers)
    if len(each) != layers:
        raise InvalidInput(f"mixers are {len(each)}; must be one for all layers, or one for each of {layers}")
    return tuple(_checked(mixer) for mixer in each)


def _checked(mixer: Mixer) -> dict[str, Any]:
    found = {"name": mixer} if isinstance(mixer, str) else dict(mixer) if isinstance(mixer, Mapping) else {}
    name = found.get("name")
    if name not in MIXERS:
        raise InvalidInput(f"a mixer is {mixer!r}; must be a name, or a dictionary with a name, of {', '.join(MIXERS)}")
    check_options(f"the mixer {name}", found, MIXERS[name].decided)
    return found


def check_options(what: str, options: Mapping[str, Any], decided: Sequence[str]) -> None:
    """Checks the options of a module.

    Raises:
        InvalidInput: the decoder decides one of them, or config.json cannot hold it.
    """
    for option, value in options.items():
        if option in decided:
            raise InvalidInput(f"{what} has the option {option}, which the decoder decides; leave it out")
        if not isinstance(value, _PLAIN):
            raise InvalidInput(f"{what} has {option}={value!r}; must be a number, a string, a bool or None")


def made(mixer: Mapping[str, Any], config: ModelConfig) -> nn.Module:
    """The module of one layer, without biases in its projections, causal if its method has a causal form."""
    kind = MIXERS[mixer["name"]]
    options: dict[str, Any] = {option: value for option, value in mixer.items() if option != "name"}
    if kind.takes_mask:
        options["mask"] = CAUSAL
    if kind.takes_eps:
        options["eps"] = config.norm_eps
    module: type[nn.Module] = getattr(rooftile.nn, kind.name)
    if not kind.attends:
        return module(config.hidden, bias=False, **options) if kind.name != "GatedDeltaNet" else module(config.hidden, **options)
    return module(config.hidden, config.heads, bias=False, head_dim=config.head_dim, kv_heads=config.kv_heads, **options)


def options_of(mixer: Mapping[str, Any]) -> dict[str, Any]:
    """A mixer's options, less the one that changes no result."""
    return {option: value for option, value in mixer.items() if option not in ("name", "backend")}
