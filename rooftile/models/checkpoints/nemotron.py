"""The tensors of Nemotron-H: files number blocks of one part each."""

from __future__ import annotations

from rooftile.models.checkpoints.stored import StoredTensor


def by_layer(
    found: dict[str, StoredTensor], mixers: tuple[str, ...], follows: tuple[str | None, ...]
) -> dict[str, StoredTensor]:  # fmt: skip
    """Returns tensors of blocks by the names that other families have for the parts of layers."""
    places: list[tuple[int, str, str]] = []
    for n, (mixer, following) in enumerate(zip(mixers, follows, strict=True)):
        places.append((n, "self_attn" if mixer == "attention" else "mamba", "input_layernorm"))
        if following is not None:
            places.append((n, "mlp", "post_attention_layernorm"))
    kept: dict[str, StoredTensor] = {}
    for name, stored in found.items():
        first, *rest = name.split(".", 3)
        if first == "layers" and len(rest) == 3 and rest[0].isdecimal() and int(rest[0]) < len(places):
            n, part, norm = places[int(rest[0])]
            part = {"mixer": part, "norm": norm}.get(rest[1], rest[1])
            name = f"layers.{n}.{part}.{rest[2]}"
        kept[name] = stored
    return kept
