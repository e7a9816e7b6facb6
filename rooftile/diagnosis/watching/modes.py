"""PyTorch's modes around a call: with gradients or without, inference, autocast. A call that is made again needs the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

DEVICES = ("cpu", "cuda")


class Modes(NamedTuple):
    """The modes of one moment."""

    gradients: bool
    inference: bool
    autocast: tuple[torch.dtype | None, ...]  # for each of DEVICES; None without it

    @classmethod
    def now(cls) -> Modes:
        """Returns the modes that hold now, in this thread."""
        return cls(
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            tuple(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in DEVICES),
        )  # fmt: skip

    @contextmanager
    def again(self) -> Iterator[None]:
        """These modes hold within the block."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            for kind, dtype in zip(DEVICES, self.autocast, strict=True):
                if dtype is not None:
                    stack.enter_context(torch.autocast(kind, dtype))
            yield
