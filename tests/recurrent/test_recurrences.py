"""Every recurrence beside its loop over tokens: values, gradients, states, packed sequences, pieces, hostile numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile import recurrent as rec
from rooftile.errors import Unsupported
from tests.recurrent import cases
from tests.recurrent.cases import KINDS, Case

kinds = pytest.mark.parametrize("kind", list(KINDS))


def flat(case: Case) -> dict[str, Tensor]:
    return {**case.tensors, **case.given}


def call(case: Case, tensors: dict[str, Tensor], function: Any = None, **more: Any) -> Any:
    """Calls the package, or with `function` the definition, on tensors by name."""
    first = {name: tensors[name] for name in case.tensors}
    given = {name: tensors[name] for name in case.given if name in tensors}
    if function is not None:
        return case.defining(first, given)
    return case.run(*first.values(), **given, **case.options, **more)


def with_gradients(case: Case, tensors: dict[str, Tensor], function: Any = None, **more: Any) -> list[Tensor]:
    """The outputs, and the gradients of all tensors from both of them."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    found = call(case, leaves, function, **more)
    weights = [torch.linspace(0.2, 1.7, max(1, x.numel()))[: x.numel()].reshape(x.shape).to(x) for x in found]
    loss = sum((x * w).sum() for x, w in zip(found, weights, strict=True))
    return [*(x.detach() for x in found), *torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)]


def close(found: Any, due: Any, tolerance: float = 1e-10) -> None:
    for a, b in zip(found, due, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance), (a - b).abs().max()


@kinds
@pytest.mark.parametrize("T", [0, 1, 2, 3, 31, 32, 33, 63, 64, 65])
def test_values_and_gradients_are_the_loops(kind: str, T: int) -> None:
    torch.manual_seed(T)
    case = KINDS[kind](T)
    close(with_gradients(case, flat(case)), with_gradients(case, flat(case), "defined"))


@kinds
def test_token_by_token_is_the_same_with_gradients_of_gradients(kind: str) -> None:
    torch.manual_seed(1)
    case = KINDS[kind](5)
    close(with_gradients(case, flat(case), backend="eager"), with_gradients(case, flat(case), "defined"))
    names = list(flat(case))
    leaves = [flat(case)[name].requires_grad_() for name in names]

    def run(*tensors: Tensor) -> Any:
        return call(case, dict(zip(names, tensors, strict=True)), backend="eager")

    assert torch.autograd.gradgradcheck(run, leaves, atol=1e-4)


@kinds
def test_the_operators_gradients_are_those_of_differences(kind: str) -> None:
    torch.manual_seed(2)
    case = KINDS[kind](4, batch=1)
    names = list(flat(case))
    leaves = [flat(case)[name].requires_grad_() for name in names]

    def run(*tensors: Tensor) -> Any:
        return call(case, dict(zip(names, tensors, strict=True)))

    assert torch.autograd.gradcheck(run, leaves, atol=1e-6)
    (d,) = torch.autograd.grad(run(*leaves)[0].sum(), leaves[0], create_graph=True)
    with pytest.raises(Unsupported, match=r"double backward through .*; backend='eager' has it"):
        d.sum().backward()


@kinds
@pytest.mark.parametrize("cu", [[0, 40, 40, 41, 70], [0, 0, 3, 70, 70], [0]])
def test_no_sequence_of_a_pack_reads_another(kind: str, cu: list[int]) -> None:
    torch.manual_seed(3)
    case = KINDS[kind](cu[-1], cu=torch.tensor(cu, dtype=torch.int32))
    found = with_gradients(case, flat(case))
    if len(cu) > 1:
        close(found, with_gradients(case, flat(case), "defined"))
    else:
        assert found[0].shape[0] == 0
        assert found[1].shape[0] == 0


@kinds
@pytest.mark.parametrize("cuts", [[1], [2, 3, 40], [64], [69]])
def test_a_call_goes_on_where_the_last_one_ended(kind: str, cuts: list[int]) -> None:
    torch.manual_seed(4)
    case = KINDS[kind](70)
    tensors = flat(case)
    whole = call(case, tensors)
    per_token = [name for name, x in tensors.items() if x.ndim > 1 and x.shape[:2] == (2, 70)]
    parts, state = [], tensors[case.state]
    for first, last in zip([0, *cuts], [*cuts, 70], strict=True):
        piece = {name: x[:, first:last] if name in per_token else x for name, x in tensors.items()}
        y, state = call(case, piece | {case.state: state})
        parts.append(y)
    close((torch.cat(parts, 1), state), whole)


STEPS = {"ssd": rec.ssd_step, "scan": rec.selective_scan_step, "conv": rec.conv_step, "delta": rec.gated_delta_step}


