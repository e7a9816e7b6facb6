"""Weights that two layers share, such as an embedding and its head: both round them alike, or neither does."""

from __future__ import annotations

from torch import nn

from rooftile.errors import InvalidInput
from rooftile.qat.prepared.described import described
from rooftile.qat.prepared.layers import Prepared, parameter_of


def check_shared(model: nn.Module) -> None:
    """Refuses a weight that one layer rounds or masks as another does not.

    Raises:
        InvalidInput: there is one.
    """
    users: dict[int, dict[str, str]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            words = described(layer.qat) if isinstance(layer, Prepared) else ""
            users.setdefault(id(parameter_of(layer)), {})[name] = words.partition(",")[0]
    for found in users.values():
        if len(set(found.values())) == 1:
            continue
        (one, words), *_ = ((name, words) for name, words in found.items() if words)
        other, others = next((name, others) for name, others in found.items() if others != words)
        if not others:
            raise InvalidInput(
                f"{one} and {other} share a weight, and only {one} is prepared; prepare both, or neither: skip={[one]!r}, or "
                f"{{{one!r}: word, {other!r}: word, ...}}"
            )
        raise InvalidInput(f"{one} is {words} and {other} {others}, and they share a weight; prepare both for one format")
