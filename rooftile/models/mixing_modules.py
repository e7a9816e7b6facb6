"""The modules that may mix the tokens of a layer, by the names that a trained decoder's config.json has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import rooftile.nn
from rooftile.errors import InvalidInput
from rooftile.exact.masks import CAUSAL
from rooftile.exact.projections import Projections
from rooftile.models.config import ModelConfig

# a name, or a name with the options of its module
Mixer = str | Mapping[str, Any]

# the class in `rooftile.nn`, and whether it takes a mask
MIXERS: dict[str, tuple[str, bool]] = {
    "attention": ("Attention", True),
    "linear": ("LinearAttention", True),
    "performer": ("Performer", True),
    "linformer": ("Linformer", False),
    "sparse_transformer": ("SparseTransformer", False),
    "reformer": ("Reformer", True),
    "routing": ("Routing", True),
    "native_sparse": ("NativeSparse", False),
}
# the decoder decides these; the values are plain, which config.json can hold
_DECIDED = ("bias", "context_dim", "device", "dtype", "head_dim", "kv_heads", "mask")
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
    for option, value in found.items():
        if option in _DECIDED:
            raise InvalidInput(f"the mixer {name} has the option {option}, which the decoder decides; leave it out")
        if not isinstance(value, _PLAIN):
            raise InvalidInput(f"the mixer {name} has {option}={value!r}; must be a number, a string, a bool or None")
    return found


def made(mixer: Mapping[str, Any], config: ModelConfig) -> Projections:
    """The module of one layer, without biases in its projections, causal if its method has a causal form."""
    name, takes_mask = MIXERS[mixer["name"]]
    options: dict[str, Any] = {option: value for option, value in mixer.items() if option != "name"}
    if takes_mask:
        options["mask"] = CAUSAL
    module: Projections = getattr(rooftile.nn, name)(
        config.hidden, config.heads, bias=False, head_dim=config.head_dim, kv_heads=config.kv_heads, **options
    )
    return module


def is_served(mixers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the inference decoder computes all layers: as causal softmax attention, or Native Sparse Attention of one kind."""
    sparse = [_options(mixer) for mixer in mixers if mixer["name"] == "native_sparse"]
    rest = [mixer for mixer in mixers if mixer["name"] != "native_sparse"]
    return all(mixer["name"] == "attention" and not _options(mixer) for mixer in rest) and all(o == sparse[0] for o in sparse)


def served_mixers(mixers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The words of config.json for mixers that the inference decoder computes; none if all are exact attention."""
    sparse = [_options(mixer) for mixer in mixers if mixer["name"] == "native_sparse"]
    if not sparse:
        return {}
    return {"layer_mixers": [mixer["name"] for mixer in mixers], "native_sparse": sparse[0]}


def _options(mixer: Mapping[str, Any]) -> dict[str, Any]:
    """A mixer's options, less the one that changes no result."""
    return {option: value for option, value in mixer.items() if option not in ("name", "backend")}
