"""Whether a program's steps meet other processes: each has to make as many steps as the others, or one waits for ever."""

from __future__ import annotations

from torch import distributed


def are_several() -> bool:
    """Returns whether this process is one of several of `torch.distributed`."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
