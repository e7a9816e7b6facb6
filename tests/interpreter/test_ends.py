"""Kernels that find states at the ends of tokens without outputs, interpreted: against whole passes in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from rooftile import approximate as ap
from rooftile.recurrent import delta, selective, state_space, walk
from rooftile.recurrent.kernels.selective import call as selective_call
from rooftile.recurrent.kernels.state_space import call as state_space_call
from rooftile.recurrent.linear import chunked
from rooftile.recurrent.linear.kernels import call as linear_call
from rooftile.recurrent.linear.kernels import gradients as linear_gradients
from rooftile.recurrent.linear.kernels import outputs as linear_outputs
from rooftile.recurrent.linear.kernels import states as linear_states
from rooftile.recurrent.linear.kernels import tiles as linear_tiles
from rooftile.recurrent.linear.on_ranks import LinearOnRank, unpacked
from rooftile.recurrent.linear.problem import Recurrence
from rooftile.recurrent.split.rules import RuleOnRank
from tests.recurrent import cases

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
ROOM = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
# the tensors of tokens in the dtype of the problem; others are in fp32
NARROW = {"x", "B", "C", "z", "q", "k", "v"}
RULES: dict[str, Any] = {
    "ssd": (state_space.OPERATORS, (True, 0.0, 2.0), lambda T, batch: cases.ssd(T, batch=batch, P=24, N=20)),
    "heads": (state_space.OPERATORS, (True, 0.0, 2.0), lambda T, batch: cases.ssd(T, batch=batch, H=2, G=1, P=64, N=16)),
    "scan": (selective.OPERATORS, (True,), lambda T, batch: cases.scan(min(T, 40), batch=batch)),
    "delta": (delta.OPERATORS, (0.4, True), lambda T, batch: cases.delta(T, batch=batch)),
    "wide delta": (delta.OPERATORS, (0.1, True), lambda T, batch: cases.delta(T, batch=batch, Hk=1, Hv=1, Dk=64, Dv=64)),
}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts short sequences, and lets no plain operation run for tensors that are not fp64."""
    monkeypatch.setattr(state_space_call, "_SEGMENT", 64)
    monkeypatch.setattr(state_space_call, "processors", lambda device: 1 << 20)
    monkeypatch.setattr(selective_call, "CHUNK", 16)
    for module in (linear_call, linear_gradients, linear_outputs, linear_states, linear_tiles):
        monkeypatch.setattr(module, "SEGMENT", tl.constexpr(64))
    forward, backward = walk.forward, walk.backward

    def checked(run: Any) -> Any:
        def of_fp64(rule: Any, *arguments: Any) -> Any:
            tensors = next(x for x in arguments if isinstance(x, tuple | list))
            assert next(x for x in tensors if x is not None).dtype == torch.float64, "the plain walk ran"
            return run(rule, *arguments)

        return of_fp64

    monkeypatch.setattr(walk, "forward", checked(forward))
    monkeypatch.setattr(walk, "backward", checked(backward))


def assert_near(found: Tensor, due: Tensor, room: float) -> None:
    assert found.shape == due.shape
    assert float((found.double() - due).norm()) <= room * max(float(due.norm()), 1e-3)


@pytest.mark.parametrize(("T", "dtype"), [(1, torch.float32), (150, torch.float32), (70, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("kind", list(RULES))
def test_states_without_outputs_are_those_of_a_whole_pass(kind: str, T: int, dtype: torch.dtype) -> None:
    torch.manual_seed(T)
    operators, options, make = RULES[kind]
    case = make(T, 2)
    every = {**case.tensors, **case.given}
    narrow = [
        None if (x := every.get(name.rstrip("?"))) is None else x.to(dtype if name.rstrip("?") in NARROW else torch.float32)
        for name in operators.rule.tensors
    ]
    state = every["state"].float()
    wide = [None if x is None else x.double() for x in narrow]
    like = narrow[operators.rule.like]
    dy, d_last = torch.randn_like(like), torch.randn_like(state)
    kernels, plain = (RuleOnRank(operators, options, backend) for backend in ("triton", "tiled"))
    zero = torch.zeros_like(state)
    assert_near(kernels.end(narrow, state), plain.forward(wide, state.double(), None)[1], ROOM[dtype])
    map, own = kernels.end_with_map(narrow, zero)
    due, due_own = plain.end_with_map(wide, zero.double())
    assert map.shape == kernels.carry.shape(tuple(state.shape))
    assert_near(map, due, ROOM[dtype])
    assert_near(own, due_own, ROOM[dtype])
    assert_near(kernels.carry.join(map, state, own), plain.forward(wide, state.double(), None)[1], ROOM[dtype])
    first = kernels.begin(dy, d_last, narrow, state, ())
    assert_near(first, plain.backward(dy.double(), d_last.double(), wide, state.double(), None, ())[1], ROOM[dtype])


@pytest.mark.parametrize("T", [1, 150])
@pytest.mark.parametrize("features", ["elu", "exp"])
def test_sums_without_outputs_are_those_of_a_whole_pass(features: str, T: int) -> None:
    torch.manual_seed(T)
    drawn = ap.Features.draw(8, 16, seed=0).projection if features == "exp" else None
    F = 8 if drawn is None else len(drawn)
    q, k, v = torch.randn(2, T, 4, 8), torch.randn(2, T, 2, 8), torch.randn(2, T, 2, 6)
    state = torch.cat((torch.randn(2, 2, F * 6), torch.rand(2, 2, F) + 3, torch.randn(2, 2, 1)), -1)
    if drawn is None:
        state[..., -1] = 0
    dy, d_last = torch.randn(2, T, 4, 6), torch.randn_like(state)
    found = {}
    for backend, dtype in (("triton", torch.float32), ("tiled", torch.float64)):
        problem = Recurrence(feature=features, causal=True, normalise=True, backend=backend, scale=8**-0.5)
        rank = LinearOnRank(problem, (F, 6))
        tensors = [None if x is None else x.to(dtype) for x in (q, k, v, drawn)]
        _, _, kept = rank.forward(tensors, state.to(dtype), None)
        calls = tensors, state.to(dtype)
        found[backend] = rank.end(*calls), rank.begin(dy.to(dtype), d_last.to(dtype), *calls, kept)
        if backend == "triton":
            whole = rank.forward(tensors, state, None)[1], rank.backward(dy, d_last, tensors, state, None, kept)[1]
            assert all(torch.equal(a, b) for a, b in zip(found["triton"], whole, strict=True))
    for mine, due in zip(found["triton"], found["tiled"], strict=True):
        assert_near(mine, due, 1e-5)
    assert chunked.run_end(q.double(), k.double(), v.double(), unpacked(state.double(), (F, 6)), drawn, problem) is None
