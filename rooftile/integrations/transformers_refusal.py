"""Refuses attn_implementation="rooftile" for models of Transformers that never ask for it.

Transformers accepts every registered name for every model, also for one whose attention is written out and never looks the name
up: it would run its own attention, without a word. So the two methods by which a model takes a name are wrapped here, and
such a model is refused by what its class's module says. A model whose source says nothing is seen by its first forward: a mask
was made for its configuration, and no attention was called.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
import weakref
from typing import Any

import torch

from rooftile.errors import Unsupported

_HAS_ATTENTION = re.compile(r"^class \w*Attention\w*\(", re.MULTILINE)
# a table of its own by the configuration's name, which has no place for another
_TABLE = re.compile(r"_CLASSES\[(self\.)?config\._attn_implementation\]")
# a mask of Transformers' functions read as booleans: with eager attention it is numbers, 0 where a key is seen
_MAKES_A_MASK = re.compile(r"= create_\w*mask\(")
_READS_BOOLEANS = re.compile(r"masked_fill_\(attention_mask\.logical_not\(\)")
_ASKS = re.compile(r"\bALL_ATTENTION_FUNCTIONS\b|\bAttentionInterface\b")


class _Seen(threading.local):
    """Counts calls of attention in this thread, and remembers how many there were when a configuration's last mask was made."""

    # in any thread, attention was compiled into a graph, which counts nothing when it runs
    compiled = False

    def __init__(self) -> None:
        self.calls = 0
        self.masks: dict[int, tuple[weakref.ref[Any], int]] = {}


_seen = _Seen()


def note_attention() -> None:
    """Counts a call of attention."""
    if torch.compiler.is_compiling():
        _note_compiled_attention()
    else:
        _seen.calls += 1


def _note_compiled_attention() -> bool:
    _Seen.compiled = True
    return True


# torch.compiler.assume_constant_result sets this attribute: Dynamo runs the function once, while it traces
_note_compiled_attention._dynamo_marked_constant = True  # type: ignore[attr-defined]


def note_a_mask(config: Any) -> None:
    """Remembers that a mask was made for a configuration."""
    if config is not None and not torch.compiler.is_compiling():
        _seen.masks[id(config)] = weakref.ref(config), _seen.calls


def check_models(*names: str) -> None:
    """Lets Transformers' models refuse these names of attention where they never ask for them. Calling it again is harmless."""
    from transformers import PreTrainedModel

    if hasattr(PreTrainedModel.get_correct_attn_implementation, "_rooftile"):
        return
    correct, change = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.set_attn_implementation

    @functools.wraps(correct)
    def checked(self: Any, requested_attention: str | None, *args: Any, **options: Any) -> str:
        if requested_attention in names:
            _check(self, requested_attention)
        return correct(self, requested_attention, *args, **options)

    @functools.wraps(change)
    def changed(self: Any, attn_implementation: str | dict[str, str], *args: Any, **options: Any) -> None:
        # Transformers itself only warns, and leaves such a model as it was
        for model, name in _asked(self, attn_implementation):
            if name in names:
                _check(model, name)
        change(self, attn_implementation, *args, **options)

    checked._rooftile = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = checked
    PreTrainedModel.set_attn_implementation = changed


def _asked(model: Any, asked: str | dict[str, str]) -> list[tuple[Any, str]]:
    """Returns each model inside of a model, itself first, and the name that it would take."""
    from transformers import PreTrainedModel

    inside = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not isinstance(asked, dict):
        return [(part, asked) for part in inside]
    by_config = {id(getattr(model.config, key, None)): name for key, name in asked.items() if key}
    own = asked.get("", model.config._attn_implementation)
    return [(part, own if part.config is model.config else by_config.get(id(part.config), "")) for part in inside]


def _check(model: Any, name: str) -> None:
    """Raises Unsupported if the model's class never asks for an attention function; else its first forward will tell."""
    kind = type(model)
    if _reads_booleans(kind):
        raise Unsupported(
            f'{kind.__name__} reads its mask as booleans, and attn_implementation="{name}" makes numbers as "eager" does, with '
            'which this model is wrong too; use "sdpa"'
        )
    if _never_asks(kind):
        raise Unsupported(
            f'{kind.__name__} never asks for an attention implementation: attn_implementation="{name}" would not run; use '
            '"eager" for it, or {"": "eager", ...} with the names of sub-configurations'
        )
    if _look_back not in model._forward_hooks.values():
        model.register_forward_hook(_look_back)


@functools.cache
def _never_asks(kind: type) -> bool:
    """Whether the modules of a model's class and of its bases have attention of their own, and none looks a function up."""
    sources = _sources(kind)
    if any(map(_TABLE.search, sources)):
        return True
    return any(map(_HAS_ATTENTION.search, sources)) and not any(map(_ASKS.search, sources))


@functools.cache
def _reads_booleans(kind: type) -> bool:
    """Whether the module of a model's class makes a mask and takes the logical complement of it, whatever its dtype."""
    return any(_MAKES_A_MASK.search(source) and _READS_BOOLEANS.search(source) for source in _sources(kind))


def _sources(kind: type) -> list[str]:
    """Returns the text of the modules that define a model's class and its bases."""
    from transformers import PreTrainedModel

    bases = [base for base in kind.__mro__ if issubclass(base, PreTrainedModel) and base is not PreTrainedModel]
    return [_source(name) for name in {base.__module__ for base in bases}]


def _source(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        # a class of a notebook has no source; its first forward tells
        return ""


def _look_back(model: Any, *_: Any) -> None:
    """Runs after a forward, until one called attention."""
    if torch.compiler.is_compiling():
        return
    config, calls = _seen.masks.pop(id(model.config), (None, 0))
    if config is None or config() is not model.config or _Seen.compiled:
        return
    if calls == _seen.calls:
        raise Unsupported(
            f'{type(model).__name__} made a mask for attn_implementation="{model.config._attn_implementation}" and never called '
            'its function: it has attention of its own; use attn_implementation="eager"'
        )
    for key, hook in list(model._forward_hooks.items()):
        if hook is _look_back:
            del model._forward_hooks[key]
