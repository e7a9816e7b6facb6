"""The kernels of a call alone, from torch's profiler."""

from __future__ import annotations

import os

import torch

from rooftile.hardware.clock import Work


def device_intervals(work: Work, calls: int) -> list[tuple[int, int]]:
    """Start and end, in ns, of everything that runs on the GPU in a number of calls. Raises RuntimeError if nothing does."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    # the profiler prints a line when it starts and stops otherwise
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # a step in flight belongs to no counted range
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(calls):
            work()
        torch.cuda.synchronize()
    events = seen.profiler.kineto_results.events()
    # kernels, copies and fills; the host's part of a launch has the device type CPU
    intervals = [(event.start_ns(), event.end_ns()) for event in events if event.device_type() == DeviceType.CUDA]
    if not intervals:
        raise RuntimeError(f"the profiler saw nothing run on the GPU, only {sorted({event.name() for event in events})}")
    return intervals
