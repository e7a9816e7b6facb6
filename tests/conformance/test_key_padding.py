"""key_padding_mask: equal to the definition under a boolean bias, in fp64; packed keys wherever that is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.exact.ops.padding import without_padding
from rooftile.exact.spec import Call, CallSettings, Options

B, T, S, H, Hk, D = 3, 11, 17, 4, 2, 8
NAN = float("nan")


def padding(kind: str, S: int = S) -> Tensor:
    """Returns (B, S), True at padding."""
    place = torch.arange(S)
    return {
        "right": torch.stack([place >= n for n in (S, 5, 1)]),
        "left": torch.stack([place < n for n in (0, 5, S - 1)]),
        "both": torch.stack([(place < 2) | (place > 9), place > 20, (place < 7) | (place > 8)]),
        "scattered": torch.stack([place % 3 == 1, place % 2 == 0, place > 20]),
        "an empty sequence": torch.stack([place > 4, place >= 0, place < 3]),
        "none": torch.zeros(B, S, dtype=torch.bool),
        "everything": torch.ones(B, S, dtype=torch.bool),
        "all alike": (place < 3).expand(B, S),
    }[kind]


def tensors(T: int = T, S: int = S) -> list[Tensor]:
    return [torch.randn(B, n, h, D, requires_grad=True) for n, h in ((T, H), (S, Hk), (S, Hk))]


def run(leaves: list[Tensor], **options: Any) -> list[Tensor]:
    o, lse = rt.attention_with_lse(*leaves, **options)
    do, dlse = (torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape) for x in (o, lse))
    loss = (o * do).sum() + (torch.where(lse.isfinite(), lse, 0.0) * dlse).sum()
    return [o.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


# name: options; whether keys may be packed when the padding is on the right, on the left, and anywhere
OPTIONS: dict[str, tuple[dict[str, Any], tuple[bool, bool, bool]]] = {
    "full": ({}, (True, True, True)),
    "softcap and sinks": ({"softcap": 2.0, "sinks": torch.randn(H)}, (True, True, True)),
    "causal": ({"mask": rt.CAUSAL}, (False, True, False)),
    "window": ({"mask": rt.Window(4, 2)}, (False, True, False)),
    "prefix": ({"mask": rt.Prefix(5)}, (False, False, False)),
    "chunk": ({"mask": rt.Chunk(4)}, (False, False, False)),
    "alibi": ({"alibi": torch.rand(H)}, (False, True, False)),
    "dropout": ({"dropout": 0.3, "seed": 7}, (True, False, False)),
}
KINDS = ["right", "left", "both", "scattered", "an empty sequence", "none", "everything", "all alike"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_a_boolean_bias(name: str, kind: str) -> None:
    options, _ = OPTIONS[name]
    leaves, hidden = tensors(), padding(kind)
    found = run(leaves, key_padding_mask=hidden, **options)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    due = run(wide, bias=~hidden[:, None, None], backend="eager", **options)
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x, y.to(x.dtype), rtol=1e-4, atol=1e-5)
        assert x.is_contiguous()


@pytest.mark.parametrize("name", OPTIONS)
def test_keys_are_packed_exactly_where_that_is_the_same(name: str) -> None:
    """A backend without a bias runs these."""
    options, may = OPTIONS[name]
    given = {key: options.get(key) for key in ("alibi", "sinks")}
    settings = CallSettings(dropout=options.get("dropout", 0))
    q, k, v = (x.detach() for x in tensors())
    for kind, packs in zip(("right", "left", "scattered"), may, strict=True):
        call = without_padding(Call(q, k, v, options.get("mask"), Options(**given), settings), padding(kind))
        assert (call.options.cu_k is not None, call.options.bias is not None) == (packs, not packs), kind
        if packs:
            assert call.k.shape[0] == int((~padding(kind)).sum())
    # the same keys for all: a view of them
    call = without_padding(Call(q, k, v, None, Options(), CallSettings()), padding("all alike"))
    assert call.options == Options()
    assert call.k.data_ptr() == k[:, 3:].data_ptr()
    assert call.k.shape[1] == S - 3


def test_a_bias_and_padding(backend: str) -> None:
    leaves, hidden, bias = tensors(), padding("right"), torch.randn(H, 1, S, requires_grad=True)

    def both(leaves: list[Tensor], bias: Tensor, **options: Any) -> list[Tensor]:
        o = rt.attention(*leaves, bias=bias, **options)
        return [o, *torch.autograd.grad(o.sin().sum(), [*leaves, *([bias] if bias.requires_grad else [])])]

    try:
        found = both(leaves, bias, key_padding_mask=hidden, backend=backend)
    except rt.Unsupported:
        assert backend not in ("tiled", "eager"), "these have a bias"
        return
    wide = [x.detach().double().requires_grad_() for x in (*leaves, bias)]
    o = rt.attention(*wide[:3], bias=wide[3].masked_fill(hidden[:, None, None], -torch.inf), backend="eager")
    for x, y in zip(found, [o, *torch.autograd.grad(o.sin().sum(), wide)], strict=True):
        torch.testing.assert_close(x, y.to(x.dtype), rtol=1e-4, atol=1e-5)
    seen = torch.rand(T, S) < 0.7
    found = both(leaves, seen, key_padding_mask=hidden, backend=backend)
    due = both(leaves, seen & ~hidden[:, None, None], backend="eager")
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_padded_keys_are_not_read() -> None:
    q, k, v = (x.detach() for x in tensors())
    hidden = padding("both")
    due = rt.attention(q, k, v, key_padding_mask=hidden)
    k, v = (x.masked_fill(hidden[..., None, None], NAN) for x in (k, v))
    assert torch.equal(rt.attention(q, k, v, key_padding_mask=hidden), due)


def test_inside_transforms_and_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach() for x in tensors())
    hidden = padding("right")

    def number(q: Tensor, hidden: Tensor) -> Tensor:
        return rt.attention(q, k, v, key_padding_mask=hidden).sin().sum()

    samples = torch.stack([q, 2 * q])
    due = torch.stack([torch.func.grad(number)(x, hidden) for x in samples])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(number), in_dims=(0, None))(samples, hidden), due)
    found = torch.func.vmap(torch.func.grad(number))(samples, torch.stack([hidden, hidden]))
    torch.testing.assert_close(found, due)
    monkeypatch.undo()  # torch.empty, for fake tensors
    torch._dynamo.reset()
    compiled = torch.compile(number, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, hidden), number(q, hidden))


def test_a_layer() -> None:
    layer = rt.nn.Attention(16, heads=2, backend="eager")
    x, hidden = torch.randn(B, S, 16), padding("right")
    found = layer(x, key_padding_mask=hidden)
    for n in range(B):
        kept = x[n : n + 1, ~hidden[n]]
        torch.testing.assert_close(found[n : n + 1], layer(x[n : n + 1], kept))


def test_explain_reads_it() -> None:
    q, k, v = (x.detach() for x in tensors())
    assert "full packed" in rt.explain(q, k, v, key_padding_mask=padding("right"))
    shown = rt.explain(q, k, v, rt.CAUSAL, key_padding_mask=padding("right"))
    assert f"T {T}  S {S}" in shown
    assert "causal dense bias" in shown


def test_bad_padding_gets_a_sentence() -> None:
    q, k, v = (x.detach() for x in tensors())
    wrong = [torch.zeros(B, S), torch.zeros(B, T, dtype=torch.bool), torch.zeros(S, dtype=torch.bool), [True]]
    for x in wrong:
        with pytest.raises(rt.InvalidInput, match=r"key_padding_mask is .*; must be a boolean tensor \(B, S\) = \(3, 17\)"):
            rt.attention(q, k, v, key_padding_mask=x)
    with pytest.raises(rt.InvalidInput, match="key_padding_mask is on meta"):
        rt.attention(q, k, v, key_padding_mask=padding("right").to("meta"))
    with pytest.raises(rt.InvalidInput, match="k has batch 3; q has 2"):
        rt.attention(q[:2], k, v, key_padding_mask=padding("right"))
    with pytest.raises(rt.InvalidInput, match="mask is 'causal'"):
        rt.attention(q, k, v, "causal", key_padding_mask=padding("right"))
    jagged = torch.nested.nested_tensor([q[0], q[1]], layout=torch.jagged)
    with pytest.raises(rt.InvalidInput, match="nested tensors have no padding"):
        rt.attention(jagged, jagged, jagged, key_padding_mask=padding("right"))
    with pytest.raises(rt.InvalidInput, match="bias is 3; must be a floating-point tensor"):
        rt.attention(q, k, v, bias=3, key_padding_mask=padding("right"))
    empty = rt.attention(q, k[:, :0], v[:, :0], key_padding_mask=padding("right")[:, :0])
    assert torch.equal(empty, torch.zeros(B, T, H, D))
