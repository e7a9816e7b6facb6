"""The GPUs of each replica, which the server's process names by CUDA_VISIBLE_DEVICES; it has no torch to count them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rooftile.engine.settings.table import ranks_of
from rooftile.engine.start.replica import VISIBLE, asked
from rooftile.errors import InvalidInput


def environments(count: int, settings: Mapping[str, Any], given: str | None) -> list[dict[str, str]]:
    """Returns for each replica the variables that its process has beside the server's: names of GPUs of its own.

    Args:
        count: how many replicas there are.
        settings: keywords of `LLM`; a replica has `tensor_parallel_size` GPUs.
        given: CUDA_VISIBLE_DEVICES of the server's process; None if it is not set.

    Raises:
        InvalidInput: the replicas ask for more GPUs than are named, or for one GPU together.
    """
    device, gpus = settings.get("device"), ranks_of(settings)
    if count == 1 or device == "cpu" or given in ("", "-1"):
        return [{} for _ in range(count)]
    if device is not None and ":" in device:
        raise InvalidInput(f"--device is {device}, and each of {count} replicas has a GPU of its own; give cuda, or leave it out")
    names = [str(place) for place in range(count * gpus)] if given is None else [name.strip() for name in given.split(",")]
    if len(names) < count * gpus:
        raise InvalidInput(f"{asked(count, gpus)}; {VISIBLE} names {len(names)}: {given[:80] if given else ''}")
    return [{VISIBLE: ",".join(names[place * gpus : (place + 1) * gpus])} for place in range(count)]
