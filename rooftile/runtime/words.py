"""Answers to the words of other libraries: one sentence with the line to write, in place of Python's TypeError or AttributeError.

`foreign_words` has the words. American spellings of names mean the same and are accepted. A class that takes another library's
arguments under their names, as vLLM's, gives tables of them to `takes_names`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from rooftile.errors import InvalidInput, Unsupported
from rooftile.runtime.foreign_words import ARGUMENTS, FORMATS

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Refused(NamedTuple):
    """A keyword without a meaning here: the values that ask for what happens anyway (None always does), and the reason."""

    accepted: tuple[Any, ...]
    reason: str


def format_answer(given: object) -> str:
    """Returns what to write in place of another library's word or configuration for a format; "" where there is no such word.

    A configuration counts by the name of its class, or of the one that it holds for training.
    """
    held = getattr(given, "base_config", None)
    names = (str(given), type(given).__name__, type(held).__name__)
    word = next((FORMATS[name.lower()] for name in names if name.lower() in FORMATS), None)
    if word is not None:
        return f"; write {word!r}"
    if type(given).__module__.partition(".")[0] in ("torchao", "transformers", "llmcompressor", "compressed_tensors"):
        return f"; {type(given).__name__} is another library's: write one of these words, or {{pattern of names: word}}"
    return ""


def answers_foreign_words(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a call with an unknown keyword raise InvalidInput with the line to write.

    Python finds such a keyword when it binds the arguments, so the error has no frame below this one. A good call costs one more
    frame, and a TypeError from inside the function passes unchanged.
    """
    return answers_with({})(function)


def answers_with(more: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns `answers_foreign_words` with answers for further words, which concern one function."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                trace = error.__traceback__
                own = _own(function)
                word = next((name for name in kwargs if name not in own), None)
                if word is None or trace is None or trace.tb_next is not None:
                    raise
                raise unknown_word(_owner(function), word, own, more) from None

        return call

    return decorate


def answers_words(cls: type[T]) -> type[T]:
    """Makes a class answer unknown keywords, like `answers_foreign_words` for its constructor and its other ways to be made.

    These are its public class methods and static methods. Other methods keep their speed: an engine calls some in each step.
    """
    made: Any = cls
    made.__init__ = answers_foreign_words(made.__init__)
    for name, method in list(vars(cls).items()):
        if not name.startswith("_") and isinstance(method, classmethod | staticmethod):
            setattr(cls, name, type(method)(answers_foreign_words(method.__func__)))
    return cls


def in_our_names(
    owner: str, given: Mapping[str, Any], renamed: Mapping[str, str], refused: Mapping[str, Refused]
) -> dict[str, Any]:
    """Returns keyword arguments by the names that they have here.

    Raises:
        Unsupported: one of them asks for what is missing here.
        InvalidInput: one of them has the same meaning as another.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in refused:
            accepted, reason = refused[name]
            # equal and of one type: 1 is not True
            if value is not None and not any(value == one and type(value) is type(one) for one in accepted):
                raise Unsupported(f"{owner} has no {name}={str(value)[:40]}: {reason}")
            continue
        ours = renamed.get(name, name)
        if ours in found or (ours != name and ours in given):
            raise InvalidInput(f"{owner} got {name} and {ours}, which mean the same; give one of them")
        found[ours] = value
    return found


def takes_names(renamed: Mapping[str, str], refused: Mapping[str, Refused]) -> Callable[[type[T]], type[T]]:
    """Lets a class take another library's keywords beside its own, and answers all others in a sentence."""

    def decorate(cls: type[T]) -> type[T]:
        made: Any = cls
        init = made.__init__
        own = [name for name in inspect.signature(init).parameters if name != "self"]

        @wraps(init)
        def with_names(self: Any, *args: Any, **given: Any) -> None:
            found = in_our_names(cls.__name__, given, renamed, refused) if given else given
            word = next((name for name in found if name not in own), None)
            if word is not None:
                raise unknown_word(cls.__name__, word, own)
            init(self, *args, **found)

        made.__init__ = with_names
        return cls

    return decorate


def unknown_word(owner: str, word: str, own: Sequence[str], more: Mapping[str, str] = MappingProxyType({})) -> InvalidInput:
    """Returns the error for a keyword that a function does not have: what to write in its place, or what there is."""
    names = [name for name in own if name not in ("self", "cls")]
    answer = more.get(word, ARGUMENTS.get(word))
    due = re.match(r"write (\w+)=", answer or "")
    # the same word may be another thing elsewhere
    if answer is None or (due is not None and due[1] not in names):
        near = get_close_matches(word, names, n=1, cutoff=0.75)
        answer = f"did you mean {near[0]}?" if near else f"it has {', '.join(names) or 'none'}"
    return InvalidInput(f"{owner} has no argument {word}: {answer}")


def rename(sentence: str, names: Mapping[str, str]) -> str:
    """Writes arguments in an error as its reader knows them: as flags of a command, or as fields of a request.

    A name with an underscore is always an argument. A plain word is one only where a sentence about an argument has it: at the
    start, after "and" or "with", or before "=".

    Example:
        >>> rename("top_k is 5 with beam_width 2; give seed=", {"top_k": "--top-k", "seed": "--seed"})
        '--top-k is 5 with beam_width 2; give --seed'
    """
    for name, shown in names.items():
        whole = rf"(?<![\w./\"'=-]){name}"
        sentence = re.sub(rf"{whole}=(True\b|(?=[\s;,.:)]|$))", shown, sentence)
        sentence = re.sub(rf"{whole}(?==)", shown, sentence)
        if "_" in name:
            sentence = re.sub(rf"{whole}(?![\w/\"'])", shown, sentence)
        else:
            sentence = re.sub(rf"^{name}(?= (is|are|has|names|of|and)\b)", shown, sentence)
            sentence = re.sub(rf"(?<= and ){name}(?= (is|are)\b)", shown, sentence)
            sentence = re.sub(rf"(?<= with ){name}(?= \d|[,;]|$)", shown, sentence)
    return sentence


def _owner(function: Callable[..., object]) -> str:
    """Returns the name of a function; a constructor has the name of its class."""
    return function.__qualname__.removesuffix(".__init__")


def _own(function: Callable[..., object]) -> tuple[str, ...]:
    """Returns the names of a function's arguments."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
