"""A profiled step: its operators, and the times in which nothing ran."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rooftile.diagnosis.remedies.queue import Queue
from rooftile.diagnosis.watching.intervals import complement, union
from rooftile.diagnosis.watching.timeline import Launch, Profiled, Timeline, timeline_of


def profiled(step: Callable[[], object], names: set[str]) -> Timeline:
    step()
    with Profiled(torch.device("cpu"), lambda: names) as found:
        step()
    return found.timeline


def test_operators_are_those_that_were_named() -> None:
    layer, x = nn.Linear(64, 32), torch.randn(8, 64)

    def step() -> None:
        layer(x).relu().sum().backward()

    found = profiled(step, {"aten::addmm", "aten::relu", "aten::mm"})
    assert {name for name, _ in found.op_us} == {"aten::addmm", "aten::relu", "aten::mm"}
    assert found.op_calls["aten::relu", ((8, 32),)] == 1
    # the gradient of the weight
    assert found.op_calls["aten::mm", ((32, 8), (8, 64))] == 1
    assert all(us > 0 for us in found.op_us.values())
    assert 0 < found.busy_us <= found.wall_us


def test_a_sleep_is_found_with_its_line() -> None:
    x = torch.randn(64, 64)

    def step() -> None:
        x @ x
        time.sleep(0.05)
        x @ x

    found = profiled(step, {"aten::mm"})
    assert found.idle_us["host"] > 45_000
    line = step.__code__.co_firstlineno + 2
    longest, us = next(iter(found.lines.items()))
    assert longest == f"tests/diagnosis/watching/test_timeline.py:{line}"
    assert us > 45_000


class Event:
    """An event as a profiler of a GPU gives it; times in us."""

    def __init__(
        self, name: str, start: float, us: float, *, on: str = "CPU", number: int = 0, linked: int = 0, shapes: Any = ()
    ) -> None:  # fmt: skip
        self._known = {
            "name": name, "start_ns": int(start * 1e3), "duration_ns": int(us * 1e3), "end_ns": int((start + us) * 1e3),
            "device_type": getattr(torch._C._autograd.DeviceType, on), "correlation_id": number,
            "linked_correlation_id": linked, "shapes": shapes, "start_thread_id": 1, "is_user_annotation": False,
        }  # fmt: skip

    def __getattr__(self, name: str) -> Callable[[], Any]:
        return lambda: self._known[name]


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return gradient.clone()


def test_a_wait_inside_of_the_backward_is_a_gap() -> None:
    """The engine's range around a node covers all that its Python does; it is no operator."""
    x = torch.randn(64, 64, requires_grad=True)
    timeline = profiled(lambda: Sleeps.apply(x).sum().backward(), {"aten::clone", "aten::sum"})
    assert timeline.idle_us["host"] >= 49e3
    assert any(place.where.partition(":")[0].endswith("test_timeline.py") for place in timeline.host_work)
    assert timeline.op_calls["aten::clone", ((64, 64),)] == 2


def test_a_gpus_launches_have_the_hosts_time_before_each() -> None:
    """mm asked for at 12 us, add at 30; the host waits from 40 to 95, asks for the next add at 100, and is done at 110."""
    events = [
        Event("aten::mm", 10, 5, number=1, shapes=[[4, 4], [4, 4]]),
        Event("cudaLaunchKernel", 12, 2, number=101),
        Event("gemm", 20, 50, on="CUDA", number=101, linked=1),
        Event("aten::add", 28, 5, number=2, shapes=[[4]]),
        Event("cudaLaunchKernel", 30, 2, number=102),
        Event("elementwise", 70, 10, on="CUDA", number=102, linked=2),
        Event("cudaStreamSynchronize", 40, 55, number=103),
        Event("aten::add", 98, 5, number=3, shapes=[[4]]),
        Event("cudaLaunchKernel", 100, 2, number=104),
        Event("elementwise", 103, 10, on="CUDA", number=104, linked=3),
        # the profiler itself waits at the end
        Event("cudaDeviceSynchronize", 111, 10, number=105),
    ]
    found = timeline_of(events, (0, 125_000), (0, 110_000), [], True, lambda e: e.name() in {"aten::mm", "aten::add"})
    mm, add = ("aten::mm", ((4, 4), (4, 4))), ("aten::add", ((4,),))
    assert found.launched == (
        Launch(12.0, 50.0, mm), Launch(18.0, 10.0, add, waits=True), Launch(15.0, 10.0, add)
    )  # fmt: skip
    assert (found.tail_us, found.busy_us, found.launches, found.replayed_us) == (10.0, 70.0, 3, 0.0)
    assert found.op_us == {mm: 50.0, add: 10.0}
    queue = Queue(found.launched, found.tail_us)
    # the host asks for the last add 15 us of its own after the wait
    assert queue.run() == (12.0 + 50.0 + 10.0 + 15.0 + 10.0, 97.0)


def test_kernels_of_a_graph_have_no_operator() -> None:
    events = [
        Event("cudaGraphLaunch", 10, 5, number=101),
        Event("gemm", 20, 50, on="CUDA", number=101),
        Event("elementwise", 70, 10, on="CUDA", number=101),
    ]
    found = timeline_of(events, (0, 100_000), (0, 90_000), [], True, lambda e: False)
    assert (found.replayed_us, found.busy_us) == (60.0, 60.0)
    # the host asks for both at once
    assert found.launched == (Launch(10.0, 50.0), Launch(0.0, 10.0))


def test_a_copy_in_a_gap_is_told_apart() -> None:
    """A copy to the GPU beside which nothing runs is in its operator's time, and in a gap; one beside a kernel is in no gap."""
    to_gpu = "Memcpy HtoD (Pageable -> Device)"
    events = [
        Event("aten::copy_", 1, 5, number=1, shapes=[[4], [4]]),
        Event("cudaMemcpyAsync", 2, 2, number=101),
        Event(to_gpu, 5, 40, on="CUDA", number=101, linked=1),
        Event("aten::mm", 10, 5, number=2, shapes=[[4, 4], [4, 4]]),
        Event("cudaLaunchKernel", 12, 2, number=102),
        Event("gemm", 45, 50, on="CUDA", number=102, linked=2),
        Event("aten::copy_", 20, 5, number=3, shapes=[[8], [8]]),
        Event("cudaMemcpyAsync", 22, 2, number=103),
        Event(to_gpu, 60, 20, on="CUDA", number=103, linked=3),
    ]
    found = timeline_of(events, (0, 95_000), (0, 90_000), [], True, lambda e: e.name() in {"aten::mm", "aten::copy_"})
    assert found.idle_us["copy"] == 45.0
    assert (found.busy_us, found.copied_us) == (50.0, 40.0)
    operators_us = sum(us * found.op_calls[key] for key, us in found.op_us.items())
    # the second copy runs beside the product
    assert operators_us - found.copied_us + found.idle_us["copy"] == 95.0 + 20.0
    assert found.kernels["aten::mm", ((4, 4), (4, 4))] == ("gemm",)


def test_gaps_are_what_intervals_leave() -> None:
    spans = union([(5, 7), (1, 3), (6, 9), (3, 4)])
    assert spans == [(1, 4), (5, 9)]
    assert complement(spans, (0, 10)) == [(0, 1), (4, 5), (9, 10)]
    assert complement([], (2, 4)) == [(2, 4)]
    assert complement([(2, 4)], (2, 4)) == []
