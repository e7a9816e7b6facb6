"""Reads config.json of our own family: Llama's parts, and in each layer any mixer and any feed-forward.

`TrainableDecoder.save` writes it. `layer_mixers` and `layer_feed_forwards` name the parts of each layer, null nothing, and a
section of a part's name has its sizes, the fields of a class of `rooftile.models`:

    "model_type": "rooftile",
    "layer_mixers": ["mamba2", "attention"],
    "layer_feed_forwards": ["experts", "dense"],
    "mamba2": {"heads": 8, "head_dim": 16, "state": 32},
    "experts": {"experts": 16, "hidden": 32, "router": {"active": 3}}
"""

from __future__ import annotations

from typing import Any

from rooftile.models.common_fields import Fields, decoder_fields
from rooftile.models.delta.sizes import DeltaSizes
from rooftile.models.experts.sizes import ExpertSizes
from rooftile.models.linear.sizes import LinearSizes, PerformerSizes
from rooftile.models.mamba.sizes import Mamba2Sizes, MambaSizes
from rooftile.models.mixers import SPARSE, mixers_of, section_of
from rooftile.moe.router import Router
from rooftile.weights.files.settings import Settings

SECTIONS: dict[str, type] = SPARSE | {
    "linear": LinearSizes, "performer": PerformerSizes, "mamba": MambaSizes, "mamba2": Mamba2Sizes, "delta": DeltaSizes,
}  # fmt: skip


def hybrid(settings: Settings) -> Fields:
    """Reads a decoder of our own."""
    if settings.values.get("layer_mixers") is None:
        raise settings.refused(_unserved(settings.values.get("mixers")))
    fields = decoder_fields(settings, "rooftile")
    return fields | mixers_of(settings, fields["layers"], SECTIONS) | _feed_forwards(settings, fields["layers"])


def _unserved(mixers: Any) -> str:
    """Says why a decoder without `layer_mixers` is refused: `TrainableDecoder` writes none where a mixer is not served."""
    names = [str(one.get("name")) for one in mixers if isinstance(one, dict)] if isinstance(mixers, list) else []
    each = f"layers that mix tokens by {', '.join(dict.fromkeys(names))[:80]}" if names else "no layer_mixers"
    return (
        f"has {each}; served are attention, {', '.join(SECTIONS)}, each alike in all its layers: "
        "rooftile.models.TrainableDecoder.load reads the others"
    )


def _feed_forwards(settings: Settings, layers: int) -> Fields:
    said = settings.values.get("layer_feed_forwards")
    if said is None:
        said = ["dense"] * layers
    if not isinstance(said, list) or len(said) != layers or any(each not in ("dense", "experts", None) for each in said):
        raise settings.refused(
            f"has layer_feed_forwards {repr(said)[:60]}; must be 'dense', 'experts' or null for each of {layers} layers"
        )
    if "experts" in said:
        return {"feed_forwards": tuple(said), "experts": _experts(settings)}
    if settings.section("experts"):
        raise settings.refused("has experts and no layer with them in layer_feed_forwards; name them, or leave it out")
    return {"feed_forwards": tuple(said)}


def _experts(settings: Settings) -> ExpertSizes:
    section = Settings(settings.section("experts"), settings.folder)
    sizes: ExpertSizes = section_of(settings, "experts", ExpertSizes, router=section_of(section, "router", Router))
    if sizes.biases or sizes.router_bias or sizes.activation == "relu2":
        raise settings.refused("has experts with biases, router_bias or activation 'relu2'; must have none, and a gate")
    return sizes