@kinds
@pytest.mark.parametrize("slots", [None, torch.tensor([4, 1], dtype=torch.int32)])
def test_steps_are_the_rows_of_the_whole(kind: str, slots: Tensor | None) -> None:
    torch.manual_seed(5)
    case = KINDS[kind](9)
    tensors = flat(case)
    due, last = call(case, tensors)
    own = [0, 1] if slots is None else slots.tolist()
    memory = torch.full((2 if slots is None else 6, *last.shape[1:]), 7.0, dtype=torch.float64)
    memory[own] = tensors.pop(case.state)
    step = STEPS.get(kind, rec.gated_delta_step)
    for t in range(9):
        one = {name: x[:, t] if x.ndim > 1 and x.shape[:2] == (2, 9) else x for name, x in tensors.items()}
        first = [one[name] for name in case.tensors]
        y = step(memory, *first, slots=slots, **{name: one[name] for name in case.given if name in one})
        assert torch.allclose(y, due[:, t], atol=1e-12)
    assert torch.allclose(memory[own], last, atol=1e-12)
    assert (memory[[n for n in range(len(memory)) if n not in own]] == 7.0).all()


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_inputs_are_no_further_off_than_their_rounding(kind: str, dtype: torch.dtype) -> None:
    """The exact results of the rounded inputs, in the output's dtype; the token loop in fp32 is the measure."""
    torch.manual_seed(6)
    case = KINDS[kind](70)
    wide = {"A", "dt_bias", "D", "dt", "g", "beta", "weight", "bias", "state"}
    tensors = {name: x.to(torch.float32 if name in wide else dtype) for name, x in flat(case).items()}
    exact = call(case, {name: x.double() for name, x in tensors.items()}, "defined")
    plain = call(case, {name: x.float() for name, x in tensors.items()}, "defined")
    found = call(case, tensors)
    assert found[0].dtype == dtype
    assert found[1].dtype == (dtype if kind == "conv" else torch.float32)
    for own, due, measure in zip(found, exact, plain, strict=True):
        ulp = torch.finfo(own.dtype).eps * due.abs().max()
        for worst in (torch.amax, torch.mean):
            assert worst((own.double() - due).abs()) <= 2 * worst((measure.to(own.dtype).double() - due).abs()) + 8 * ulp


@pytest.mark.parametrize("kind", ["ssd", "scan", "delta", "channels"])
@pytest.mark.parametrize("size", [1e-6, 50.0])
def test_tiny_and_huge_decays(kind: str, size: float) -> None:
    """Steps of 50 take a state to nothing, and no gradient to NaN; beside them, small differences keep their bits."""
    torch.manual_seed(7)
    case = KINDS[kind](70)
    tensors = flat(case)
    if kind in ("ssd", "scan"):
        del tensors["dt_bias"]
        tensors["dt"] = torch.where(torch.rand_like(tensors["dt"]) < 0.5, size, 0.01 * torch.rand_like(tensors["dt"]))
        case = Case(case.run, case.defined, case.tensors, {n: x for n, x in case.given.items() if n in tensors},
                    {**case.options, "softplus": False})  # fmt: skip
    else:
        tensors["g"] = -torch.where(torch.rand_like(tensors["g"]) < 0.5, size * 20, 0.01 * torch.rand_like(tensors["g"]))
    narrow = {name: x.float() for name, x in tensors.items()}
    exact = with_gradients(case, {name: x.double() for name, x in narrow.items()}, "defined")
    for own, due in zip(with_gradients(case, narrow), exact, strict=True):
        assert own.isfinite().all()
        assert (own - due).abs().max() <= 1e-4 * (1 + due.abs().max())


@kinds
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_reaches_no_earlier_output(kind: str, bad: float) -> None:
    torch.manual_seed(8)
    case = KINDS[kind](70)
    tensors = {name: x.clone() for name, x in flat(case).items()}
    due, _ = call(case, tensors)
    for name in case.tensors:
        if tensors[name].ndim > 1 and tensors[name].shape[:2] == (2, 70):
            spoilt = tensors | {name: tensors[name].clone()}
            spoilt[name][0, 40] = bad
            y, _ = call(case, spoilt)
            assert torch.allclose(y[0, :40], due[0, :40], atol=1e-12), name
            assert torch.equal(y[1], due[1]) or torch.allclose(y[1], due[1], atol=1e-12)


@kinds
def test_strides_and_expanded_tensors(kind: str) -> None:
    torch.manual_seed(9)
    case = KINDS[kind](20)
    tensors = flat(case)
    strided = {
        name: torch.stack((x, x), -1)[..., 0] if x.ndim < 3 else x.transpose(0, 1).contiguous().transpose(0, 1)
        for name, x in tensors.items()
    }
    close(with_gradients(case, strided), with_gradients(case, tensors), 1e-12)


def test_clamped_steps() -> None:
    torch.manual_seed(10)
    case = cases.ssd(20, dt_limit=(0.3, 0.9))
    close(with_gradients(case, flat(case)), with_gradients(case, flat(case), "defined"))


def test_a_skip_for_each_number_of_a_head() -> None:
    case = cases.ssd(20)
    tensors = flat(case) | {"D": cases.rand(4, 5)}
    close(with_gradients(case, tensors), with_gradients(case, tensors, "defined"))


def test_b_and_c_of_groups_of_channels() -> None:
    case = cases.scan(20, W=6)
    tensors = flat(case) | {name: cases.rand(2, 20, 2, 3) for name in ("B", "C")}
    y, state = call(case, tensors)
    for group in range(2):
        own = slice(3 * group, 3 * group + 3)
        part = {n: x[..., own] if n in ("x", "dt", "z", "D", "dt_bias") else x for n, x in tensors.items()}
        part |= {n: tensors[n][:, :, group] for n in ("B", "C")} | {"A": tensors["A"][own], "state": tensors["state"][:, own]}
        close((y[..., own], state[:, own]), call(case, part, "defined"))
