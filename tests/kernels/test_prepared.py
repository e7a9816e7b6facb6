"""A prepared call launches just what the same call launches otherwise, seen without a GPU, and keeps no tensor alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.exact import dispatch
from rooftile.exact.backends import hopper, triton
from rooftile.exact.backends.hopper import plan
from rooftile.exact.backends.hopper.flash_bwd import launch_backward as hopper_backward
from rooftile.exact.backends.hopper.flash_fwd import launch_forward as hopper_forward
from rooftile.exact.masks import CAUSAL, FULL, Mask
from rooftile.exact.spec import BackwardInputs, Options, Spec
from rooftile.runtime.launch import Kernel

COUNTER = torch.zeros(2, dtype=torch.int32)
LENT = dispatch.LENT["hopper"]
HOPPER = (hopper, LENT)
TRITON = (triton, {})


class Call:
    """One problem's tensors, and its spec."""

    def __init__(
        self, mask: Mask = CAUSAL, *, packed: bool = False, sinks: bool = False, dlse: bool = False, group: int = 1,
        dim: int = 64, deterministic: bool = False, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        def rows(length: int, heads: int) -> Tensor:
            return torch.zeros(*(() if packed else (2,)), length, heads, dim, dtype=dtype)

        self.q, self.o, self.do = (rows(300, 2 * group) for _ in range(3))
        self.k, self.v = (rows(500, 2) for _ in range(2))
        cu_q, cu_k = (torch.tensor([0, n // 3, n], dtype=torch.int32) if packed else None for n in (300, 500))
        self.options = Options(sinks=torch.zeros(2 * group) if sinks else None, cu_q=cu_q, cu_k=cu_k)
        self.lse = torch.zeros(2 * group, 300) if packed else torch.zeros(2, 2 * group, 300)
        self.dlse = torch.zeros_like(self.lse) if dlse else None
        self.spec = Spec(
            dtype=dtype, dim=dim, dim_v=dim, group=group, mask=mask, layout="packed" if packed else "dense", scale=0.125,
            has_sinks=sinks, deterministic=deterministic, needs_grad=True, device="sm90",
        )  # fmt: skip

    @property
    def forward(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v, self.options

    @property
    def backward(self) -> BackwardInputs:
        return BackwardInputs(self.do, self.dlse, self.q, self.k, self.v, self.o, self.lse, self.options)


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Every launch: the kernel, the grid, its arguments (tensors by shape, strides and dtype) and constants."""
    found: list[tuple[Any, ...]] = []

    def record(self: Kernel, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        names = [name for name in self.fn.arg_names if name not in constants]
        for name, x in zip(names, arguments, strict=True):
            assert isinstance(x, Tensor) == name.endswith(("_ptr", "_desc")), (self.name, name)
        given = [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in arguments]
        found.append((self.name, grid, given, constants))

    monkeypatch.setattr(Kernel, "_launch", record)
    for module in (plan, hopper_forward, hopper_backward):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    for module in (hopper_forward, hopper_backward):
        monkeypatch.setattr(module, "counter", lambda device: COUNTER)
    hopper_forward.tile_of.cache_clear()
    yield found
    hopper_forward.tile_of.cache_clear()


def taken(launches: list[tuple[Any, ...]], run: Callable[[], Any]) -> tuple[Any, list[tuple[Any, ...]]]:
    launches.clear()
    return run(), list(launches)


CALLS = {
    "plain": Call(),
    "full": Call(FULL),
    "packed": Call(packed=True),
    "sinks and lse": Call(sinks=True, dlse=True),
    "groups cut": Call(group=4),
    "deterministic": Call(deterministic=True, dtype=torch.float16),
    "wide": Call(dim=256, group=2),
}


@pytest.mark.parametrize("prepares", [HOPPER, TRITON], ids=["hopper", "triton"])
@pytest.mark.parametrize("name", CALLS)
def test_a_prepared_call_launches_what_any_call_does(launches, prepares: tuple[Any, dict[str, Any]], name: str) -> None:
    module, more = prepares
    call = CALLS[name]
    usual = partial(module.forward, *call.forward, call.spec)
    ready = module.prepare(*call.forward, call.spec)
    (o, lse), due = taken(launches, usual)
    for _ in range(2):
        (found, found_lse), made = taken(launches, partial(ready, *call.forward))
        assert made == due
        assert (found.shape, found_lse.shape) == (o.shape, lse.shape)
    grads, due = taken(launches, partial(module.backward, call.backward, call.spec, **more))
    ready = module.prepare_backward(call.backward, call.spec, **more)
    for _ in range(2):
        found, made = taken(launches, partial(ready, call.backward))
        assert made == due
        assert [None if x is None else x.shape for x in found] == [None if x is None else x.shape for x in grads]


def test_the_kernels_of_each_backward(launches) -> None:
    def kernels(prepares: tuple[Any, dict[str, Any]], name: str) -> list[str]:
        module, more = prepares
        call = CALLS[name]
        return [kernel for kernel, *_ in taken(launches, partial(module.backward, call.backward, call.spec, **more))[1]]

    repair = ["_repair"]
    assert kernels(HOPPER, "full") == ["compute_row_stats", "flash_bwd", "finalize_dq", *repair]
    assert kernels(HOPPER, "plain") == ["compute_row_stats", "flash_bwd", "finalize_dq", *repair]
    assert kernels(HOPPER, "deterministic") == ["compute_row_stats", "flash_bwd", "flash_bwd_q", *repair]
    assert kernels(HOPPER, "wide")[:3] == ["compute_row_stats", "flash_bwd_kv", "flash_bwd_q"]
    assert kernels(TRITON, "plain") == ["_row_stats", "_backward_q", "_backward_kv"]


def test_a_repair_is_told_where_a_nan_is_noted_and_what_rows_need(launches) -> None:
    """The flag that Hopper's kernels set is the one that Triton's read, and so are the words."""
    taken_from: dict[str, list[int]] = {}

    def addresses(self: Kernel, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        names = [name for name in self.fn.arg_names if name not in constants]
        for name, x in zip(names, arguments, strict=True):
            if name in ("nan_flag_ptr", "stats_ptr", "rests_ptr"):
                taken_from.setdefault(name, []).append(x.data_ptr())

    call = CALLS["plain"]
    ready = hopper.prepare_backward(call.backward, call.spec, **LENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "_launch", addresses)
        ready(call.backward)
    flags = taken_from["nan_flag_ptr"]
    assert len(flags) == 4
    assert len(set(flags)) == 1
    for name in ("stats_ptr", "rests_ptr"):
        assert len(taken_from[name]) == 2
        assert len(set(taken_from[name])) == 1


@pytest.mark.parametrize("prepares", [HOPPER, TRITON], ids=["hopper", "triton"])
def test_what_would_be_copied_is_not_prepared(prepares: tuple[Any, dict[str, Any]]) -> None:
    module, more = prepares
    call = Call(sinks=True)
    strided = [torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., ::2] for x in (call.q, call.do)]
    assert module.prepare(strided[0], *call.forward[1:], call.spec) is None
    assert module.prepare_backward(call.backward._replace(do=strided[1]), call.spec, **more) is None
    assert module.prepare_backward(call.backward._replace(do=None, dlse=call.lse), call.spec, **more) is None
    options = Options(sinks=torch.zeros(4)[::2])
    assert module.prepare(*call.forward[:3], options, call.spec) is None
    assert module.prepare_backward(call.backward._replace(options=options), call.spec, **more) is None


@pytest.mark.parametrize("prepares", [HOPPER, TRITON], ids=["hopper", "triton"])
def test_what_is_prepared_keeps_no_tensor(prepares: tuple[Any, dict[str, Any]]) -> None:
    module, more = prepares
    call = Call(packed=True, sinks=True, dlse=True)
    ready = module.prepare(*call.forward, call.spec), module.prepare_backward(call.backward, call.spec, **more)
    ready[0](*call.forward)
    ready[1](call.backward)
    # nor do the plans that are kept of calls that were not prepared
    module.forward(*call.forward, call.spec)
    module.backward(call.backward, call.spec, **more)
    kept = [weakref.ref(x) for x in (*call.backward[:7], *call.options) if x is not None]
    del call
    gc.collect()
    assert [x() for x in kept] == [None] * len(kept)
