"""Fused operations with gradients: by their formulas in fp64, with everything that may watch or transform a call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.func import grad, jvp, vmap
from torch.nn import functional

import rooftile as rt
from rooftile import fused
from rooftile.fused import chunks
from rooftile.numerics import quantise_rows
from tests.conformance.fused_cases import (
    DTYPES,
    OFFSETS,
    OPERATIONS,
    WITH_OFFSETS,
    add_offset,
    answers,
    check,
    inputs,
    losses,
)
from tests.conformance.watching import watching
from tests.memory import peak_bytes

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_results_and_gradients(name: str, dtype: torch.dtype, device: torch.device) -> None:
    for rows, size in ((7, 40), (1, 1), (300, 17), (0, 16), (3, 1000)):
        check(name, inputs(name, rows, size, dtype, device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("name", WITH_OFFSETS)
def test_rows_that_share_an_offset(name: str, offset: float, dtype: torch.dtype, device: torch.device) -> None:
    leaves = inputs(name, 7, 40, dtype, device)
    add_offset(leaves[0], offset)
    check(name, leaves)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("offset", OFFSETS)
def test_logits_of_a_layer_that_share_an_offset(offset: float, reduction: str, device: torch.device) -> None:
    x, w, b = (torch.randn(*shape, device=device) for shape in ((9, 8), (30, 8), (30,)))
    b += max(offset, torch.finfo(b.dtype).min)
    target = torch.arange(9, device=device) * 3
    words = {"reduction": reduction, "label_smoothing": 0.1}

    def ours(x, w, b):
        return fused.linear_cross_entropy(x, w, target, linear_bias=b, **words)

    def formula(x, w, b):
        return functional.cross_entropy(x @ w.T + b, target, **words)

    leaves = [y.requires_grad_() for y in (x, w, b)]
    exact = answers(formula, [y.detach().double().requires_grad_() for y in leaves])
    for found, due, usual in zip(answers(ours, leaves), exact, answers(formula, leaves), strict=True):
        errors = [(y.double() - due).abs().amax() for y in (found, usual)]
        assert errors[0] <= 2 * errors[1] + 8 * torch.finfo(torch.float32).eps * due.abs().amax().clamp(min=1.0)


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("name", ["add, rms norm", "add, layer norm"])
def test_one_of_two_results_has_a_gradient(name: str, used: int, device: torch.device) -> None:
    leaves = inputs(name, 7, 40, torch.float64, device)
    found, due = (
        torch.autograd.grad(call(*leaves)[used].square().sum(), leaves, materialize_grads=True)
        for call in (OPERATIONS[name].call, OPERATIONS[name].formula)
    )
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x, y)


def test_results_without_a_gradient_cost_no_memory_in_the_backward() -> None:
    """The gradients of a mean loss are results of its forward; zeros for their own gradients would be as large as the weight."""
    x, w = torch.randn(40, 8).requires_grad_(), torch.randn(1000, 8).requires_grad_()
    loss = fused.linear_cross_entropy(x, w, torch.randint(1000, (40,)))
    with torch.profiler.profile(profile_memory=True) as seen:
        loss.backward()
    taken = [event.self_cpu_memory_usage for event in seen.events() if event.self_cpu_memory_usage > 0]
    # the weight's gradient, and what is small
    assert w.nbytes <= sum(taken) < 1.5 * w.nbytes


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_of_gradients(name: str, device: torch.device) -> None:
    leaves = [x.detach().clone().requires_grad_() for x in inputs(name, 3, 5, torch.float64, device)]
    assert torch.autograd.gradcheck(OPERATIONS[name].call, leaves)
    assert torch.autograd.gradgradcheck(OPERATIONS[name].call, leaves)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_mode_sees_two_operators(name: str, device: torch.device) -> None:
    leaves = inputs(name, 5, 16, torch.float32, device)
    due = answers(OPERATIONS[name].call, leaves)
    with watching() as watch:
        found = answers(OPERATIONS[name].call, leaves)
    assert {call.name.removesuffix("_backward") for call in watch.calls if call.name.endswith("_backward")}
    for x, y in zip(found, due, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", OPERATIONS)
def test_compiled(name: str, device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(OPERATIONS[name].call, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 7):
        leaves = inputs(name, rows, 16, torch.float32, device)
        for x, y in zip(answers(compiled, leaves), answers(OPERATIONS[name].call, leaves), strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", OPERATIONS)
def test_transforms(name: str, device: torch.device) -> None:
    call = OPERATIONS[name].call
    leaves = [x.detach().double() for x in inputs(name, 4, 8, torch.float32, device)]

    def total(*tensors):
        found = call(*tensors)
        return sum(y.sin().sum() for y in ([found] if isinstance(found, torch.Tensor) else found))

    def due(*tensors):
        found = OPERATIONS[name].formula(*tensors)
        return sum(y.sin().sum() for y in ([found] if isinstance(found, torch.Tensor) else found))

    torch.testing.assert_close(grad(total)(*leaves), grad(due)(*leaves))
    tangents = tuple(torch.ones_like(x) for x in leaves)
    torch.testing.assert_close(jvp(total, tuple(leaves), tangents)[1], jvp(due, tuple(leaves), tangents)[1])
    many = vmap(grad(total), in_dims=(0,) + (None,) * (len(leaves) - 1))
    first = torch.stack([leaves[0], 2 * leaves[0]])
    torch.testing.assert_close(many(first, *leaves[1:])[1], grad(due)(first[1], *leaves[1:]))


def test_inference_mode_and_autocast(device: torch.device) -> None:
    for name, operation in OPERATIONS.items():
        leaves = [x.detach() for x in inputs(name, 5, 16, torch.float32, device)]
        due = operation.call(*leaves)
        with torch.inference_mode(), torch.autocast(device.type, dtype=torch.bfloat16):
            found = operation.call(*leaves)
        for x, y in zip(found if isinstance(found, tuple) else [found], due if isinstance(due, tuple) else [due], strict=True):
            assert torch.equal(x, y), name


def test_identities(device: torch.device) -> None:
    x, w = torch.randn(2, 9, 64, device=device), torch.rand(64, device=device)
    torch.testing.assert_close(fused.rms_norm(4 * x, w, 0.0), fused.rms_norm(x, w, 0.0))
    unit = fused.layer_norm(x, torch.ones_like(w), torch.zeros_like(w), 1e-12)
    torch.testing.assert_close(unit.mean(-1), torch.zeros(2, 9, device=device), atol=1e-6, rtol=0)
    torch.testing.assert_close(unit.var(-1, unbiased=False), torch.ones(2, 9, device=device))
    q, k = torch.randn(2, 1, 4, 2, 8, device=device)
    angles = torch.zeros(4, 4, device=device)
    assert torch.equal(fused.rotary(q, k, angles.cos(), angles.sin())[0], q)
    angles[1:] = torch.rand(3, 4, device=device)
    torch.testing.assert_close(fused.rotary(q, k, angles.cos(), angles.sin())[1].norm(dim=-1), k.norm(dim=-1))
    each = angles.expand(1, 4, 4)
    assert torch.equal(fused.rotary(q, k, each.cos(), each.sin())[0], fused.rotary(q, k, angles.cos(), angles.sin())[0])
    # a gate of 1 leaves the norm of each group
    open_gate = torch.full_like(x, 1.2784645427610738)
    groups = fused.rms_norm(x.unflatten(-1, (4, 16)), torch.ones(16, device=device), 1e-5).flatten(-2) * w
    for gate_first in (True, False):
        found = fused.rms_norm_gated(x, open_gate, w, groups=4, gate_first=gate_first)
        torch.testing.assert_close(found, groups)
    up = torch.randn(3, 8, device=device)
    torch.testing.assert_close(fused.swiglu(torch.full_like(up, 50.0), up), 50 * up)
    # a sum is added to, and never written to
    stream = torch.randn(3, 8, device=device)
    before = stream.clone()
    _, total = fused.add_rms_norm(up, stream, w[:8])
    assert torch.equal(stream, before)
    assert torch.equal(total, up + stream)
    lost = torch.full((2, 4), -torch.inf, device=device)
    lost[1, 2] = 0.0
    found = fused.softmax(lost)
    assert found[0].isnan().all()
    assert found[1].tolist() == [0, 0, 1, 0]
    assert fused.gated(torch.randn(2, 3, 8, device=device), "silu").shape == (2, 3, 4)


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_results_are_quantised_as_they_are_rounded(format: str, device: torch.device) -> None:
    x, up = torch.randn(2, 3, 5, 64, device=device).bfloat16()
    w, b = torch.rand(2, 64, device=device).bfloat16()
    for name, given in {
        "rms_norm": (x, w), "layer_norm": (x, w, b), "add_rms_norm": (x, up, w), "add_layer_norm": (x, up, w, b),
        "swiglu": (x, up), "geglu": (x, up), "gated": (torch.cat([x, up], -1), "silu"),
    }.items():  # fmt: skip
        whole, found = getattr(fused, name)(*given), getattr(fused, f"{name}_quantised")(*given, format=format)
        if name.startswith("add"):
            assert torch.equal(found[1], whole[1])
            whole, found = whole[0], found[0]
        due = quantise_rows(whole, format)
        assert torch.equal(found.codes.float(), due.codes.float())
        assert torch.equal(found.scales, due.scales)
        assert rt.linear(found, rt.quantise_weight(torch.randn(7, 64, device=device), format)).shape == (3, 5, 7)
    with pytest.raises(rt.InvalidInput, match=f"format is '{format}' and a gradient is wanted"):
        fused.rms_norm_quantised(x.requires_grad_(), w, format=format)
    with pytest.raises(rt.InvalidInput, match="format is 'int4'; must be 'fp8' or 'int8'"):
        fused.rms_norm_quantised(x.detach(), w, format="int4")
    with pytest.raises(rt.InvalidInput, match=r"rms_norm has no argument out: call rms_norm_quantised\(\.\.\., format=\)"):
        fused.rms_norm(x.detach(), w, out=format)


SETTINGS = {
    "plain": {}, "smoothed": {"label_smoothing": 0.2}, "capped": {"softcap": 2.0}, "z": {"z_loss": 0.05},
    "all": {"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.01, "ignore_index": 2},
}  # fmt: skip


def formula(x, target, reduction, *, label_smoothing=0.0, softcap=None, z_loss=0.0, ignore_index=-100):
    found = losses(x, target, label_smoothing, softcap, z_loss, ignore_index)
    if reduction == "none":
        return found
    return found.sum() / ((target != ignore_index).sum() if reduction == "mean" else 1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", SETTINGS)
def test_cross_entropy(name: str, reduction: str, device: torch.device) -> None:
    x, w = torch.randn(9, 12, device=device) * 3, torch.randn(131, 12, device=device)
    bias, upstream = torch.randn(131, device=device), torch.randn(9, device=device) if reduction == "none" else torch.tensor(1.7)
    target = torch.randint(131, (9,), device=device)
    target[3], target[4] = SETTINGS[name].get("ignore_index", -100), 2
    upstream = upstream.to(device)
    leaves = [t.double().requires_grad_() for t in (x, w, bias)]
    due = formula(functional.linear(*leaves), target, reduction, **SETTINGS[name])
    gradients = torch.autograd.grad(due, leaves, upstream.double())
    ours = [t.clone().requires_grad_() for t in (x, w, bias)]
    found = fused.linear_cross_entropy(*ours[:2], target, linear_bias=ours[2], reduction=reduction, **SETTINGS[name])
    torch.testing.assert_close(found.double(), due, rtol=1e-5, atol=1e-5)
    for leaf, expected in zip(torch.autograd.grad(found, ours, upstream), gradients, strict=True):
        torch.testing.assert_close(leaf.double(), expected, rtol=1e-4, atol=1e-5)
    logits = functional.linear(x, w, bias).requires_grad_()
    found = fused.cross_entropy(logits, target, reduction=reduction, **SETTINGS[name])
    torch.testing.assert_close(found.double(), due, rtol=1e-5, atol=1e-5)
    (dx,) = torch.autograd.grad(found, logits, upstream)
    torch.testing.assert_close((dx @ w).double(), gradients[0], rtol=1e-4, atol=1e-5)


def test_it_is_torchs_loss(device: torch.device) -> None:
    x, target = torch.randn(2, 5, 40, device=device), torch.randint(40, (2, 5), device=device)
    target[1, 2] = -100
    for words in ({}, {"label_smoothing": 0.3}, {"reduction": "sum"}, {"ignore_index": 7}):
        if "ignore_index" in words:
            target = target.clamp(min=0)
        due = functional.cross_entropy(x.flatten(0, 1), target.flatten(), **words)
        torch.testing.assert_close(fused.cross_entropy(x, target, **words), due)
    ignored = torch.full((2, 5), -100, device=device)
    assert fused.cross_entropy(x, ignored).isnan()
    assert fused.cross_entropy(x, ignored, reduction="sum") == 0


def test_parts_of_rows(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The vocabulary is divided by no chunk of rows, and dw is summed in fp32."""
    x, w = torch.randn(23, 16, device=device).bfloat16(), torch.randn(101, 16, device=device).bfloat16()
    target = torch.randint(101, (23,), device=device)
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    whole = fused.linear_cross_entropy(*leaves, target)
    due = torch.autograd.grad(whole, leaves)
    monkeypatch.setattr(chunks, "BYTES_AT_ONCE", 1000)
    found = fused.linear_cross_entropy(*leaves, target)
    torch.testing.assert_close(found, whole)
    for a, b in zip(torch.autograd.grad(found, leaves), due, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)
    shifted = fused.linear_cross_entropy(x, w, target, shift=True)
    torch.testing.assert_close(shifted, fused.linear_cross_entropy(x[:-1], w, target[1:]))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(7,), (2, 7), (3, 1, 2), (2, 0), ()])
