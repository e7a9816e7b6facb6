"""The backward of Mamba-2's recurrence, interpreted: gradients of everything, against the definition in fp64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from rooftile.recurrent.kernels.state_space import backward_pass as kernels
from rooftile.recurrent.kernels.state_space import call as calls
from tests.grids import swept
from tests.recurrent import cases

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
# the largest error that is allowed, as a share of the norm of what the definition gives
ERRORS = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
NARROW = {"x", "B", "C", "z"}


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(calls, "_SEGMENT", 128)


def gradients(case: cases.Case, tensors: dict[str, Tensor], backend: str | None) -> dict[str, Tensor]:
    """The gradients from y and from the last state, by name; without a backend the definition's."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    first, given = [leaves[n] for n in case.tensors], {n: x for n, x in leaves.items() if n not in case.tensors}
    if backend is None:
        y, last = case.defining(dict(zip(case.tensors, first, strict=True)), given)
    else:
        y, last = case.run(*first, **given, **case.options, backend=backend)
    generator = torch.Generator().manual_seed(1)
    dy, d_last = (torch.randn(out.shape, generator=generator) for out in (y, last))
    found = torch.autograd.grad((y, last), list(leaves.values()), (dy.to(y.dtype), d_last.to(last.dtype)))
    return dict(zip(leaves, found, strict=True))


def assert_gradients(case: cases.Case, dtype: torch.dtype = torch.float32, times: float = 1) -> None:
    """Gradients of kernels on tensors of a dtype, beside those of the definition of the same tensors in fp64."""
    tensors = {**case.tensors, **case.given}
    rounded = {name: x.to(dtype if name in NARROW else torch.float32) for name, x in tensors.items()}
    # strides are those of the case
    rounded = {name: x if x.stride() == tensors[name].stride() else _like(x, tensors[name]) for name, x in rounded.items()}
    found = gradients(case, rounded, "triton")
    due = gradients(case, {name: x.double() for name, x in rounded.items()}, None)
    for name, right in due.items():
        mine = found[name]
        assert mine.dtype == rounded[name].dtype
        error = float((mine.double() - right).norm() / right.norm().clamp(min=1e-20))
        assert error <= times * ERRORS[dtype], f"{name}: {error}"


def _like(x: Tensor, strided: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, strided.stride(), dtype=x.dtype).copy_(x)


def without(case: cases.Case, *names: str, **tensors: Tensor) -> cases.Case:
    """The case without some of its tensors, and with others in place of its own."""
    return replace(
        case,
        tensors={n: tensors.get(n, x) for n, x in case.tensors.items()},
        given={n: tensors.get(n, x) for n, x in case.given.items() if n not in names},
    )


# T, P, N, G
SIZES = ((1, 5, 6, 2), (2, 24, 40, 1), (3, 8, 16, 4), (63, 70, 16, 4), (64, 64, 8, 1), (65, 17, 70, 1), (150, 9, 20, 2))


@pytest.mark.parametrize(
    ("size", "dtype"), swept(product(SIZES, ERRORS), lambda case: (case[0], (case[0][0] > 60, case[1]))), ids=str
)
def test_gradients_are_the_definitions(size: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    T, P, N, G = size
    assert_gradients(cases.ssd(T, P=P, N=N, G=G, batch=1), dtype)


@pytest.mark.parametrize("around", [-1, 0, 1])
def test_chunks_whose_pairs_are_summed_in_stripes(around: int) -> None:
    tile = calls.tile_of(8, torch.bfloat16, True, back=True)
    case = cases.ssd(2 * tile.block + around, P=8, N=8, batch=1, H=2, G=1)
    assert_gradients(case, torch.bfloat16)
    assert_gradients(without(cases.ssd(tile.block // 2 + around, P=8, N=8, batch=1), "z"), torch.bfloat16)


def test_heads_that_several_programs_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SPAN", 2)
    assert_gradients(cases.ssd(20, H=10, G=2, P=8, N=8))


def test_sequences_that_are_not_cut() -> None:
    assert_gradients(cases.ssd(70, batch=5, H=4, P=8, N=8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_sequences(dtype: torch.dtype) -> None:
    cu = torch.tensor([0, 3, 3, 70, 71, 200, 200], dtype=torch.int32)
    assert_gradients(cases.ssd(200, P=8, N=8, cu=cu), dtype)


def test_some_tensors_alone_and_weights_of_each_column() -> None:
    case = cases.ssd(40, P=8, N=8)
    assert_gradients(without(case, "D", "z", "dt_bias", "state"))
    assert_gradients(without(case, "z", D=torch.randn(4, 8, dtype=torch.float64)))


def test_no_tokens_hand_the_gradient_of_the_state_on() -> None:
    x, dt, B = torch.randn(2, 0, 3, 8), torch.randn(2, 0, 3), torch.randn(2, 0, 1, 8)
    state, d_last = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    found = kernels.backward(x, d_last, (x, dt, B, B, None), (-torch.rand(3), None, None), state, None, (True, 0.0, 9.0))
    assert [g.shape for g in found] == [x.shape, dt.shape, B.shape, B.shape, (3,), state.shape]
    assert not found[4].any()
    assert torch.equal(found[5], d_last)


def test_steps_that_are_tiny_and_decays_that_underflow() -> None:
    case = cases.ssd(70, P=8, N=8, softplus=False)
    steps = torch.where(torch.rand(2, 70, 4) < 0.3, 50.0, 1e-6).double()
    # a sum of exponents of thousands is rounded to fp32 once
    assert_gradients(without(case, "dt_bias", dt=steps), times=10)


def test_decays_so_strong_that_the_gradient_of_the_rate_is_small() -> None:
    """A token's share in itself is in the rows and the columns of the pairs, and may not be left over from their difference."""
    case = without(cases.ssd(70, P=8, N=8, softplus=False), "dt_bias", "state")
    strong = without(case, dt=torch.ones(2, 70, 4, dtype=torch.float64), A=torch.full((4,), -9.0, dtype=torch.float64))
    assert_gradients(strong, times=2)
    assert_gradients(strong, torch.bfloat16)


@pytest.mark.parametrize("limits", [(0.01, 0.3), (0.5, 0.5)])
def test_limits_let_no_gradient_through(limits: tuple[float, float]) -> None:
    assert_gradients(cases.ssd(40, P=8, N=8, dt_limit=limits))


def test_strides_and_expanded_gradients() -> None:
    case = cases.ssd(40, P=8, N=8)
    x, B = (case.tensors[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("x", "B"))
    assert_gradients(without(case, x=x, B=B))
    leaves = [case.tensors[n].float().requires_grad_() for n in case.tensors]
    y, _ = case.run(*leaves, backend="triton")
    expanded = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    for mine, right in zip(expanded, torch.autograd.grad(y, leaves, torch.ones_like(y)), strict=True):
        assert torch.equal(mine, right)


def test_gradients_of_the_outputs_alone_and_of_the_last_state_alone() -> None:
    case = cases.ssd(40, P=8, N=8)
    for n in (0, 1):
        found, due = [], []
        for out, way in ((found, "triton"), (due, "tiled")):
            leaves = [case.tensors[name].float().requires_grad_() for name in case.tensors]
            out += torch.autograd.grad(
                case.run(*leaves, backend=way)[n].square().sum(), leaves, materialize_grads=True, allow_unused=True
            )
        for mine, right in zip(found, due, strict=True):
            assert (mine - right).norm() <= 1e-5 * right.norm()
