"""Output tensors made past the dispatcher look like those of torch.empty."""

from __future__ import annotations

import pytest
import torch

from rooftile.backends.launch import empties


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
