"""Captures work as a CUDA graph, and leaves the device as it was if that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, device: torch.device, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Captures what the block launches; the stream, if given, is not the default one.

    A failed capture would leave the generator of random numbers in it for good, so its state is put back.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    kept = generator.clone_state()
    try:
        with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream):
            yield
    except BaseException:
        generator.graphsafe_set_state(kept)
        raise
