"""Transforms of torch.func over the default backend: equal to the definition in fp64, or a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import functional as autograd
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rooftile as rt
from rooftile.exact.ops import RAN
from rooftile.exact.ops import attention as operators
from rooftile.kvcache import PagedKV

# PyTorch's decompositions for forward mode use it
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

OPTIONS: list[dict[str, Any]] = [
    {}, {"mask": rt.CAUSAL & rt.Window(4), "softcap": 2.0}, {"mask": rt.CAUSAL, "sinks": torch.tensor([0.3, -1.0])},
]  # fmt: skip
B, T, S, H, D = 2, 7, 5, 2, 8


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, T, H, D), torch.randn(B, S, H, D), torch.randn(B, S, H, D)


def close(found: Any, due: Any) -> None:
    for x, y in zip(tree_leaves(found), tree_leaves(due), strict=True):
        torch.testing.assert_close(x, y.to(x.dtype), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "sinks"])
def test_derivatives(options: dict[str, Any]) -> None:
    """Equal to what autograd, which knows no transform, finds in fp64."""
    x = inputs()
    wide = tuple(y.double() for y in x)
    tangents, do = tuple(y.cos() for y in wide), torch.randn(B, T, H, D, dtype=torch.float64)

    def default(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rt.attention(q, k, v, **options)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rt.attention(q, k, v, backend="eager", **options)

    def in_fp32(y: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(z.float() for z in y)

    close(vjp(default, *x)[1](do.float()), autograd.vjp(exact, wide, do)[1])
    close(grad(lambda *x: (default(*x) * do.float()).sum(), argnums=(0, 1, 2))(*x), autograd.vjp(exact, wide, do)[1])
    close(jvp(default, x, in_fp32(tangents)), autograd.jvp(exact, wide, tangents))
    part = [lambda k, f=f, y=y: f(y[0], k, y[2])[0, 3] for f, y in ((default, x), (exact, wide))]
    due = autograd.jacobian(part[1], wide[1])
    close(jacrev(part[0])(x[1]), due)
    close(jacfwd(part[0])(x[1]), due)
    row = [
        lambda q, f=f, y=y: f(q[None, None].expand(1, 1, H, D), y[1][:1], y[2][:1]).sum()
        for f, y in ((default, x), (exact, wide))
    ]
    close(hessian(row[0])(x[0][0, 0, 0]), autograd.hessian(row[1], wide[0][0, 0, 0]))


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "sinks"])
def test_vmap(options: dict[str, Any]) -> None:
    q, k, v = (x.unsqueeze(0) + torch.randn(3, 1, 1, 1, 1) for x in inputs())
    found = vmap(lambda q, k, v: rt.attention(q, k, v, **options))(q, k, v)
    due = torch.stack([rt.attention(*x, **options) for x in zip(q, k, v, strict=True)])
    close(found, due)
    # keys that all share, and gradients per sample
    found = vmap(lambda q: rt.attention(q, k[0], v[0], **options))(q)
    close(found, torch.stack([rt.attention(x, k[0], v[0], **options) for x in q]))
    per_sample = vmap(grad(lambda q, k, v: rt.attention(q, k, v, **options).sum()))(q, k, v)
    leaf = q.clone().requires_grad_()
    total = sum(rt.attention(*x, **options).sum() for x in zip(leaf, k, v, strict=True))
    close(per_sample, torch.autograd.grad(total, leaf)[0])


def test_a_second_derivative_names_eager() -> None:
    x = inputs()
    with pytest.raises(rt.Unsupported, match=r"second derivatives; has gradients \(use backend='eager'\)"):
        grad(lambda q: grad(lambda q: rt.attention(q, *x[1:], backend="tiled").sum())(q).sum())(x[0])
    # one that no forward can foresee
    _, pull = vjp(lambda q: rt.attention(q, *x[1:], backend="tiled"), x[0])
    with pytest.raises(rt.Unsupported, match="double backward through backend 'tiled'"):
        grad(lambda do: pull(do)[0].sum())(x[0])
    with pytest.raises(rt.Unsupported, match="forward-mode derivatives of gradients through backend 'tiled'"):
        jvp(lambda do: pull(do)[0], (x[0],), (x[0],))
    # autograd outside counts as well: without it the result's graph would end in an error
    leaf = x[0].clone().requires_grad_()
    found = grad(lambda q: rt.attention(q, *x[1:]).square().sum())(leaf)
    due = torch.autograd.grad(rt.attention(leaf, *x[1:], backend="eager").square().sum(), leaf, create_graph=True)[0]
    close(torch.autograd.grad(found.sum(), leaf)[0], torch.autograd.grad(due.sum(), leaf)[0])
    with torch.no_grad():
        assert runs(lambda: grad(lambda q: rt.attention(q, *x[1:]).square().sum())(leaf)) == {"sdpa"}


def runs(call: Callable[[], Any]) -> set[str]:
    """Returns the names of the backends that a call runs."""
    before = Counter(RAN)
    call()
    return set(RAN - before)


def test_the_fastest_backend_runs_first_derivatives() -> None:
    q, k, v = inputs()
    samples = torch.stack([q, 2 * q, 3 * q])
    for call in (
        lambda: vmap(lambda q: rt.attention(q, k, v))(samples),
        lambda: grad(lambda q: rt.attention(q, k, v).sum())(q),
        lambda: vmap(grad(lambda q: rt.attention(q, k, v).sum()))(samples),
        lambda: jacrev(lambda q: rt.attention(q, k, v))(q),
    ):
        assert runs(call) == {"sdpa"}
    assert runs(lambda: jacfwd(lambda q: rt.attention(q, k, v))(q)) == {"eager"}
    assert runs(lambda: hessian(lambda q: rt.attention(q, k, v).sum())(q)) == {"eager"}


# name: options that are the same for all samples, and tensors that are arguments, with the axis that vmap maps
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, tuple[Tensor, int | None]]]] = {
    "plain": ({}, {}),
    "window": ({"mask": rt.CAUSAL & rt.Window(4), "softcap": 2.0}, {}),
    "bias": ({}, {"bias": (torch.randn(H, S, T), None)}),
    "bias per sequence": ({}, {"bias": (torch.randn(B, 1, 1, T), None)}),
    "mapped bias": ({}, {"bias": (torch.randn(H, 3, S, T), 1)}),
    "boolean bias": ({}, {"bias": (torch.rand(3, B, 1, S, T) > -torch.eye(S, T) + 0.5, 0)}),
    "alibi": ({}, {"alibi": (torch.rand(H), None)}),
    "mapped alibi": ({}, {"alibi": (torch.rand(3, H), 0)}),
    "alibi per sequence": ({"mask": rt.CAUSAL}, {"alibi": (torch.rand(B, 3, H), 1)}),
    "sinks": ({"mask": rt.CAUSAL}, {"sinks": (torch.randn(H), None)}),
    "mapped sinks": ({"mask": rt.CAUSAL}, {"sinks": (torch.randn(H, 3), 1)}),
    "dropout": ({"dropout": 0.4, "seed": 5}, {}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_per_sample_gradients(name: str) -> None:
    """vmap of grad, and grad of vmap, equal autograd through the definition in fp64, sample by sample."""
    options, more = ARGUMENTS[name]
    given = {n: (torch.randn(3, B, rows, h, D), 0) for n, rows, h in (("q", S, H), ("k", T, 1), ("v", T, 1))} | more
    names, dims = tuple(given), tuple(dim for _, dim in given.values())
    tensors = tuple(x for x, _ in given.values())
    places = tuple(n for n, x in enumerate(tensors) if names[n] != "alibi" and x.is_floating_point())

    def number(backend: str, *tensors: Tensor) -> Tensor:
        o, lse = rt.attention_with_lse(**dict(zip(names, tensors, strict=True)), **options, backend=backend)
        return o.sin().sum() + lse.cos().sum()

    due = []
    for n in range(3):
        sample = [x if dim is None else x.select(dim, n) for x, dim in zip(tensors, dims, strict=True)]
        sample = [x.double() if x.is_floating_point() else x for x in sample]
        leaves = [sample[p].requires_grad_() for p in places]
        due.append(torch.autograd.grad(number("eager", *sample), leaves))
    per_sample = [torch.stack(parts) for parts in zip(*due, strict=True)]
    found = vmap(grad(partial(number, "tiled"), argnums=places), in_dims=dims)(*tensors)
    close(found, per_sample)

    total = grad(lambda *x: vmap(partial(number, "tiled"), in_dims=dims)(*x).sum(), argnums=places)(*tensors)
    whole = [x.sum(0) if dims[p] is None else x.movedim(0, dims[p]) for p, x in zip(places, per_sample, strict=True)]
    close(total, whole)


def test_two_mapped_axes_and_shared_keys() -> None:
    (q, k, v), scales = inputs(), torch.rand(2, 3)

    def attend(scale: Tensor, q: Tensor) -> Tensor:
        return rt.attention(q * scale, k, v, rt.CAUSAL, backend="tiled")

    found = vmap(vmap(attend, (0, None)), (0, 2), out_dims=1)(scales, q.unsqueeze(2).expand(B, T, 2, H, D))
    due = [[rt.attention(q * x, k, v, rt.CAUSAL, backend="eager") for x in row] for row in scales]
    close(found, torch.stack([torch.stack(row) for row in due], dim=1))


def test_packed_sequences() -> None:
    cu = torch.tensor([0, 2, 2, 7])
    q, k, v = (torch.randn(3, 7, h, D) for h in (H, 1, 1))

    def number(backend: str, q: Tensor, k: Tensor, v: Tensor, cu: Tensor = cu) -> Tensor:
        return rt.attention_packed(q, k, v, cu, cu, rt.CAUSAL, backend=backend).sin().sum()

    found = vmap(grad(partial(number, "tiled"), argnums=(0, 1, 2)))(q, k, v)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    total = sum(number("eager", *x) for x in zip(*leaves, strict=True))
    close(found, torch.autograd.grad(total, leaves))
    with pytest.raises(rt.InvalidInput, match=r"cu_q is mapped by torch\.vmap"):
        vmap(partial(number, "tiled"))(q, k, v, torch.stack([cu, cu, cu]))


def test_per_sample_gradients_of_a_layer() -> None:
    layer = rt.nn.Attention(16, heads=2, kv_heads=1, mask=rt.CAUSAL, sinks=True, backend="tiled").eval()
    x = torch.randn(4, 9, 16)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, parameters, (x[None],)).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    layer.double().backend = "eager"
    for n, sample in enumerate(x.double()):
        due = torch.autograd.grad(layer(sample[None]).square().sum(), list(layer.parameters()))
        close([found[name][n] for name in parameters], due)


def test_no_tensor_of_every_pair_is_made() -> None:
    """Under grad, vmap and both, no operation makes a tensor of T x S numbers per head."""
    N, length = 2, 512
    q, k, v = (torch.randn(N, 1, length, 2, 8) for _ in range(3))

    def number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rt.attention(q, k, v, rt.CAUSAL, backend="tiled").sum()

    for call in (vmap(number), vmap(grad(number, argnums=(0, 1, 2))), grad(lambda *x: vmap(number)(*x).sum())):
        with Largest() as seen:
            call(q, k, v)
        assert seen.elements < N * 2 * length * length
    with Largest() as seen:
        vmap(lambda q, k, v: rt.attention(q, k, v, rt.CAUSAL, backend="eager"))(q, k, v)
    assert seen.elements >= N * 2 * length * length


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # a kernel's own operations are seen too, below its operator
        below = {operators.attention: operators._run, operators.attention_backward: operators._run_backward}
        with self if func in below else nullcontext():
            result = below.get(func, func)(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


# Dynamo makes an instance of an autograd.Function, which autograd warns of
@pytest.mark.filterwarnings(r"ignore:.*Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("mask", [rt.FULL, rt.CAUSAL], ids=str)
def test_inside_torch_compile(mask: rt.Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transforms in a compiled graph run the definition."""
    q, k, v = inputs()

    def number(q: Tensor) -> Tensor:
        return rt.attention(q, k, v, mask).square().sum()

    monkeypatch.undo()  # torch.empty, for fake tensors
    torch._dynamo.reset()
    found = torch.compile(grad(number), backend="aot_eager", fullgraph=True)(q)
    close(found, grad(number)(q))
    found = torch.compile(vmap(number), backend="aot_eager", fullgraph=True)(torch.stack([q, 2 * q]))
    close(found, torch.stack([number(q), number(2 * q)]))


def test_a_paged_cache_under_vmap_says_so() -> None:
    k, v = torch.randn(2, 4, 16, 2, 8)
    cache = PagedKV(k, v, torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32))
    with pytest.raises(rt.Unsupported, match=r"attention_paged under torch\.vmap"):
        vmap(lambda q: rt.attention_paged(q, cache))(torch.randn(3, 1, 1, 2, 8))
