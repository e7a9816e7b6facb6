"""The kernels of the causal convolution, of the selective scan and of the steps, interpreted: against the definitions in fp64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import recurrent as rec
from rooftile.recurrent import walk
from rooftile.recurrent.kernels import convolution, state_space_step
from rooftile.recurrent.kernels.selective import call as selective_call
from rooftile.runtime.launch import observe
from tests.grids import pairs, swept
from tests.recurrent import cases
from tests.recurrent.cases import Case

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROOM = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
PACKS = [[0, 40, 40, 41, 70], [0, 0, 2, 3, 3, 37], [0]]
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")


def rounded(case: Case, dtype: torch.dtype) -> Case:
    """Rounds the tensors and tails of a case to the dtype, and its states and constants to fp32."""
    wide = {"A", "D", "dt_bias", "state", "weight", "bias"}
    both = [
        {name: x.to(torch.float32 if name in wide else dtype) for name, x in its.items()} for its in (case.tensors, case.given)
    ]  # fmt: skip
    return Case(case.run, case.defined, *both, case.options, case.state)


def close(found: Any, due: Any, room: float) -> None:
    for a, b in zip(found, due, strict=True):
        assert a.shape == b.shape
        assert a.is_contiguous()
        scale = b.abs().max().item() if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b.double(), rtol=room, atol=room * max(scale, 1e-3))


def double(tensors: Any) -> dict[str, Tensor]:
    return {name: x.double() for name, x in tensors.items()}


def check(case: Case, dtype: torch.dtype) -> None:
    found = case.run(*case.tensors.values(), **case.given, **case.options, backend="triton")
    close(found, case.defining(double(case.tensors), double(case.given)), ROOM[dtype])


KINDS = {"conv": cases.conv, "scan": cases.scan}
kinds = pytest.mark.parametrize("kind", list(KINDS))


@pytest.fixture(autouse=True)
def _no_plain_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*unused: Any) -> None:
        raise AssertionError("the plain walk ran")

    monkeypatch.setattr(walk, "forward", refuse)
    # a few chunks in a short sequence
    monkeypatch.setattr(selective_call, "CHUNK", 16)


@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T", [0, 1, 2, 3, 16, 35])
def test_values_are_the_loops(kind: str, T: int, dtype: torch.dtype) -> None:
    torch.manual_seed(T)
    check(rounded(KINDS[kind](T), dtype), dtype)


@kinds
@pytest.mark.parametrize("cu", PACKS, ids=str)
def test_no_sequence_of_a_pack_reads_another(kind: str, cu: list[int]) -> None:
    torch.manual_seed(3)
    offsets = torch.tensor(cu, dtype=torch.int32)
    case = rounded(KINDS[kind](cu[-1], cu=offsets), torch.float32)
    if len(cu) > 1:
        check(case, torch.float32)
    else:
        y, last = case.run(*case.tensors.values(), **case.given, cu=offsets, backend="triton")
        assert (y.shape[0], last.shape[0]) == (0, 0)


@kinds
def test_any_strides(kind: str) -> None:
    torch.manual_seed(4)
    case = rounded(KINDS[kind](21), torch.float32)

    def spread(x: Tensor) -> Tensor:
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]

    tensors = {
        name: x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 2 else spread(x) for name, x in case.tensors.items()
    }
    given = {name: spread(x) for name, x in case.given.items()}
    check(Case(case.run, case.defined, tensors, given, case.options, case.state), torch.float32)


@pytest.mark.parametrize("K", [1, 2, 3, 8])
@pytest.mark.parametrize("activation", ["silu", None])
def test_windows_of_a_convolution(K: int, activation: str | None) -> None:
    torch.manual_seed(K)
    for T in (0, 2, 19):
        check(rounded(cases.conv(T, K=K, W=300, activation=activation), torch.float32), torch.float32)


def test_a_window_that_the_kernels_do_not_have_is_refused() -> None:
    with pytest.raises(rt.Unsupported, match="a window of 9 tokens; has up to 8"):
        rec.causal_conv(torch.randn(1, 3, 4), torch.randn(4, 9), backend="triton")
    with pytest.raises(rt.Unsupported, match="float64; has float32, bfloat16, float16"):
        rec.causal_conv(torch.randn(1, 3, 4).double(), torch.randn(4, 4).double(), backend="triton")


SLOTS = [None, torch.tensor([4, 1], dtype=torch.int32), torch.tensor([0, 3])]


@pytest.mark.parametrize("slots", SLOTS, ids=["rows", "int32", "int64"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [1, 2, 4])
def test_a_step_of_the_convolution(K: int, dtype: torch.dtype, slots: Tensor | None) -> None:
    torch.manual_seed(5)
    case = rounded(cases.conv(1, K=K, W=300), dtype)
    x, weight, bias = case.tensors.values()
    rows = [0, 1] if slots is None else slots.tolist()
    tail = torch.randn(2 if slots is None else 6, 300, K - 1).to(dtype)
    due, last = case.defining(double(case.tensors), {"tail": tail[rows].double()})
    before = tail.clone()
    names: list[str] = []
    with observe(names.append):
        y = rec.conv_step(tail, x[:, 0], weight, bias, slots=slots)
    assert names == ["_conv_step"]
    close([y], [due[:, 0]], ROOM[dtype])
    before[rows] = last.to(dtype)
    assert torch.equal(tail, before)


@pytest.mark.parametrize("slots", SLOTS, ids=["rows", "int32", "int64"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", DTYPES, ids=str)
@pytest.mark.parametrize("less", [(), ("D",), ("z", "dt_bias")])
def test_a_step_of_mamba_2(less: tuple[str, ...], kept: torch.dtype, dtype: torch.dtype, slots: Tensor | None) -> None:
    torch.manual_seed(6)
    limits = (0.3, 1.1) if less else (0.0, float("inf"))
    case = rounded(cases.ssd(1, P=37, N=20, dt_limit=limits), dtype)
    rows = [0, 1] if slots is None else slots.tolist()
    state = torch.randn(2 if slots is None else 6, 4, 37, 20).to(kept)
    x, dt, A, B, C = case.tensors.values()
    given = {name: value for name, value in case.given.items() if name not in (*less, "state")}
    due, last = case.defining(double(case.tensors), double(given) | {"state": state[rows].double()})
    before = state.clone()
    own = [x[:, 0], dt[:, 0], B[:, 0], C[:, 0], given["z"][:, 0] if "z" in given else None]
    y = state_space_step.step(state, own, [A, given.get("D"), given.get("dt_bias")], slots, (True, *limits))
    close([y], [due[:, 0]], ROOM[dtype])
    close([state[rows]], [last], ROOM[kept])
    others = [n for n in range(len(state)) if n not in rows]
    assert torch.equal(state[others], before[others])


def test_a_step_of_mamba_2_with_a_weight_of_each_row_and_shared_constants() -> None:
    torch.manual_seed(7)
    case = rounded(cases.ssd(1), torch.float32)
    x, dt, A, B, C = case.tensors.values()
    D = torch.randn(4, 5)
    dt, A = dt[..., :1].expand(2, 1, 4), A[:1].expand(4)
    state = case.given["state"].clone().transpose(2, 3).contiguous().transpose(2, 3)
    tensors = double({"x": x, "dt": dt, "A": A, "B": B, "C": C})
    due, last = case.defining(tensors, {"D": D.double(), "state": state.double()})
    y = state_space_step.step(state, [x[:, 0], dt[:, 0], B[:, 0], C[:, 0], None], [A, D, None], None, (True, 0.0, float("inf")))
    close([y, state.contiguous()], [due[:, 0], last], ROOM[torch.float32])


def test_small_steps_keep_their_bits() -> None:
    """The softplus of a very negative number is its exponential, and not 0."""
    dt = torch.tensor([[-30.0, -12.0, -5.0, 30.0]])
    state = torch.zeros(1, 4, 1, 1)
    one = torch.ones(1, 4, 1)
    state_space_step.step(state, [one, dt, one, one, None], [torch.zeros(4), None, None], None, (True, 0.0, float("inf")))
    torch.testing.assert_close(state.flatten(), torch.nn.functional.softplus(dt.double()).flatten().float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("less", [("D",), ("z", "dt_bias"), ("D", "z", "dt_bias", "state")])
def test_a_scan_without_some_of_its_tensors(less: tuple[str, ...]) -> None:
    torch.manual_seed(8)
    case = rounded(cases.scan(20, W=37, N=16), torch.float32)
    given = {name: x for name, x in case.given.items() if name not in less}
    check(Case(case.run, case.defined, case.tensors, given, case.options, case.state), torch.float32)


def test_a_scan_of_steps_as_they_are() -> None:
    torch.manual_seed(9)
    case = rounded(cases.scan(20, softplus=False), torch.float32)
    tensors = dict(case.tensors) | {"dt": case.tensors["dt"].abs()}
    given = {"D": case.given["D"]}
    check(Case(case.run, case.defined, tensors, given, case.options, case.state), torch.float32)


def test_a_scan_in_groups_is_refused() -> None:
    x, A, B = torch.randn(1, 3, 4), -torch.rand(4, 2), torch.randn(1, 3, 2, 2)
    with pytest.raises(rt.Unsupported, match=r"B \(1, 3, 2, 2\) in groups; has B and C that serve all channels"):
        rec.selective_scan(x, x, A, B, B, backend="triton")


@pytest.mark.parametrize("slots", SLOTS, ids=["rows", "int32", "int64"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("less", [(), ("D",), ("z", "dt_bias")])
def test_a_step_of_the_scan(less: tuple[str, ...], kept: torch.dtype, dtype: torch.dtype, slots: Tensor | None) -> None:
    torch.manual_seed(10)
    case = rounded(cases.scan(1, W=131, N=5), dtype)
    rows = [0, 1] if slots is None else slots.tolist()
    state = torch.randn(2 if slots is None else 6, 131, 5).to(kept)
    x, dt, A, B, C = case.tensors.values()
    given = {name: value for name, value in case.given.items() if name not in (*less, "state")}
    due, last = case.defining(double(case.tensors), double(given) | {"state": state[rows].double()})
    before = state.clone()
    own = dict(given) | ({"z": given["z"][:, 0]} if "z" in given else {})
    names: list[str] = []
    with observe(names.append):
        y = rec.selective_scan_step(state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], slots=slots, **own)
    assert names == ["_scan_step"]
    close([y], [due[:, 0]], ROOM[dtype])
    close([state[rows]], [last], ROOM[kept])
    others = [n for n in range(len(state)) if n not in rows]
    assert torch.equal(state[others], before[others])


def conv_gradients(case: Case, defined: bool, use_last: bool) -> list[Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in (case.tensors | case.given).items()}
    first, given = ({name: leaves[name] for name in its} for its in (case.tensors, case.given))
    y, last = case.defining(first, given) if defined else case.run(*first.values(), **given, **case.options, backend="triton")
    loss = (y * torch.linspace(-1, 1, max(1, y.numel()))[: y.numel()].reshape(y.shape).to(y)).sum()
    # all tensors are in the graph, where no token is there as well
    loss = loss + sum(0 * x.sum() for x in leaves.values())
    if use_last:
        loss = loss + (last * torch.linspace(0.5, 1, max(1, last.numel()))[: last.numel()].reshape(last.shape).to(last)).sum()
    return list(torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True))


CUT = (None, *map(tuple, PACKS[:2]), (0, 0, 2, 3, 3))


@pytest.mark.parametrize(("cu", "activation", "K"), swept(product(CUT, ("silu", None), (1, 2, 4, 8)), pairs), ids=str)
def test_gradients_of_the_convolution(
    cu: tuple[int, ...] | None, activation: str | None, K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(K)
    monkeypatch.setattr(convolution, "PART", 32)
    monkeypatch.setattr(walk, "backward", None)
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    for T in (0, 1, 2, 3, 16, 70) if cu is None else (cu[-1],):
        case = rounded(cases.conv(T, K=K, cu=offsets, activation=activation), torch.float32)
        wide = Case(case.run, case.defined, double(case.tensors), double(case.given), case.options, case.state)
        for use_last in (True, False):
            close(conv_gradients(case, False, use_last), conv_gradients(wide, True, use_last), ROOM[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_gradients_of_the_convolution_in_16_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(11)
    case = rounded(cases.conv(35, W=150), dtype)
    del case.tensors["bias"]
    wide = Case(case.run, case.defined, double(case.tensors), double(case.given), case.options, case.state)
    found, due = conv_gradients(case, False, True), conv_gradients(wide, True, True)
    assert [x.dtype for x in found] == [dtype, torch.float32, dtype]
    close(found, due, 4 * ROOM[dtype])
