"""PyTorch's modes around a call: with gradients or without, inference, autocast. A call that is made again needs the same.

Compiled code also looks for the globals of a script in the module `__main__`, which is another one when the script has ended.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import NamedTuple

import torch

DEVICES = ("cpu", "cuda")


class Modes(NamedTuple):
    """The modes of one moment."""

    gradients: bool
    inference: bool
    autocast: tuple[torch.dtype | None, ...]  # for each of DEVICES; None without it
    main: ModuleType

    @classmethod
    def now(cls) -> Modes:
        """Returns the modes that hold now, in this thread."""
        return cls(
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            tuple(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in DEVICES),
            sys.modules["__main__"],
        )  # fmt: skip

    @contextmanager
    def again(self) -> Iterator[None]:
        """These modes hold within the block."""
        with ExitStack() as stack:
            stack.callback(sys.modules.__setitem__, "__main__", sys.modules["__main__"])
            sys.modules["__main__"] = self.main
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            for kind, dtype in zip(DEVICES, self.autocast, strict=True):
                if dtype is not None:
                    stack.enter_context(torch.autocast(kind, dtype))
            yield
