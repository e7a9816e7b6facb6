"""The machine of an engine that is one of several replicas: its GPUs, or its share of the cores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rooftile.engine.settings.table import ranks_of
from rooftile.errors import InvalidInput

VISIBLE = "CUDA_VISIBLE_DEVICES"


def asked(count: int, gpus: int) -> str:
    """Returns the beginning of a sentence about too few GPUs."""
    return f"{count} replicas of {gpus} GPU{'s' * (gpus > 1)} ask for {count * gpus}"


def share_machine(count: int, settings: Mapping[str, Any], given: str | None) -> None:
    """Checks in a replica's process that it sees its GPUs; on a machine without any, takes its share of the cores.

    Args:
        count: how many replicas there are.
        settings: keywords of `LLM`.
        given: CUDA_VISIBLE_DEVICES of the server's process; None if it is not set.

    Raises:
        InvalidInput: the machine has GPUs, and fewer than the replicas ask for.
    """
    import torch

    gpus = ranks_of(settings)
    if settings.get("device") != "cpu":
        if torch.cuda.device_count() >= gpus:
            return
        # torch counts anew until a GPU is used
        own = os.environ.pop(VISIBLE, None)
        if given is not None:
            os.environ[VISIBLE] = given
        there = torch.cuda.device_count()
        if own is not None:
            os.environ[VISIBLE] = own
        if there:
            raise InvalidInput(f"{asked(count, gpus)}; the machine has {there}")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
