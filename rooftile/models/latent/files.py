"""The names of the parts of a layer with multi-head latent attention."""

from __future__ import annotations

from collections.abc import Iterator

from rooftile.models.latent.latent_layer import LatentLayer
from rooftile.models.projection import Norm, Projection


def projections_of(layer: LatentLayer) -> Iterator[tuple[Projection, dict[str, int]]]:
    """Yields the projections before the mixing, each with the modules that it is in a checkpoint, and their rows."""
    sizes = layer.sizes
    first = "q_proj" if layer.queries is None else "q_a_proj"
    yield layer.first, {first: layer.first.outputs - sizes.kept, "kv_a_proj_with_mqa": sizes.kept}
    if layer.queries is not None:
        yield layer.queries, {"q_b_proj": layer.queries.outputs}
    yield layer.keys_values, {"kv_b_proj": layer.keys_values.outputs}


def norms_of(layer: LatentLayer) -> Iterator[tuple[str, Norm | None]]:
    """Yields the norms of latents by their names."""
    yield from (("q_a_layernorm", layer.q_norm), ("kv_a_layernorm", layer.kv_norm))
