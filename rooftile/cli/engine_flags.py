"""The flags of an engine, which `rooftile serve` and `generate` take from the table that `LLM` takes its keywords from."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from rooftile.engine.settings.table import SETTINGS, Setting, check_settings
from rooftile.errors import InvalidInput

# short spellings, the first of them vLLM's
_SHORT = {"tensor_parallel_size": ("-tp", "--tp"), "context_parallel_size": ("--context-parallel", "--cp")}


def takes_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Adds a flag per setting of an engine to a command, whose argument `settings` gets the given flags.

    A flag that the command has by itself stays its own: the seed of `generate` is the seed of its samples.
    """
    own = [each for each in inspect.signature(command, eval_str=True).parameters.values() if each.name != "settings"]
    named = {each.name for each in own}
    added = [each for name, each in SETTINGS.items() if name not in named]

    @functools.wraps(command)
    def with_settings(**given: Any) -> None:
        settings = {each.name: given.pop(each.name) for each in added}
        command(**given, settings=checked({name: value for name, value in settings.items() if value not in (None, [])}))

    made: Any = with_settings
    made.__signature__ = inspect.Signature([*own, *(_parameter(each) for each in added)])
    # typer reads types from these annotations, too, and would look for the command's
    made.__annotations__ = {}
    del made.__wrapped__
    return with_settings


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as `LLM` takes them: `weights` may be an object of JSON.

    Raises:
        InvalidInput: a value makes no sense.
        Unsupported: a value names a feature that is missing here.
    """
    settings = dict(given)
    weights = settings.get("weights")
    if isinstance(weights, str) and weights.startswith("{"):
        try:
            settings["weights"] = json.loads(weights)
        except ValueError as error:
            raise InvalidInput(f"weights is {weights[:60]!r}, which is no JSON: {error}") from None
    check_settings(settings)
    return settings


def _parameter(setting: Setting) -> inspect.Parameter:
    names = [setting.flag, *([] if setting.vllm is None else [f"--{setting.vllm.replace('_', '-')}"])]
    if setting.kind is bool:
        names = [f"{name}/--no-{name.removeprefix('--')}" for name in names]
    names += _SHORT.get(setting.name, ())
    # None tells a flag that was not given from one with the default
    shown = f" [default: {setting.default}]" if setting.kind in (int, float) and setting.default is not None else ""
    option = typer.Option(*names, help=setting.help + shown, show_default=False)
    annotation: Any = Annotated[setting.kind | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
