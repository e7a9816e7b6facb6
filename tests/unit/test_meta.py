"""Tensors on meta: shapes and dtypes come out, forward and backward, and nothing runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.kvcache import PagedKV

CU = torch.tensor([0, 3, 10])
BF16 = torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


def assert_is(x: Tensor, *shape: int, dtype: torch.dtype = BF16) -> None:
    assert (x.device.type, tuple(x.shape), x.dtype) == ("meta", shape, dtype)


@pytest.mark.parametrize("named", [None, "tiled", "hopper", "eager"])
@pytest.mark.parametrize(
    "options",
    [{}, {"dropout": 0.1}, {"sinks": meta(4)}, {"bias": meta(4, 5, 6)}, {"alibi": meta(4).detach()}, {"precision": "fp8"}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_dense(options: dict[str, Any], named: str | None) -> None:
    q, k, v = meta(2, 5, 4, 16), meta(2, 6, 2, 16), meta(2, 6, 2, 8)
    for _ in range(2):
        o, lse = rt.attention_with_lse(q, k, v, rt.CAUSAL, backend=named, **options)
        assert_is(o, 2, 5, 4, 8)
        assert_is(lse, 2, 4, 5, dtype=torch.float32)
        leaves = [q, k, v, *(x for x in options.values() if isinstance(x, Tensor) and x.requires_grad)]
        for grad, x in zip(torch.autograd.grad([o.sum(), lse.sum()], leaves), leaves, strict=True):
            assert_is(grad, *x.shape)
    assert "meta" in rt.explain(q, k, v)


def test_packed() -> None:
    q, k = meta(10, 4, 16), meta(10, 2, 16)
    for cu in (CU, CU.to("meta")):
        assert_is(rt.attention_packed(q, k, k, cu, cu, rt.CAUSAL), 10, 4, 16)


def test_paged() -> None:
    k = torch.empty(9, 16, 2, 16, dtype=BF16, device="meta")
    table, lengths = torch.zeros(3, 2, dtype=torch.int32, device="meta"), torch.zeros(3, dtype=torch.int32, device="meta")
    with torch.no_grad():
        o, lse = rt.attention_paged_with_lse(meta(3, 1, 4, 16), PagedKV(k, k, table, lengths), rt.CAUSAL)
    assert_is(o, 3, 1, 4, 16)
    assert_is(lse, 3, 4, 1, dtype=torch.float32)


def test_quantised() -> None:
    q, k = meta(2, 300, 4, 16), meta(2, 300, 2, 16)
    qkv = rt.quantise_qkv(q, k, k, "int8")
    assert_is(qkv.q, 2, 300, 4, 16, dtype=torch.int8)
    assert_is(rt.attention_quantised(qkv, rt.CAUSAL), 2, 300, 4, 16)


def test_a_module_on_meta() -> None:
    layer = rt.nn.Attention(64, heads=4, mask=rt.CAUSAL, device="meta")
    assert_is(layer(torch.empty(2, 7, 64, device="meta")), 2, 7, 64, dtype=torch.float32)


def test_a_backend_that_does_not_exist_is_still_refused() -> None:
    q = meta(2, 5, 4, 16)
    with pytest.raises(rt.InvalidInput, match="backend is 'cuda'"):
        rt.attention(q, q, q, backend="cuda")
