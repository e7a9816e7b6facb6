"""`Command`: what all commands do alike: flags in vLLM's spelling, and errors that name flags."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, get_args, get_origin

from typer.core import TyperCommand
from typer.models import OptionInfo

from rooftile.cli.vllm_flags import SERVER_REFUSED
from rooftile.engine.settings.table import FLAGS
from rooftile.engine.vllm_names import LLM_REFUSED
from rooftile.errors import InvalidInput, Unsupported
from rooftile.runtime.words import Refused, rename

# the flags of vLLM that a command answers besides its own
REFUSED: Mapping[str, Mapping[str, Refused]] = {"generate": LLM_REFUSED, "serve": LLM_REFUSED | SERVER_REFUSED}
# vLLM's short spellings
_SHORT = {"-q": "--quantization", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}


class Command(TyperCommand):
    """A command that takes flags with underscores, too, and answers the flags of vLLM that it does not have."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the command line."""
        refused = {f"--{name.replace('_', '-')}": (name, each) for name, each in REFUSED.get(self.name or "", {}).items()}
        own = {name for each in self.params for name in (*each.opts, *each.secondary_opts)}
        left = [_SHORT.get(word, _with_hyphens(word)) if refused else word for word in args]
        kept: list[str] = []
        while left:
            word = left.pop(0)
            if word == "--":
                kept += [word, *left]
                break
            flag, _, value = word.partition("=")
            name = f"--{flag.removeprefix('--no-')}" if flag.startswith("--no-") else flag
            if flag in own or name not in refused:
                kept.append(word)
                continue
            _answer(str(self.name), name, *refused[name], _value(refused[name][1], flag, value, left))
        return super().parse_args(ctx, kept)


def _with_hyphens(word: str) -> str:
    """Returns a flag as it is listed: vLLM's command takes --max_model_len, too."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


def _value(refused: Refused, flag: str, given: str, left: list[str]) -> Any:
    """Returns the value of a flag, and takes it from what is left of the line if it stands there."""
    if given:
        return _read(given)
    is_switch = bool(refused.accepted) and all(isinstance(value, bool) for value in refused.accepted)
    if flag.startswith("--no-"):
        return False
    if is_switch or not left or left[0].startswith("--"):
        return True
    return _read(left.pop(0))


def _read(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


def _answer(command: str, flag: str, name: str, refused: Refused, value: Any) -> None:
    """Accepts a flag that changes nothing; refuses another with the reason that `LLM` gives.

    Raises:
        Unsupported: it asks for what is missing here.
    """
    if not any(value == one and type(value) is type(one) for one in refused.accepted):
        shown = "" if value is True else f" {str(value)[:40]}"
        raise Unsupported(f"{command} has no {flag}{shown}: {rename(refused.reason, FLAGS)}")


def with_flags_named(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a command's errors name its flags where the library's sentences name keywords."""
    flags = flags_of(inspect.signature(command, eval_str=True).parameters.values())

    @functools.wraps(command)
    def run(*args: Any, **given: Any) -> None:
        try:
            command(*args, **given)
        except (InvalidInput, Unsupported) as error:
            raise type(error)(rename(str(error), flags)) from error

    return run


def flags_of(parameters: Iterable[inspect.Parameter]) -> dict[str, str]:
    """Returns the flags of a command by the names of its parameters; arguments without a flag are left out."""
    found = {}
    for each in parameters:
        notes = get_args(each.annotation)[1:] if get_origin(each.annotation) is Annotated else ()
        option = next((note for note in notes if isinstance(note, OptionInfo)), None)
        if option is None:
            continue
        listed = [str(name) for name in (option.default, *(option.param_decls or ())) if isinstance(name, str)]
        flag = next((name for name in listed if name.startswith("--")), f"--{each.name.replace('_', '-')}")
        found[each.name] = flag.partition("/")[0]
    return found
