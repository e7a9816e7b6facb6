"""The tensors of Nemotron-H: files number blocks of one part each."""

from __future__ import annotations

from rooftile.errors import InvalidInput
from rooftile.models.checkpoints.stored import StoredTensor

# tensors that one kind of block has, and the words for each kind
_OWN = {"A_log": "mamba", "q_proj.weight": "self_attn", "up_proj.weight": "mlp", "gate.weight": "mlp"}
_WORDS = {"mamba": "Mamba-2", "self_attn": "attention", "mlp": "a feed-forward or experts"}


def by_layer(
    found: dict[str, StoredTensor], mixers: tuple[str, ...], follows: tuple[str | None, ...]
) -> dict[str, StoredTensor]:  # fmt: skip
    """Returns tensors of blocks by the names that other families have for the parts of layers.

    Raises:
        InvalidInput: a block has tensors of another part than config.json says.
    """
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
            if _OWN.get(rest[2], part) != part:
                raise InvalidInput(
                    f"config.json says that block {rest[0]} is {_WORDS[part]}, and the checkpoint has {stored.name}; correct "
                    "config.json, or download both again"
                )
            part = {"mixer": part, "norm": norm}.get(rest[1], rest[1])
            name = f"layers.{n}.{part}.{rest[2]}"
        kept[name] = stored
    return kept
