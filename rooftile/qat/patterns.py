"""Patterns of names: which layers of a model they mean, and a sentence for one that means none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

from torch import nn

from rooftile.errors import InvalidInput
from rooftile.weights.formats import matches

# the layers that stay as they are, unless the caller names others; many models have none of the name
SKIPPED = ("lm_head",)


class Name(str):
    """The whole name of one layer, in place of a pattern: "0" as a pattern means "blocks.0", too."""


def means(pattern: str, name: str) -> bool:
    """Whether a pattern means a layer of this name."""
    if isinstance(pattern, Name):
        return pattern == name
    # "lm_head" means the model's own, wherever it is
    return matches(pattern, name) or name.endswith(f".{pattern}")


def check_patterns(argument: str, patterns: Iterable[object], layers: Sequence[str], near: Sequence[str]) -> None:
    """Raises InvalidInput for a pattern that matches none of the layers' names.

    argument: of the caller, where the patterns stand.
    near: the names to choose suggestions from.
    """
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InvalidInput(f"{argument} has the pattern {pattern!r}; must be a pattern of names, such as '*.mlp.*'")
        if not any(means(pattern, name) for name in layers):
            found = ", ".join(get_close_matches(pattern, near, n=3, cutoff=0.0))
            raise InvalidInput(f"{argument} has the pattern {pattern!r}, which matches no layer; near names are {found}")


def patterns_of(skip: Sequence[str] | str) -> tuple[str, ...]:
    """Returns the patterns of `skip`, which may be one.

    Raises:
        InvalidInput: it is something else.
    """
    if isinstance(skip, str):
        return (skip,)
    if not isinstance(skip, Iterable):
        raise InvalidInput(f"skip is {skip!r}; must be patterns of names, such as ('lm_head',), or () for none")
    return tuple(skip)


def skip_given(skip: Sequence[str] | str) -> Sequence[str] | str | None:
    """Returns `skip` where the caller has named layers, else None."""
    return None if patterns_of(skip) in ((), SKIPPED) else skip


def skipped(skip: Sequence[str] | str, model: nn.Module, layers: Sequence[str]) -> tuple[str, ...]:
    """Returns the patterns of `skip`.

    layers: the names of those that may change.

    Raises:
        InvalidInput: one of them matches no layer of the model, and they are not `SKIPPED`.
    """
    patterns = patterns_of(skip)
    if patterns != SKIPPED:
        # a norm, or a layer of another class, stays anyway
        check_patterns("skip", patterns, list(_leaves(model)), layers)
    return patterns


def _leaves(model: nn.Module) -> Iterator[str]:
    """Yields the names of modules without modules inside, and of linear layers and embeddings, which may have some."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) or next(module.children(), None) is None:
            yield name
