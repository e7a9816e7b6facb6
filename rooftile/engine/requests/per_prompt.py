"""Spreads the arguments of a call over its prompts: each is one for all, or a list with one for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.text.prompt import Prompt
from rooftile.errors import InvalidInput


def params_for(prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> list[SamplingParams]:
    """Returns one SamplingParams per prompt."""
    if not isinstance(params, SamplingParams | list | tuple):
        raise InvalidInput(f"sampling_params is {params!r}; must be SamplingParams, or a list of them")
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise InvalidInput(f"there are {len(each)} sampling_params for {len(prompts)} prompts; give one, or one for each")
    return each


def with_priorities(params: list[SamplingParams], priority: int | Sequence[int] | None) -> list[SamplingParams]:
    """Returns SamplingParams with one priority for all, or with one for each."""
    if priority is None:
        return params
    several = list(priority) if isinstance(priority, list | tuple) else [cast("int", priority)] * len(params)
    if len(several) != len(params):
        raise InvalidInput(f"there are {len(several)} priorities for {len(params)} prompts; give one, or one for each")
    # what is no SamplingParams is refused with its prompt
    pairs = zip(params, several, strict=True)
    return [replace(each, priority=number) if isinstance(each, SamplingParams) else each for each, number in pairs]


def adapters_for(prompts: list[Prompt], adapter: str | Sequence[str | None] | None) -> list[str | None]:
    """Returns the name of one adapter per prompt, or None."""
    each = list(adapter) if isinstance(adapter, list | tuple) else [adapter] * len(prompts)
    if not all(isinstance(name, str | None) for name in each):
        raise InvalidInput(f"adapter is {repr(adapter)[:80]}; must be the name of an adapter, a list of names, or None")
    if len(each) != len(prompts):
        raise InvalidInput(f"there are {len(each)} adapters for {len(prompts)} prompts; give one, or one for each")
    return cast("list[str | None]", each)
