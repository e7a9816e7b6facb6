"""The parts of a launch besides the kernel: a bounded cache, output tensors, and the device guard."""

from __future__ import annotations

import pytest
import torch

from rooftile.runtime.launch import BoundedCache, Kernel, empties, on_device


def test_a_bounded_cache_does_not_grow() -> None:
    known = BoundedCache(capacity=100)
    for n in range(1000):
        known[n] = n
        assert known[n] == n
        assert len(known) <= 100


def test_a_full_cache_keeps_its_entries_when_one_of_them_changes() -> None:
    known = BoundedCache(capacity=3)
    for n in range(3):
        known[n] = n
    known[1] = 7
    assert known == {0: 0, 1: 7, 2: 2}


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (7,), (), (2, 0, 3), (0, 5), (1, 1, 8)], ids=str)
def test_what_cuda_is_asked_for_is_contiguous(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def on_the_cpu(size, strides, dtype):
        return torch.empty_strided(size, strides, dtype=dtype)

    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", on_the_cpu)
    x, due = empties(shape, torch.bfloat16, torch.device("cuda", 0))(), torch.empty(shape, dtype=torch.bfloat16)
    assert x.shape == due.shape
    assert x.stride() == due.stride()
    assert x.dtype == due.dtype


def test_other_devices_and_releases_take_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    x = empties((2, 3), torch.float32, torch.device("cpu"))()
    assert (x.shape, x.dtype, x.device.type) == ((2, 3), torch.float32, "cpu")
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cuda")
    asked = empties((2, 3), torch.float32, torch.device("cuda", 0))
    assert asked.keywords["device"] == torch.device("cuda", 0)


def test_a_prepared_call_runs_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for any current GPU."""
    current = [0]

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    monkeypatch.setattr("rooftile.runtime.launch._current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    assert on_device(lambda x: (x, current[0]), torch.device("cuda", 0))(5) == (5, 0)
    assert on_device(lambda x: (x, current[0]), torch.device("cuda", 1))(5) == (5, 1)
    assert current == [0]


@pytest.mark.parametrize("own", [{}, {"enable_fp_fusion": False}])
def test_a_kernel_says_whether_products_and_sums_are_fused(own: dict[str, bool]) -> None:
    """Triton 3.10 changes the default; a kernel's own word counts."""
    asked: dict[str, object] = {}

    class Function:
        arg_names = ("x", "SIZE")

        def __getitem__(self, grid: tuple[int, int, int]):
            return lambda *arguments, **options: asked.update(options)

    fn = Function()
    fn.fn = lambda: None
    Kernel(fn)((1, 1, 1), (torch.ones(3),), {"SIZE": 3, "num_warps": 2} | own)
    assert asked == {"SIZE": 3, "num_warps": 2, "enable_fp_fusion": not own}
