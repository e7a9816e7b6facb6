"""Parameters that FSDP has sharded over processes (DTensor)."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, distributed, nn

MaybeTensor = TypeVar("MaybeTensor", Tensor, "Tensor | None")


def is_sharded(x: object) -> bool:
    """Whether a tensor is a DTensor. The class is imported by those alone who have made one."""
    return isinstance(x, Tensor) and hasattr(x, "full_tensor")


def whole(x: MaybeTensor) -> MaybeTensor:
    """Returns a tensor with all its numbers: a sharded one is gathered, which all processes must do."""
    return x.detach().full_tensor() if is_sharded(x) else x  # type: ignore[union-attr, attr-defined]


def local(x: Tensor) -> Tensor:
    """Returns the part of a tensor that this process has."""
    return x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined, no-any-return]


def shards(model: nn.Module) -> str | None:
    """Returns the name of a sharded parameter of a model; None if there is none."""
    return next((name for name, x in model.named_parameters() if is_sharded(x)), None)


def writes() -> bool:
    """Whether this process writes files: in a distributed run the first one does."""
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
