"""The experiments on a whole step: replayed as a CUDA graph (E1), and with another batch (E2)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from statistics import median

import torch

from rooftile.diagnosis.experiments.capture import capturing
from rooftile.diagnosis.steps import Timed
from rooftile.errors import Unsupported

Work = Callable[[], None]
WARM_UPS, RUNS = 3, 7


def repeated_us(step: Work, device: torch.device) -> float:
    """Returns the time of a step, the median of several; raises Unsupported with the reason if it cannot be run."""
    taken: list[float] = []
    try:
        for _ in range(WARM_UPS):
            step()
        for _ in range(RUNS):
            with Timed(device, taken):
                step()
    except (RuntimeError, ValueError, IndexError) as error:
        raise Unsupported(_first_line(error)) from error
    return median(taken)


def replayed_us(step: Work, device: torch.device) -> float:
    """Returns the time of a step as a CUDA graph: its kernels without the host.

    Raises Unsupported with the reason if it cannot be captured: it waits for the device, or moves data to it.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # a capture wants what is made in first runs, such as workspaces, to be there
        beside = torch.cuda.Stream(device)
        beside.wait_stream(torch.cuda.current_stream(device))
        with warnings.catch_warnings():
            # the program's own gradients were made on another stream than the capture's
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
            with torch.cuda.stream(beside):
                for _ in range(WARM_UPS):
                    step()
            torch.cuda.current_stream(device).wait_stream(beside)
            with capturing(graph, device, beside):
                step()
    except (RuntimeError, ValueError, IndexError) as error:
        raise Unsupported(f"the step cannot be captured: {_first_line(error)}") from error
    return repeated_us(graph.replay, device)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
