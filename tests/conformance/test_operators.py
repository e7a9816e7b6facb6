"""Every kernel is an operator that a mode sees, with a fake, a count of its work, and no silent gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import rooftile as rt
from rooftile.cost import counts
from rooftile.fused import gated
from rooftile.fused.norm import Weights, add_norm, normalise
from rooftile.fused.rope import Rotation, rotate
from rooftile.runtime.operators import DEFINED
from tests.conformance.operator_calls import CALLS
from tests.conformance.watching import Seen, watching

# what torch deprecates in itself
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


# operators with a gradient, and their gradients
DIFFERENTIABLE = {
    "attention", "attention_backward", "chunked_recurrence", "chunked_recurrence_backward", "selected_attention",
    "ssd", "ssd_backward", "selective_scan", "selective_scan_backward", "causal_conv", "causal_conv_backward", "gated_delta",
    "gated_delta_backward",
    "selected_attention_backward", "gated_sum", "gated_sum_backward", "gathered_attention", "gathered_attention_backward",
    "hstu_attention", "target_attention",
    "linear_quantised", "linear_rounded", "weight_rounded", "norm", "sum_norm", "gated_norm", "gated", "gate_up", "rotary",
    "softmax", "cross_entropy", "experts", "experts_backward",
    "linear_cross_entropy", "linear_cross_entropy_reduced", "linear_two_four", "linear_masked",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_memory_as_torch_has_it(monkeypatch: pytest.MonkeyPatch, _nan_in_fresh_memory: None) -> None:
    """Fake tensors and tracing meet torch's own torch.empty here."""
    monkeypatch.undo()


def seen(name: str, device: torch.device) -> tuple[Seen, counts.Work]:
    with watching() as watch:
        due = CALLS[name](device)
    # rotary positions of queries come before those of keys
    call = next(call for call in watch.calls if call.name == name)
    return call, due


def test_every_operator_has_a_fake_a_count_and_a_call_here() -> None:
    assert set(DEFINED) == set(counts.COUNTED) == set(CALLS)
    for name, operator in DEFINED.items():
        assert torch._library.simple_registry.singleton.find(f"rooftile::{name}").fake_impl.kernel is not None
        assert operator.namespace == "rooftile"


@pytest.mark.parametrize("name", CALLS)
def test_the_work_of_a_call_is_counted(name: str, device: torch.device) -> None:
    call, due = seen(name, device)
    assert counts.work(name, call.arguments, call.results) == due


def _detached(x):
    if isinstance(x, list):
        return [_detached(part) for part in x]
    return x.detach() if isinstance(x, Tensor) else x


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str, device: torch.device) -> None:
    call, _ = seen(name, device)
    tests = {"test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic", "test_schema"}
    if any(isinstance(x, Tensor) and x.dtype == torch.float8_e4m3fn for x in call.arguments):
        # torch compares the arguments before and after, and has no comparison of FP8
        tests -= {"test_schema", "test_aot_dispatch_dynamic"}
    arguments = tuple(_detached(x) for x in call.arguments)
    found = torch.library.opcheck(DEFINED[name], arguments, test_utils=sorted(tests))
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", sorted(set(CALLS) - DIFFERENTIABLE))
def test_an_operator_without_a_gradient_refuses_to_give_one(name: str, device: torch.device) -> None:
    call, _ = seen(name, device)
    first = next(n for n, x in enumerate(call.arguments) if isinstance(x, Tensor) and x.is_floating_point())
    arguments = list(call.arguments)
    arguments[first] = arguments[first].detach().float().requires_grad_()
    with pytest.raises(rt.Unsupported, match=f"rooftile::{name} has no gradient, and an input requires one"):
        DEFINED[name](*arguments)


@pytest.mark.parametrize("watched", [False, True])
def test_fused_operations_have_the_gradients_of_their_definitions(watched: bool, device: torch.device) -> None:
    x, residual = torch.randn(2, 5, 8, device=device, dtype=torch.float64).unbind()
    weights = Weights(torch.randn(8, device=device, dtype=torch.float64), None, 1e-6, True)
    angles = torch.rand(5, 2, device=device, dtype=torch.float64)
    functions = {
        "norm": lambda x: normalise(x, weights._replace(bias=weights.weight)),
        "add": lambda x: add_norm(x, residual, weights._replace(bias=weights.weight)),
    }
    for function in functions.values():
        leaf = x.clone().requires_grad_()
        if watched:
            with watching() as watch:
                assert torch.autograd.gradcheck(function, leaf)
            assert not watch.calls
        else:
            assert torch.autograd.gradcheck(function, leaf)
    heads = torch.randn(5, 2, 6, device=device, requires_grad=True)
    rotate(heads, Rotation(angles.cos().float(), angles.sin().float())).sum().backward()
    assert heads.grad is not None
    assert heads.grad.abs().sum() > 0


def test_a_profiler_sees_operators(device: torch.device) -> None:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        gated(torch.randn(5, 8, device=device), "silu")
    assert "rooftile::gated" in {event.key for event in found.key_averages()}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("precision", ["fp8", "int8", rt.Precision(qk="native")], ids=str)
def test_quantised_attention_is_one_graph(precision, dynamic: bool | None, device: torch.device) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        qkv = rt.quantise_qkv(q * 2, k, v, precision)
        o, lse = rt.attention_quantised_with_lse(qkv, rt.CAUSAL)
        return o + rt.attention(q, k, v, rt.CAUSAL, precision=precision) + lse.mT.unsqueeze(-1)

    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 150, 4, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    compiled = torch.compile(program, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), program(q, k, v))


def test_a_decoder_layer_is_one_graph(device: torch.device) -> None:
    weights = Weights(torch.randn(32, device=device), None, 1e-6, False)

    def program(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = add_norm(normalise(x, weights), residual.clone(), weights)
        return gated(x, "gelu_new"), residual

    torch._dynamo.reset()
    x, residual = torch.randn(2, 5, 32, device=device).unbind()
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    for found, due in zip(compiled(x, residual), program(x, residual), strict=True):
        assert torch.equal(found, due)
