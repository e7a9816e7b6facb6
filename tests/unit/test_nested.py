"""Jagged nested tensors: packed sequences under another name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rooftile as rt

QUERIES, KEYS = (3, 0, 40, 1), (5, 2, 33, 9)
CU_Q, CU_K = (torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]) for lengths in (QUERIES, KEYS))


def jagged(x: Tensor, cu: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x, cu)


def packed() -> list[Tensor]:
    return [torch.randn(n, h, 16, requires_grad=True) for n, h in ((sum(QUERIES), 4), (sum(KEYS), 2), (sum(KEYS), 2))]


@pytest.mark.parametrize(
    "options", [{}, {"mask": rt.CAUSAL, "sinks": torch.randn(4), "softcap": 3.0, "alibi": torch.rand(4, 4)}], ids=["plain", "all"]
)
@pytest.mark.parametrize("named", [None, "tiled", "eager"])
def test_equals_packed_sequences_with_gradients(named: str | None, options: dict[str, Any]) -> None:
    leaves = packed()
    due, due_lse = rt.attention_packed_with_lse(*leaves, CU_Q, CU_K, backend=named, **options)
    due_grads = torch.autograd.grad([due.sum(), (due**2).sum(), due_lse[due_lse.isfinite()].sum()], leaves)
    q, k, v = (jagged(x, cu) for x, cu in zip(leaves, (CU_Q, CU_K, CU_K), strict=True))
    o, lse = rt.attention_with_lse(q, k, v, backend=named, **options)
    assert o.offsets() is q.offsets()
    assert (o.layout, o.shape[0], *o.shape[2:]) == (torch.jagged, 4, 4, 16)
    assert torch.equal(o.values(), due)
    for b, part in enumerate(lse.unbind()):
        assert torch.equal(part, due_lse[:, CU_Q[b] : CU_Q[b + 1]])
    flat = lse.transpose(1, 2).values()
    grads = torch.autograd.grad([o.values().sum(), (o.values() ** 2).sum(), flat[flat.isfinite()].sum()], leaves)
    for x, y in zip(grads, due_grads, strict=True):
        torch.testing.assert_close(x, y)
    # without lse another backend may run
    due = rt.attention_packed(*leaves, CU_Q, CU_K, backend=named, **options)
    assert torch.equal(rt.attention(q, k, v, backend=named, **options).values(), due)


def test_the_result_joins_its_input() -> None:
    x = jagged(torch.randn(sum(QUERIES), 4, 16), CU_Q)
    assert (x + rt.attention(x, x, x, rt.CAUSAL)).shape == x.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k.values(), v), "k is not nested, with layout torch.strided; a nested call needs q, k and v nested"),
        (lambda q, k, v: (torch.nested.nested_tensor(list(q.unbind())), k, v), "q is nested, with layout torch.strided; a"),
        (lambda q, k, v: (q.transpose(1, 2), k, v), r"q is nested \(4, 4, j\d+, 16\); must be \(B, j, H, D\), ragged in"),
        (lambda q, k, v: (q, k, jagged(v.values(), torch.tensor([0, 6, 7, 40, 49]))), "v has other lengths than k"),
        (lambda q, k, v: (q, 3, v), "k is 3; a nested call needs q, k and v nested"),
        (lambda q, k, v: (q.values()[None], k, v), "k is nested or sparse; must be dense, or all three jagged"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_what_is_not_jagged_is_refused(change: Any, message: str) -> None:
    leaves = zip(packed(), (CU_Q, CU_K, CU_K), strict=True)
    with pytest.raises(rt.InvalidInput, match=message):
        rt.attention(*change(*(jagged(x.detach(), cu) for x, cu in leaves)))


def test_a_bias_is_refused() -> None:
    q = jagged(packed()[0].detach(), CU_Q)
    with pytest.raises(rt.InvalidInput, match="bias with nested tensors; has none: use attention_packed"):
        rt.attention(q, q, q, bias=torch.zeros(1))
