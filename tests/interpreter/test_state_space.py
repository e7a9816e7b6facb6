"""The kernels of Mamba-2's recurrence, interpreted: against the definition in fp64, with short segments."""

from __future__ import annotations

import pytest
import torch

from rooftile import recurrent as rec
from rooftile.recurrent.kernels import state_space as kernels
from rooftile.recurrent.kernels.state_space import call as calls
from tests.recurrent import cases

# numpy warns of what a GPU does in silence
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
# the largest error that is allowed, as a share of the norm of what the definition gives
ERRORS = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def assert_defined(case: cases.Case, dtype: torch.dtype = torch.float32, times: float = 1) -> None:
    """Kernels on tensors of a dtype, beside the definition of the same tensors in fp64."""
    narrow = {"x", "B", "C", "z"}

    def rounded(tensors: dict) -> dict:
        return {n: x.to(dtype if n in narrow else torch.float32) for n, x in tensors.items()}

    tensors, given = rounded(dict(case.tensors)), rounded(dict(case.given))
    found = case.run(*tensors.values(), **given, **case.options, backend="triton")
    due = case.defining({n: x.double() for n, x in tensors.items()}, {n: x.double() for n, x in given.items()})
    for mine, right in zip(found, due, strict=True):
        assert mine.shape == right.shape
        error = (mine.double() - right).norm() / right.norm().clamp(min=1e-30)
        assert error <= times * ERRORS[dtype], float(error)


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_SEGMENT", 64)


@pytest.mark.parametrize("dtype", list(ERRORS), ids=str)
@pytest.mark.parametrize(("T", "P", "N", "G"), [(1, 5, 6, 2), (2, 24, 40, 1), (63, 8, 16, 4), (65, 64, 16, 1), (150, 17, 20, 2)])
def test_kernels_equal_the_definition(T: int, P: int, N: int, G: int, dtype: torch.dtype) -> None:
    assert_defined(cases.ssd(T, P=P, N=N, G=G), dtype)


def test_sequences_that_are_not_cut() -> None:
    assert_defined(cases.ssd(70, batch=5, H=4, P=8, N=8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_sequences(dtype: torch.dtype) -> None:
    cu = torch.tensor([0, 3, 3, 70, 71, 200, 200], dtype=torch.int32)
    assert_defined(cases.ssd(200, P=8, N=8, cu=cu), dtype)


def test_no_tokens() -> None:
    state = torch.randn(2, 3, 8, 8)
    args = (torch.randn(2, 0, 3, 8), torch.randn(2, 0, 3), -torch.rand(3), torch.randn(2, 0, 1, 8), torch.randn(2, 0, 1, 8))
    y, last = kernels.forward((args[0], args[1], *args[3:], None), (args[2], None, None), state, None, (True, 0.0, 9.0))
    assert y.shape == (2, 0, 3, 8)
    assert torch.equal(last, state)


def test_steps_below_0_count_as_0_on_every_backend() -> None:
    """Without softplus a bias may take a step below 0."""
    case = cases.ssd(20, P=8, N=8, softplus=False)
    assert (case.tensors["dt"] + case.given["dt_bias"]).min() < 0
    assert_defined(case)
    due = case.defining(case.tensors, case.given)
    for backend in ("tiled", "eager"):
        found = case.run(*case.tensors.values(), **case.given, **case.options, backend=backend)
        torch.testing.assert_close(found, due)
    tokens = {name: x[:, 0] for name, x in case.tensors.items() if name != "A"} | {"z": case.given["z"][:, 0]}
    for dtype in (torch.float64, torch.float32):
        state = case.given["state"].to(dtype, copy=True)
        rec.ssd_step(
            state, *(tokens[name].to(dtype) for name in ("x", "dt")), case.tensors["A"].to(dtype),
            *(tokens[name].to(dtype) for name in ("B", "C")), softplus=False, dt_bias=case.given["dt_bias"].to(dtype),
        )  # fmt: skip
        one = {name: x if name == "A" else x[:, :1] for name, x in case.tensors.items()}
        given = case.given | {"z": case.given["z"][:, :1]}
        torch.testing.assert_close(state.double(), case.defining(one, given)[1], rtol=1e-5, atol=1e-5)


def test_steps_that_are_tiny_and_decays_that_underflow() -> None:
    case = cases.ssd(70, P=8, N=8, softplus=False)
    steps = torch.where(torch.rand(2, 70, 4) < 0.3, 50.0, 1e-6).double()
    given = {name: x for name, x in case.given.items() if name != "dt_bias"}
    # a sum of exponents of thousands is rounded to fp32 once
    assert_defined(cases.Case(case.run, case.defined, {**case.tensors, "dt": steps}, given, case.options), times=5)


def test_steps_far_below_one_keep_their_bits() -> None:
    case = cases.ssd(30, P=8, N=8)
    given = {name: x for name, x in case.given.items() if name not in ("D", "z", "state")}
    far = {**case.tensors, "dt": case.tensors["dt"] - 13}
    assert_defined(cases.Case(case.run, case.defined, far, given, case.options))


def test_limits_and_strides() -> None:
    case = cases.ssd(40, P=8, N=8, dt_limit=(0.01, 0.3))
    strided = {**case.tensors, "x": case.tensors["x"].transpose(1, 2).contiguous().transpose(1, 2)}
    assert_defined(cases.Case(case.run, case.defined, strided, case.given, case.options))


def test_a_state_too_large_is_refused() -> None:
    tokens = (torch.zeros(1, 2, 1, 8), None, None, None, None)
    assert kernels.refusal(tokens, (), torch.zeros(1, 1, 8, 200), ()) == (
        "torch.float32 with P 8 and N 200; has P up to 1024 and N up to 128"
    )
