"""Shares of a call's GPU time: attention, communication, and all other kernels, from torch's profiler."""

from __future__ import annotations

import os

import torch

from rooftile.hardware.clock import Work
from rooftile_lab.bench.rows import figures

# parts of the names of kernels
TRANSFER = ("nccl",)
ATTENTION = ("flash", "fmha", "attention", "cudnn", "_forward", "_backward", "row_stats", "finalize_dq")


def kernel_shares(work: Work, device: torch.device) -> dict[str, float]:
    """Returns the time of a call's kernels by kind, in µs; empty on a CPU. NCCL's include the wait for the other ranks."""
    if device.type != "cuda":
        return {}
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        work()
        torch.cuda.synchronize(device)
    found = {"attention_us": 0.0, "transfer_us": 0.0, "other_us": 0.0}
    for event in seen.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA:
            found[_kind(event.name().lower())] += (event.end_ns() - event.start_ns()) / 1e3
    return {name: figures(value) for name, value in found.items()}


def _kind(name: str) -> str:
    if any(part in name for part in TRANSFER):
        return "transfer_us"
    return "attention_us" if any(part in name for part in ATTENTION) else "other_us"