def test_any_leading_shape(shape: tuple[int, ...], reduction: str, device: torch.device) -> None:
    """Also hidden states that lie in another order; with `shift` each sequence is shifted by itself."""
    x = torch.randn(16, *shape, device=device).movedim(0, -1).requires_grad_()
    w, target = torch.randn(50, 16, device=device).requires_grad_(), torch.randint(50, shape, device=device)
    for shift in (False, True)[: 1 + bool(shape)]:
        found = fused.linear_cross_entropy(x, w, target, reduction=reduction, shift=shift)
        exact = [t.detach().double().requires_grad_() for t in (x, w)]
        used, labels = (exact[0][..., :-1, :], target[..., 1:]) if shift else (exact[0], target)
        logits = functional.linear(used, exact[1])
        due = functional.cross_entropy(logits.reshape(-1, 50), labels.reshape(-1), reduction=reduction)
        due = due.reshape(labels.shape) if reduction == "none" else due
        torch.testing.assert_close(found, due.float(), equal_nan=True)
        for a, b in zip(torch.autograd.grad(found.sum(), (x, w)), torch.autograd.grad(due.sum(), exact), strict=True):
            torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("T", [1, 17, 300, 1500])
def test_a_loss_needs_no_more_memory_than_two_steps_on_a_cpu(T: int, dtype: torch.dtype, reduction: str) -> None:
    """Tensors that exist at once, forward and backward: few rows have no use for chunks, many have."""
    V, D = 5003, 96
    target = torch.randint(V, (T,))

    def step(loss: Callable[..., torch.Tensor]) -> int:
        leaves = [torch.randn(n, D).to(dtype).requires_grad_() for n in (T, V)]
        return peak_bytes(lambda: loss(*leaves, target, reduction=reduction).sum().backward())

    usual = step(lambda x, w, *rest, **words: functional.cross_entropy(functional.linear(x, w), *rest, **words))
    assert step(fused.linear_cross_entropy) <= usual + chunks.LITTLE
    # the two steps alone: the loss of given logits makes no copies of them
    assert step(lambda x, w, *rest, **words: fused.cross_entropy(functional.linear(x, w), *rest, **words)) <= usual + (3 << 19)


