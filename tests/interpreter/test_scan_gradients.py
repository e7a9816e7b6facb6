"""The kernels of the selective scan's gradients, interpreted: against autograd through the definition in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile.recurrent import walk
from rooftile.recurrent.kernels.selective import call
from tests.grids import swept
from tests.interpreter.test_recurrent_steps import ROOM, rounded
from tests.recurrent import cases
from tests.recurrent.cases import Case

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def _kernels_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuses the plain walk, fills new memory with NaN, and cuts short sequences into chunks, and few channels into blocks."""

    def refuse(*unused: Any) -> None:
        raise AssertionError("the plain walk ran")

    monkeypatch.setattr(walk, "backward", refuse)
    monkeypatch.setattr(call, "CHUNK", 16)
    monkeypatch.setattr(call, "_CHANNELS", 4)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gradients(run: Any, tensors: dict[str, Tensor], names: Any, dy: Tensor | None, d_last: Tensor | None) -> dict[str, Tensor]:
    """The gradients of all tensors; those in `names` are positional."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    y, last = run({name: leaves[name] for name in names}, {name: x for name, x in leaves.items() if name not in names})
    pairs = [(out, d.to(out.dtype)) for out, d in ((y, dy), (last, d_last)) if d is not None]
    outputs, dues = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, list(leaves.values()), dues, allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def of_kernels(case: Case, dy: Tensor | None, d_last: Tensor | None) -> dict[str, Tensor]:
    def run(tensors: dict[str, Tensor], given: dict[str, Tensor]) -> Any:
        return case.run(*tensors.values(), **given, **case.options, backend="triton")

    return gradients(run, {**case.tensors, **case.given}, case.tensors, dy, d_last)


def check(case: Case, dtype: torch.dtype, *, y: bool = True, last: bool = True) -> None:
    case = rounded(case, dtype)
    x, A, cu = case.tensors["x"], case.tensors["A"], case.options["cu"]
    dy = torch.randn_like(x) if y else None
    d_last = torch.randn(x.shape[0] if cu is None else len(cu) - 1, *A.shape) if last else None
    found = of_kernels(case, dy, d_last)
    wide = {name: x.double() for name, x in {**case.tensors, **case.given}.items()}
    due = gradients(case.defining, wide, case.tensors, *(None if d is None else d.double() for d in (dy, d_last)))
    for name, a in found.items():
        b = due[name]
        assert (a.shape, a.dtype) == (b.shape, {**case.tensors, **case.given}[name].dtype)
        if b.numel():
            error = float((a.double() - b).abs().max())
            assert error <= ROOM[dtype] * max(float(b.abs().max()), 1e-3), (name, error)


@pytest.mark.parametrize(
    ("T", "dtype"), swept(product((1, 2, 3, 15, 17), ROOM), lambda case: (case[0], (case[0] == 17, case[1]))), ids=str
)
def test_gradients_are_the_definitions(T: int, dtype: torch.dtype) -> None:
    torch.manual_seed(T)
    check(cases.scan(T), dtype)


def test_several_chunks_and_blocks_of_channels() -> None:
    torch.manual_seed(1)
    check(cases.scan(49, W=9, N=5), torch.float32)


@pytest.mark.parametrize("cu", [[0, 20, 20, 21, 41], [0, 0, 2, 3, 3, 20]], ids=str)
def test_packed_sequences(cu: list[int]) -> None:
    torch.manual_seed(2)
    check(cases.scan(cu[-1], cu=torch.tensor(cu, dtype=torch.int32)), torch.float32)


def test_no_token() -> None:
    case = rounded(cases.scan(0), torch.float32)
    d_last = torch.randn(2, 7, 3)
    found = of_kernels(case, None, d_last)
    assert torch.equal(found["state"], d_last)
    assert not any(found[name].any() for name in ("A", "D", "dt_bias"))


@pytest.mark.parametrize("left_out", [("D",), ("z",), ("dt_bias", "state"), ("D", "z", "dt_bias", "state")], ids=str)
def test_what_may_be_left_out(left_out: tuple[str, ...]) -> None:
    torch.manual_seed(3)
    case = cases.scan(18)
    check(replace(case, given={name: x for name, x in case.given.items() if name not in left_out}), torch.float32)


@pytest.mark.parametrize(("y", "last"), [(True, False), (False, True)])
def test_one_output_alone(y: bool, last: bool) -> None:
    torch.manual_seed(4)
    check(cases.scan(18), torch.float32, y=y, last=last)


@pytest.mark.parametrize(("step", "softplus"), [(1e-6, False), (50.0, False), (50.0, True), (-14.0, True)])
def test_small_and_large_steps(step: float, softplus: bool) -> None:
    """Decays that underflow stay exact, and so do steps whose softplus is as small as fp32 shows it."""
    torch.manual_seed(5)
    case = cases.scan(20, softplus=softplus)
    dt = step * torch.where(torch.rand_like(case.tensors["dt"]) < 0.5, 1.0, 0.5)
    given = {**case.given, "dt_bias": torch.zeros(7, dtype=torch.float64)}
    check(replace(case, tensors={**case.tensors, "dt": dt}, given=given), torch.float32)


def test_strides_and_gradients_that_are_repeated() -> None:
    torch.manual_seed(6)
    case = rounded(cases.scan(18), torch.float32)
    apart = {name: x.mT.contiguous().mT for name, x in case.tensors.items()}
    one = torch.randn(1, 1, 7)
    found = of_kernels(replace(case, tensors=apart), one.expand(2, 18, 7), None)
    due = of_kernels(case, one.expand(2, 18, 7).contiguous(), None)
    assert all(torch.equal(x, due[name]) for name, x in found.items())


def test_no_token_knows_earlier_ones_or_neighbours() -> None:
    torch.manual_seed(7)
    dy = torch.zeros(2, 40, 7)
    dy[0, :20] = torch.randn(20, 7)
    found = of_kernels(rounded(cases.scan(40), torch.float32), dy, None)
    for name in ("x", "dt", "B", "C", "z"):
        assert found[name][0, :20].any()
        assert not found[name][0, 20:].any()
        assert not found[name][1].any()
    assert not found["state"][1].any()


@pytest.mark.parametrize(("N", "channels"), [(1, 8), (2, 16), (5, 32)])
def test_fewer_numbers_than_channels(N: int, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(10)
    monkeypatch.setattr(call, "_CHANNELS", channels)
    check(cases.scan(7, batch=1, W=channels + 1, N=N), torch.float32)


def test_a_wide_state_of_many_numbers() -> None:
    torch.manual_seed(8)
    check(cases.scan(9, batch=1, W=3, N=32), torch.float32)


def test_the_gradients_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(9)
    case, dy = rounded(cases.scan(40), torch.float32), torch.randn(2, 40, 7)
    found = of_kernels(case, dy, None)
    monkeypatch.setattr(call, "CHUNK", 64)
    for name, x in of_kernels(case, dy, None).items():
        torch.testing.assert_close(x, found[name], rtol=1e-4, atol=1e-5)
