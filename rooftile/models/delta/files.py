"""The names that families have for the parts of a layer with a gated delta net."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from rooftile.models.delta.delta_layer import DeltaLayer


def rows_of(layer: DeltaLayer, family: str) -> dict[str, int]:
    """Returns the modules that the first projection is in a checkpoint, and their rows, in its order."""
    sizes = layer.sizes
    keys, width, heads = sizes.keys, sizes.width, sizes.value_heads
    match family:
        case "qwen3_next":
            return {"in_proj_qkvz": sizes.convolved + width, "in_proj_ba": 2 * heads}
        case "olmo_hybrid":
            return {"q_proj": keys, "k_proj": keys, "v_proj": width, "g_proj": width, "b_proj": heads, "a_proj": heads}
        case _:
            return {"in_proj_qkv": sizes.convolved, "in_proj_z": width, "in_proj_b": heads, "in_proj_a": heads}


def output_of(family: str) -> str:
    """Returns the name of the last projection."""
    return "o_proj" if family == "olmo_hybrid" else "out_proj"


def tensors_of(layer: DeltaLayer, family: str) -> Iterator[tuple[str, Tensor]]:
    """Yields what the layer has beside its large projections."""
    # a checkpoint has the weights of a convolution with one input channel for each output
    yield "conv1d.weight", layer.conv_weight[:, None]
    yield from (("A_log", layer.A_log), ("dt_bias", layer.dt_bias))
    yield "o_norm.weight" if family == "olmo_hybrid" else "norm.weight", layer.norm_weight