def test_a_long_loss_takes_little_memory_on_a_cpu() -> None:
    """Three chunks of logits, which would take 402 MB in bf16, and as much again for each of two gradients."""
    V, T, D = 50_257, 4000, 4
    x, w = torch.randn(T, D).bfloat16().requires_grad_(), torch.randn(V, D).bfloat16().requires_grad_()
    target = torch.randint(V, (T,))
    assert peak_bytes(lambda: fused.linear_cross_entropy(x, w, target).backward()) < 4 * chunks.ON_CPU


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("V", [151_936, 50_257, 1])
def test_vocabularies_of_models(V: int, reduction: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Also some that no alignment divides, in chunks that do not divide the rows, without a bias."""
    monkeypatch.setattr(chunks, "BYTES_AT_ONCE", 3 * (V + 64) * 4)
    x, w = torch.randn(7, 4, device=device), torch.randn(V, 4, device=device)
    target = torch.randint(V, (7,), device=device)
    target[2] = -100
    dtypes = (torch.float32, torch.float32, torch.float64)
    ours, plain, exact = ([t.to(dtype, copy=True).requires_grad_() for t in (x, w)] for dtype in dtypes)
    found = fused.linear_cross_entropy(*ours, target, reduction=reduction)
    due = formula(functional.linear(*exact), target, reduction)
    torch.testing.assert_close(found.double(), due, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(7, device=device) if reduction == "none" else torch.tensor(-0.3, device=device)
    usual = functional.cross_entropy(functional.linear(*plain), target, reduction=reduction)
    grads = [torch.autograd.grad(y, leaves, upstream.to(y)) for y, leaves in ((found, ours), (usual, plain), (due, exact))]
    for a, b, c in zip(*grads, strict=True):
        # so long a sum of fp32 numbers has no more digits in PyTorch either
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + 1e-6 * c.abs().max()


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
def test_only_wanted_gradients_of_a_loss_are_computed(wanted: tuple[bool, bool], device: torch.device) -> None:
    x, w, target = torch.randn(6, 16, device=device), torch.randn(50, 16, device=device), torch.arange(6, device=device)
    leaves = [t.requires_grad_(flag) for t, flag in zip((x, w), wanted, strict=True)]
    with watching() as watch:
        loss = fused.linear_cross_entropy(x, w, target)
        found = torch.autograd.grad(loss, [t for t in leaves if t.requires_grad], retain_graph=True)
        again = torch.autograd.grad(loss, [t for t in leaves if t.requires_grad])
    assert watch.names == {"linear_cross_entropy_reduced", "linear_cross_entropy_reduced_backward"}
    assert watch.calls[0].results[1].numel() == wanted[0] * x.numel()
    assert watch.calls[0].results[2].numel() == wanted[1] * w.numel()
    due = torch.autograd.grad(functional.cross_entropy(functional.linear(x, w), target), [t for t in leaves if t.requires_grad])
    for a, b, c in zip(found, again, due, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c)
    with torch.no_grad(), watching() as watch:
        fused.linear_cross_entropy(x, w, target)
    assert watch.names == {"linear_cross_entropy"}


def test_derivatives_of_a_reduced_loss(device: torch.device) -> None:
    x, w = (torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True) for shape in ((4, 3), (7, 3)))
    target = torch.tensor([1, -100, 6, 0], device=device)
    for reduction in ("mean", "sum"):
        words = {"reduction": reduction, "label_smoothing": 0.1, "softcap": 2.0, "z_loss": 0.1}
        assert torch.autograd.gradcheck(lambda *t, words=words: fused.linear_cross_entropy(*t, target, **words), (x, w))
        assert torch.autograd.gradgradcheck(lambda *t, words=words: fused.linear_cross_entropy(*t, target, **words), (x, w))
    ignored = torch.full_like(target, -100)
    found = fused.linear_cross_entropy(x, w, ignored)
    assert found.isnan()
    assert torch.autograd.grad(found, w)[0].abs().sum() == 0


@pytest.mark.parametrize("name", ["rms norm", "layer norm", "add, rms norm", "swiglu", "softmax"])
def test_the_longest_rows(name: str, device: torch.device) -> None:
    check(name, inputs(name, 2, 262_144, torch.bfloat16, device))


def test_half_precision_makes_logits_twice(device: torch.device) -> None:
    """A scaled loss keeps gradients of fp16 from vanishing only if they are multiplied by it before they are rounded."""
    x, w = (torch.randn(*shape, device=device).half().requires_grad_() for shape in ((512, 8), (100, 8)))
    target = torch.randint(100, (512,), device=device)
    (found,) = torch.autograd.grad(fused.linear_cross_entropy(x, w, target) * 65536, x)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    (due,) = torch.autograd.grad(functional.cross_entropy(functional.linear(*exact), target) * 65536, exact[0])
    assert (found.double() - due).abs().max() <= 4e-3 * due.abs().max()


def test_a_loss_under_a_compiler_and_transforms(device: torch.device) -> None:
    x, w = torch.randn(6, 16, device=device), torch.randn(50, 16, device=device, requires_grad=True)
    target = torch.randint(50, (6,), device=device)
    torch._dynamo.reset()

    def program(x, w):
        return fused.linear_cross_entropy(x, w, target, label_smoothing=0.1)

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    (due,) = torch.autograd.grad(program(x, w), w)
    torch.testing.assert_close(torch.autograd.grad(compiled(x, w), w)[0], due)
    torch.testing.assert_close(grad(program, argnums=1)(x, w.detach()), due)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert program(x, w).dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: fused.rms_norm(torch.randn(3, 8), torch.ones(7)), r"weight is \(7,\) and x \(3, 8\); must be \(8,\)"),
        (lambda: fused.layer_norm(torch.ones(3, 8).long(), *torch.ones(2, 8)), r"x is torch.int64 \(3, 8\); must be a tensor"),
        (lambda: fused.add_rms_norm(torch.randn(3, 8), torch.randn(2, 8), torch.ones(8)), "must be alike"),
        (lambda: fused.swiglu(torch.randn(3, 8), torch.randn(3, 7)), r"gate is .* \(3, 8\) and up .* \(3, 7\); must be alike"),
        (lambda: fused.softmax(torch.ones(3).long()), "x is torch.int64"),
        (lambda: fused.rotary(torch.randn(1, 3, 2, 8), torch.randn(1, 4, 2, 8), *[torch.ones(3, 4)] * 2), "k is .* like q"),
        (lambda: fused.rotary(*[torch.randn(1, 3, 2, 8)] * 2, torch.ones(2, 4), torch.ones(2, 4)), r"cos is \(2, 4\)"),
        (lambda: fused.rotary(*[torch.randn(4, 3, 2, 8)] * 2, *[torch.ones(2, 3, 4)] * 2), r"cos is \(2, 3, 4\)"),
        (lambda: fused.rotary(*[torch.randn(1, 3, 2, 8)] * 2, *[torch.ones(3, 4, requires_grad=True)] * 2), "detach them"),
        (lambda: fused.cross_entropy(torch.randn(3, 8), torch.tensor([0, 8, 1])), "target holds 8; must be from 0 to 7"),
        (lambda: fused.cross_entropy(torch.randn(3, 8), torch.tensor([0, 1])), "must be int64, one target for each row"),
        (lambda: fused.cross_entropy(torch.randn(1, 8), torch.tensor([0]), reduction="max"), "reduction is 'max'"),
        (lambda: fused.cross_entropy(torch.randn(1, 8), torch.tensor([0]), label_smoothing=2.0), "label_smoothing is 2.0"),
        (lambda: fused.cross_entropy(torch.randn(1, 8), torch.tensor([0]), softcap=0.0), "softcap is 0.0; must be above 0"),
        (lambda: fused.linear_cross_entropy(torch.randn(1, 8), torch.randn(3, 7), torch.tensor([0])), r"must be \(..., D\) and"),
        (lambda: fused.linear_cross_entropy(torch.randn(8), torch.randn(3, 8), torch.tensor(0), shift=True), "to shift along T"),
        (lambda: fused.linear_cross_entropy(torch.randn(2, 3, 8), torch.randn(3, 8), torch.zeros(6).long()), "one target for"),
        (
            lambda: fused.linear_cross_entropy(torch.randn(2, 3, 8), torch.randn(3, 8), torch.zeros(6).long(), shift=True),
            "one target for",
        ),
        (lambda: fused.rms_norm(torch.randn(3, 8), (8,)), "weight is tuple; must be a tensor"),
        (
            lambda: fused.rms_norm(torch.randn(3, 8), torch.ones(8, device="meta")),
            "x is on cpu and weight on meta; must be on one",
        ),
        (lambda: fused.rms_norm(torch.randn(3, 8), wt=torch.ones(8)), "rms_norm has no argument wt: it has x, weight, eps"),
        (lambda: fused.softmax(torch.randn(3, 8), dim=-1), "softmax has no argument dim: it has x, scale"),
        (lambda: fused.gated(torch.randn(3, 7), "silu"), r"x is \(3, 7\); its last axis must be even"),
        (lambda: fused.gated(torch.randn(3, 8), "swish"), "activation is 'swish'; must be one of gelu, .*, silu"),
        (lambda: fused.rms_norm_gated(*torch.randn(2, 3, 8), torch.ones(3)), r"weight is \(3,\); must be \(8,\), or"),
        (lambda: fused.rms_norm_gated(*torch.randn(2, 3, 8), torch.ones(8), groups=3), "groups is 3 and x .* must divide"),
        (lambda: fused.rms_norm_gated(torch.randn(3, 8), torch.randn(3, 7), torch.ones(8)), r"gate is .*\(3, 7\) and x"),
        (
            lambda: fused.rms_norm_gated(*torch.randn(2, 3, 8), torch.ones(8), norm_before_gate=True),
            "no argument norm_before_gate",
        ),
        (lambda: fused.swiglu(torch.randn(3, 8), [1.0]), "up is list; must be a tensor"),
        (lambda: fused.cross_entropy(torch.randn(2, 8), [0, 1]), "target is list; must be a tensor of whole numbers on cpu"),
        (lambda: fused.cross_entropy(torch.randn(2, 0), torch.tensor([0, 1])), "V is 0; must be at least 1"),
        (
            lambda: fused.linear_cross_entropy(torch.randn(1, 8).bfloat16(), torch.randn(3, 8), torch.tensor([0])),
            "input is torch.bfloat16 and linear_weight torch.float32; must be alike",
        ),
        (
            lambda: fused.linear_cross_entropy(torch.randn(1, 8), rt.quantise_weight(torch.randn(3, 8), "w8"), torch.tensor([0])),
            "linear_weight is QuantisedWeight; must be a tensor",
        ),
    ],
)
def test_wrong_arguments(call, sentence: str) -> None:
    with pytest.raises(rt.InvalidInput, match=sentence):
        call()


def test_rows_without_numbers_and_numbers_of_numpy() -> None:
    x = torch.randn(2, 3, 0, requires_grad=True)
    none = torch.ones(0)
    for y in (
        fused.rms_norm(x, none), fused.layer_norm(x, none, none), fused.softmax(x), fused.gated(x, "silu"), fused.swiglu(x, x),
        *fused.add_rms_norm(x, x, none), fused.rms_norm_gated(x, x, none, groups=2),
    ):  # fmt: skip
        assert y.shape == (2, 3, 0)
        assert torch.autograd.grad(y.sum(), x, retain_graph=True)[0].shape == x.shape
    x, w, eps = torch.randn(3, 8), torch.ones(8), np.float32(1e-5)
    assert torch.equal(fused.rms_norm(x, w, eps), fused.rms_norm(x, w, float(eps)))
    assert torch.equal(fused.softmax(x, np.float32(0.5)), fused.softmax(x, 0.5))
    scale = np.float32(0.25)
    assert torch.equal(quantise_rows(x, scale=scale).codes.float(), quantise_rows(x, scale=torch.tensor(0.25)).codes.float())
