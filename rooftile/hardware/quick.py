"""Launching a Triton kernel again in little of the host's time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MOST = 1024


def remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    """known[key] = value; a full dictionary is emptied, as a growing cache has a length a step."""
    if len(known) >= _MOST:
        known.clear()
    known[key] = value


class Quick:
    """A Triton kernel, launched again with less of the host's time.

    Triton's own launch binds every argument to the kernel's signature to find what was compiled for such arguments. Here that is
    found by what it depends on: the dtypes and alignments of tensors, and all numbers but those that the kernel is not
    specialised on. Arguments come in the kernel's order; `constants` is one and the same dictionary for the same constants.

    Example:
        >>> start = Quick(kernel)
        >>> start((programs, 1, 1), (x, o, n), constants)
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
        self._free = frozenset(
            n for n, name in enumerate(kernel.arg_names) if name in (getattr(kernel, "do_not_specialize", None) or ())
        )

    def __call__(self, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        key: list[Any] = [id(constants)]
        words: list[Any] = []
        free = self._free
        for n, x in enumerate(arguments):
            if isinstance(x, Tensor):
                word = x.data_ptr()
                key.append(x.dtype)
                key.append(word % 16 == 0)
            else:
                word = x
                # of a number that is not specialised on, only whether it needs 64 bits
                key.append(abs(x) >> 31 > 0 if n in free and isinstance(x, int) else x)
            words.append(word)
        # kernels are loaded into a device
        key.append(torch.cuda.current_device() if arguments[0].is_cuda else None)
        found = self._known.get(tuple(key))
        if found is None:
            compiled = self._kernel[grid](*arguments, **constants)
            # Triton's interpreter compiles nothing
            if compiled is not None:
                rest = tuple(constants[name] for name in self._kernel.arg_names if name in constants)
                # the constants are kept, so that no others get their id
                remember(self._known, tuple(key), (compiled, rest, constants))
            return
        compiled, rest, _ = found
        compiled[grid](*words, *rest)
