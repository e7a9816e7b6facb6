"""The arguments of the FP8 and INT8 kernels on Hopper, checked without a GPU."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.exact.backends.hopper import plan
from rooftile.exact.backends.hopper.quantised import launch_8bit as quantised
from rooftile.exact.masks import CAUSAL
from rooftile.exact.spec import Options, Spec
from rooftile.numerics.precision import Precision
from rooftile.numerics.recipe import part_of_rows
from tests.columns import columns_of


class Recorder:
    """Stands in for `Kernel`: keeps what each kernel is launched with, by the kernel's own names."""

    calls: ClassVar[list[tuple[str, tuple[int, ...], dict[str, object]]]] = []

    def __init__(self, kernel, describe=()):
        self.kernel, self.describe = kernel, describe

    def __call__(self, grid, arguments, constants):
        names = [name for name in self.kernel.arg_names if name not in constants]
        by_name = dict(zip(names, arguments, strict=True))
        for name, value in by_name.items():
            assert isinstance(value, torch.Tensor) == name.endswith(("_ptr", "_desc")), name
        for make, x in zip(self.describe, arguments, strict=False):
            # as the copy engine wants it: whole boxes of an array of four axes
            described_as = make(x)
            assert len(described_as.block_shape) == 4
            assert described_as.strides[-1] == 1
        assert [name.endswith("_desc") for name in names] == [n < len(self.describe) for n in range(len(names))]
        missing = set(self.kernel.arg_names) - set(by_name) - set(constants)
        assert not missing
        self.calls.append((self.kernel.fn.__name__, grid, by_name | constants))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...], dict[str, object]]]:
    monkeypatch.setattr(quantised, "Kernel", Recorder)
    monkeypatch.setattr(Recorder, "calls", [])
    monkeypatch.setattr(quantised, "counter", lambda device: torch.zeros(2, dtype=torch.int32))
    for module in (plan, quantised):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    caches = [value for value in vars(quantised).values() if hasattr(value, "cache_clear")]
    for cached in caches:
        cached.cache_clear()
    yield Recorder.calls
    for cached in caches:
        cached.cache_clear()


def spec_of(precision: Precision, layout: str = "dense") -> Spec:
    dims = {"dtype": torch.bfloat16, "dim": 64, "dim_v": 64, "group": 2}
    return Spec(**dims, mask=CAUSAL, layout=layout, scale=0.125, precision=precision, device="sm90")


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("qk", ["fp8", "int8"])
def test_dense(calls, qk: str, smooth: bool) -> None:
    q, k, v = (torch.randn(2, n, h, 64, dtype=torch.bfloat16) for n, h in ((300, 4), (200, 2), (200, 2)))
    spec = spec_of(Precision(qk=qk, smooth_k=smooth))
    o, lse = quantised.forward(q, k, v, Options(), spec)
    assert o.shape == q.shape
    assert lse.shape == (2, 4, 300)
    names = [name for name, *_ in calls]
    assert names == ["mean_keys"] * smooth + ["quantise", "flash_fwd_8bit"]
    quantising, attention = ({"grid": grid} | given for _, grid, given in calls[smooth:])
    assert (quantising["SMOOTH"], quantising["GROUP"]) == (smooth, 2)
    # it begins before its turn, and waits, only for a kernel that lets it
    assert quantising["launch_pdl"] is smooth
    if smooth:
        _, programs, given = calls[0]
        assert programs == (2 * 2 * 64 // 16, 1, 1)
        assert given["mean_ptr"] is quantising["mean_ptr"]
        assert given["mean_ptr"].shape == (2, 2, 64)
    assert (quantising["H"], quantising["Hk"], quantising["T"], quantising["S"]) == (4, 2, 300, 200)
    assert (quantising["q_blocks"], quantising["k_blocks"], quantising["q_slots"], quantising["k_slots"]) == (
        3,
        2,
        2 * 3,
        2 * 2,
    )
    assert quantising["grid"] == (2 * 3 * 4, 1, 1)
    for name in ("q", "k"):
        assert quantising[f"{name}_out_ptr"] is quantising[f"{name}_out_desc"] is attention[f"{name}_ptr"]
        assert quantising[f"{name}_out_ptr"].dtype == {"fp8": torch.float8_e4m3fn, "int8": torch.int8}[qk]
        assert quantising[f"{name}_scales_ptr"] is attention[f"{name}_scales_ptr"]
    assert quantising["v_out_desc"].data_ptr() == attention["v_ptr"].data_ptr()
    assert quantising["shift_ptr"] is attention["shift_ptr"] or not smooth
    assert attention["SMOOTHED"] is smooth
    assert attention["q_scales_ptr"].shape == (6, 4, 1)
    assert attention["v_desc"].shape == (2, 64, 2, 256)
    assert attention["tiles"] == 3


def test_packed_parts_are_the_recipes(calls) -> None:
    lengths = [130, 0, 5, 256]
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q, k, v = (torch.randn(391, h, 64, dtype=torch.bfloat16) for h in (4, 2, 2))
    quantised.forward(q, k, v, Options(cu_q=cu, cu_k=cu), spec_of(Precision(), "packed"))
    parts = part_of_rows(q, "block", cu)[1]
    (attention,) = [given for name, _, given in calls if name == "flash_fwd_8bit"]
    assert attention["q_scales_ptr"].shape == (parts, 4, 1)
    assert attention["v_desc"].transpose(1, 2).shape == columns_of(v.to(torch.float8_e4m3fn), cu).shape
    assert [(given["q_slots"], given["k_slots"]) for name, _, given in calls if name == "quantise"] == [(parts, parts)]


def test_no_keys_and_no_queries(calls) -> None:
    spec = spec_of(Precision())
    for T, S in ((0, 5), (5, 0)):
        q, k, v = (torch.randn(2, n, h, 64, dtype=torch.bfloat16) for n, h in ((T, 4), (S, 2), (S, 2)))
        o, lse = quantised.forward(q, k, v, Options(), spec)
        assert not o.any()
        assert (lse == -torch.inf).all()
    assert "flash_fwd_8bit" not in [name for name, *_ in calls]
