"""The feed-forwards of a decoder to train, by the names that its config.json has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, cast

from rooftile.errors import InvalidInput
from rooftile.models.experts.sizes import ExpertSizes
from rooftile.models.mixing_modules import check_options
from rooftile.moe.module import DeepSeekMoE
from rooftile.moe.router import Router

# "dense", None for nothing, or experts with the options of `rooftile.nn.DeepSeekMoE` and of its router
Follower = str | Mapping[str, Any] | None

_DECIDED = ("backend", "deterministic", "device", "dtype", "router", "width")


def check_followers(followers: Follower | Sequence[Follower], layers: int) -> tuple[dict[str, Any] | None, ...]:
    """One dictionary per layer, with a name and options, or None, from one feed-forward for all layers or one for each.

    Raises:
        InvalidInput: a name is unknown, an option is not the module's to take, experts differ, or there are more or fewer than
            layers.
    """
    if followers is not None and not isinstance(followers, str | Mapping | Sequence):
        raise InvalidInput(f"feed_forwards is {followers!r}; must be a feed-forward, or one for each layer")
    one = followers is None or isinstance(followers, str | Mapping)
    each: list[Any] = [followers] * layers if one else list(cast("Sequence[Follower]", followers))
    if len(each) != layers:
        raise InvalidInput(f"feed_forwards are {len(each)}; must be one for all layers, or one for each of {layers}")
    found = tuple(_checked(follower) for follower in each)
    experts = [one for one in found if one is not None and one["name"] == "experts"]
    if any(one != experts[0] for one in experts):
        raise InvalidInput("feed_forwards have experts with several options; must be alike in all layers that have experts")
    return found


def _checked(follower: Follower) -> dict[str, Any] | None:
    if follower is None:
        return None
    found = {"name": follower} if isinstance(follower, str) else dict(follower) if isinstance(follower, Mapping) else {}
    name = found.get("name")
    if name not in ("dense", "experts") or (name == "dense" and len(found) > 1):
        raise InvalidInput(
            f"a feed-forward is {follower!r}; must be 'dense', None, or a dictionary with the name 'experts' and options"
        )
    check_options("the experts", found, _DECIDED)
    if found.get("activation", "silu") == "relu2":
        raise InvalidInput("the experts have activation='relu2'; must have a gate, as checkpoints have the names of one")
    return found


def experts_of(width: int, options: Mapping[str, Any]) -> DeepSeekMoE:
    """Returns the experts of a layer.

    Raises:
        InvalidInput: the options do not go together.
    """
    names = [field.name for field in fields(Router)]
    routed = {name: value for name, value in options.items() if name in names}
    rest = {name: value for name, value in options.items() if name not in (*names, "name")}
    if "active" not in routed:
        raise InvalidInput(f"the experts are {dict(options)!r}; must have active, the experts that each token uses")
    return DeepSeekMoE(width, router=Router(**routed), **rest)


def sizes_of(module: DeepSeekMoE) -> ExpertSizes:
    """Returns what a `ModelConfig` has to know of experts."""
    return ExpertSizes(
        experts=module.experts, hidden=module.hidden, router=module.router, shared=module.shared * module.hidden,
        activation=module.activation, selection_bias=module.selection_bias is not None,
    )  # fmt: skip


def section_of(sizes: ExpertSizes) -> dict[str, Any]:
    """Returns the section of config.json that says the same, without what is by default."""
    return changed(asdict(sizes), ExpertSizes) | {"router": changed(asdict(sizes.router), Router)}


def changed(values: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Returns the values of a record's fields that are not its defaults."""
    return {field.name: values[field.name] for field in fields(kind) if values[field.name] != field.default}
