"""The methods that choose keys at the seams: memory, docstrings, torch.func, compiled gradients, several ranks."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rooftile as rt
import rooftile.nn
from rooftile import approximate as ap
from rooftile.approximate.native_sparse import selection
from tests.approximate.calls import CALLS, CENTROIDS, inputs

CHOOSE = ["sparse_transformer", "reformer", "routing", "native_sparse"]
MODES = [(name, mode) for name in CHOOSE for mode in ap.METHODS[name].causality]
FUNCTIONS = ("choose_blocks", "commitment_loss", "compress", "lsh", "native_sparse", "reformer", "routing", "selected_attention",
             "sparse_transformer", "update_centroids")  # fmt: skip
DOCUMENTED = {name: getattr(ap, name) for name in FUNCTIONS}
DOCUMENTED |= {name: getattr(rooftile.nn, name) for name in ("NativeSparse", "Reformer", "Routing", "SparseTransformer")}
DOCUMENTED |= {"Loki.fit": ap.Loki.fit, "Loki.attend": ap.Loki.attend}


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operator returned."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        # a view that repeats its rows holds fewer numbers than it shows
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(found) if isinstance(x, Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return found


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_no_table_of_all_pairs_is_built(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    T = 1536
    monkeypatch.setattr(selection, "PIECE", 2**20)
    tensors = {n: x.requires_grad_() for n, x in inputs(T, B=1).items()}
    with Largest() as seen:
        CALLS[name].run(*tensors.values(), mode).sum().backward()
    # all four heads together hold less than one head's pairs
    assert T < seen.numbers < T * T


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_example_in_a_docstring_runs(name: str) -> None:
    q, k, v = (torch.randn(1, 16, 2, 32) for _ in range(3))
    scope: dict[str, Any] = {"torch": torch, "rooftile": rt, "CAUSAL": rt.CAUSAL, "q": q, "k": k, "v": v}
    scope |= {public: getattr(ap, public) for public in ap.__all__} | {"nn": rooftile.nn}
    scope |= {public: getattr(rooftile.nn, public) for public in rooftile.nn.__all__ if name in rooftile.nn.__all__}
    examples = doctest.DocTestParser().get_examples(DOCUMENTED[name].__doc__)
    assert examples
    for example in examples:
        if example.options.get(doctest.SKIP):
            continue
        if example.want:
            assert repr(eval(example.source, scope)) == example.want.strip()
        else:
            exec(example.source, scope)


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_gradients_of_torch_func_are_those_of_autograd(name: str, mode: str) -> None:
    tensors = inputs(20, B=1)
    names = [n for n in tensors if n in CALLS[name].reads or n == "q"]

    def loss(*given: Tensor) -> Tensor:
        whole = tensors | dict(zip(names, given, strict=True))
        return CALLS[name].run(*whole.values(), mode).square().sum()

    leaves = [tensors[n].clone().requires_grad_() for n in names]
    due = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.func.grad(loss, tuple(range(len(names))))(*(tensors[n] for n in names))
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x, y)


# the window of a compression has a gradient that PyTorch computes sample by sample
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
@pytest.mark.parametrize(("name", "mode"), [pair for pair in MODES if pair != ("routing", "strict")])
def test_samples_of_vmap_are_rows_of_a_batch(name: str, mode: str) -> None:
    q, k, v = inputs(20, B=3).values()

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return CALLS[name].run(q[None], k[None], v[None], mode)[0]

    torch.testing.assert_close(torch.vmap(one)(q, k, v), CALLS[name].run(q, k, v, mode))
    leaves = [x.requires_grad_() for x in (q, v)]
    due = torch.autograd.grad(CALLS[name].run(q, k, v, mode).square().sum(), leaves)
    found = torch.vmap(torch.func.grad(lambda q, k, v: one(q, k, v).square().sum(), (0, 2)))(q.detach(), k, v.detach())
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x, y)


# PyTorch scripts some of its own rules
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("name", "mode"), MODES)
def test_forward_mode(name: str, mode: str) -> None:
    """Outputs are linear in the values, so their tangent along v is the output itself."""
    q, k, v = inputs(20, B=1).values()
    o, tangent = torch.func.jvp(lambda v: CALLS[name].run(q, k, v, mode), (v,), (v,))
    torch.testing.assert_close(tangent, o)


def test_what_vmap_and_torch_func_cannot_have_is_said() -> None:
    q, k, v = inputs(20, B=3).values()
    routed = torch.vmap(lambda q, k, v: ap.routing(q[None], k[None], v[None], CENTROIDS, rt.CAUSAL, strict=True)[0])
    with pytest.raises(rt.Unsupported, match=r"routing with strict under torch\.vmap: each sample has clusters of other lengths"):
        routed(q, k, v)
    loki = ap.Loki.fit(k)
    with pytest.raises(rt.Unsupported, match="a backward through attention to a paged cache; it has none"):
        torch.func.grad(lambda q: loki.attend(q, k, v, unit="page").sum())(q[:, :1])


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
# Dynamo makes one to follow a Function's context
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("name", "mode"), [(n, m) for n, m in MODES if m not in ("FULL", "fixed")])
def test_compiled_gradients(name: str, mode: str) -> None:
    torch._dynamo.reset()
    tensors = {n: x.requires_grad_() for n, x in inputs(20, B=1).items()}
    leaves = [x for n, x in tensors.items() if n in CALLS[name].reads or n == "q"]
    due = torch.autograd.grad(CALLS[name].run(*tensors.values(), mode).square().sum(), leaves)
    compiled = torch.compile(lambda *x: CALLS[name].run(*x, mode), backend="aot_eager")
    found = torch.autograd.grad(compiled(*tensors.values()).square().sum(), leaves)
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x, y)


def test_centroids_follow_the_members_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with half of the batch each give the centroids of the whole batch."""
    q, k, centroids = torch.randn(4, 9, 2, 8), torch.randn(4, 9, 2, 8), torch.randn(2, 3, 8)
    _, members = ap.routing(q, k, k, centroids, strict=True)
    due = ap.update_centroids(centroids, q, k, members, decay=0.5)
    assert not torch.allclose(ap.update_centroids(centroids, q[:2], k[:2], members[:2], decay=0.5), due)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    sums: list[Tensor] = []
    monkeypatch.setattr(distributed, "all_reduce", sums.append)
    ap.update_centroids(centroids, q[2:], k[2:], members[2:], decay=0.5)
    monkeypatch.setattr(distributed, "all_reduce", lambda x: x.add_(sums[0]))
    torch.testing.assert_close(ap.update_centroids(centroids, q[:2], k[:2], members[:2], decay=0.5), due)


def test_many_heads_and_short_texts_look_like_no_swapped_axes() -> None:
    """Inner calls have few rows and many heads; warnings are errors here."""
    q, k = torch.randn(1, 256, 32, 8), torch.randn(1, 256, 32, 8)
    for pattern in ("strided", "fixed"):
        for heads in ("union", "second"):
            o = ap.sparse_transformer(q, k, k, pattern=pattern, sets=heads, stride=128)
            assert o.shape == q.shape
    pair = ap.compress(k), ap.compress(k)
    assert ap.native_sparse(q[:, :64], (pair[0][:, :3], pair[1][:, :3]), (k[:, :64], k[:, :64]), (k[:, :64], k[:, :64]),
                            torch.rand(1, 64, 32, 3)).isfinite().all()  # fmt: skip
