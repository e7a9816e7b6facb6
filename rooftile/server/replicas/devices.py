"""The GPUs of each replica, by CUDA_VISIBLE_DEVICES: the server's process names them without torch, an engine counts them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rooftile.errors import InvalidInput

VISIBLE = "CUDA_VISIBLE_DEVICES"


def environments(count: int, settings: Mapping[str, Any], given: str | None) -> list[dict[str, str]]:
    """Returns for each replica the variables that its process has beside the server's: names of GPUs of its own.

    Args:
        count: how many replicas there are.
        settings: keywords of `LLM`; a replica has `tensor_parallel_size` GPUs.
        given: CUDA_VISIBLE_DEVICES of the server's process; None if it is not set.

    Raises:
        InvalidInput: the replicas ask for more GPUs than are named, or for one GPU together.
    """
    device, gpus = settings.get("device"), settings.get("tensor_parallel_size", 1)
    if count == 1 or device == "cpu" or given in ("", "-1"):
        return [{} for _ in range(count)]
    if device is not None and ":" in device:
        raise InvalidInput(f"--device is {device}, and each of {count} replicas has a GPU of its own; give cuda, or leave it out")
    names = [str(place) for place in range(count * gpus)] if given is None else [name.strip() for name in given.split(",")]
    if len(names) < count * gpus:
        raise InvalidInput(f"{asked(count, gpus)}; {VISIBLE} names {len(names)}: {given[:80] if given else ''}")
    return [{VISIBLE: ",".join(names[place * gpus : (place + 1) * gpus])} for place in range(count)]


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

    gpus = settings.get("tensor_parallel_size", 1)
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
