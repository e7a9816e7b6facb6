"""`Targets(n)`: candidates after a history, against the definition in fp64 over the mask as a matrix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import rooftile as rt
from rooftile.exact import reference
from rooftile.exact.masks import Mask, materialise
from rooftile.kvcache import PagedKV
from tests.unit.poison import assert_nan_only_where_seen

MASKS = {
    "causal": rt.CAUSAL & rt.Targets(5),
    "full": rt.Targets(9),
    "window": rt.Window(6, 2) & rt.Targets(3),
    "chunk": rt.CAUSAL & rt.Chunk(8) & rt.Targets(5),
    "no history in reach": rt.Chunk(8) & rt.Targets(6),
    "prefix": rt.Prefix(9) & rt.Targets(5),
    "targets alone": rt.CAUSAL & rt.Targets(30),
}
B, T, S, H, HK, D, DV = 2, 30, 38, 4, 2, 16, 24
OPTIONS = ("softcap", "sinks", "alibi", "bias", "hidden", "row bias", "alibi per sequence", "dropout")
LENGTHS, ROWS = (9, 0, 13, 30, 6), 58


@pytest.fixture(autouse=True)
def _on_the_device(device: torch.device) -> Iterator[None]:
    with device:
        yield


def options_of(word: str, packed: bool) -> dict[str, Any]:
    """The arguments of an option, with the axes of a dense call or of a packed one."""
    sequences, rows, keys = (len(LENGTHS), ROWS, max(LENGTHS)) if packed else (B, T, S)
    bias = torch.randn(*((H, rows, keys) if packed else (1, H, rows, keys)))
    return {
        "": {},
        "softcap": {"softcap": 2.0},
        "sinks": {"sinks": torch.randn(H)},
        "alibi": {"alibi": torch.rand(H), "sinks": torch.randn(H)},
        "alibi per sequence": {"alibi": torch.rand(sequences, H), "bias": bias[..., :1, :]},
        "bias": {"bias": bias},
        "row bias": {"bias": bias[..., :1] if not packed else bias[:1, :1]},
        "hidden": {"bias": bias > 0},
        "dropout": {"dropout": 0.3, "seed": torch.tensor([2**40 + 7])},
    }[word]


def definition(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, alibi: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The definition of dense attention, in which slopes are a bias of the positions that targets have."""
    T, S = q.shape[1], k.shape[1]
    if "bias" in options and options["bias"].dtype == torch.bool:
        options["bias"] = torch.zeros(options["bias"].shape, dtype=q.dtype).masked_fill(~options["bias"], -torch.inf)
    if alibi is not None:
        end = S - mask.targets
        i, j = (torch.arange(n).clamp(max=end) for n in (S, S))
        distance = (i[S - T :, None] - j).abs() if T <= S else None
        assert distance is not None
        slopes = -alibi.to(q.dtype).reshape(-1, q.shape[2], 1, 1) * distance
        options["bias"] = options.get("bias", 0) + slopes
    return reference.attention(q, k, v, mask, **options)


def check(
    found: tuple[Tensor, Tensor], due: tuple[Tensor, Tensor], leaves: list[Tensor], wide: list[Tensor], error: float
) -> None:
    """Asserts that results and gradients of a random sum of both of them are near."""
    weights = [torch.randn_like(x) for x in due]
    sums = [
        sum((x * w.to(x.dtype)).nan_to_num(0.0, 0.0, 0.0).sum() for x, w in zip(pair, weights, strict=True))
        for pair in (found, due)
    ]
    grads = [torch.autograd.grad(total, xs) for total, xs in zip(sums, (leaves, wide), strict=True)]
    for n, (x, y) in enumerate(zip((*found, *grads[0]), (*due, *grads[1]), strict=True)):
        assert x.shape == y.shape
        assert torch.equal(x == -torch.inf, y == -torch.inf), n
        there = y != -torch.inf
        worst = (x.double() - y)[there].abs().max().item() if there.any() else 0.0
        assert worst <= error * max(y[there].abs().max().item() if there.any() else 0.0, 1.0), (n, worst)


def leaves_of(
    tensors: list[Tensor], options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor], dict[str, Any], dict[str, Any]]:
    """Tensors that need gradients, and the same in fp64: also a bias and sinks."""
    extra = [name for name in ("bias", "sinks") if name in options and options[name].is_floating_point()]
    leaves = [x.detach().clone().requires_grad_() for x in (*tensors, *(options[name] for name in extra))]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    pairs = [options | dict(zip(extra, xs[len(tensors) :], strict=True)) for xs in (leaves, wide)]
    return leaves, wide, pairs[0], pairs[1]


def run_or_skip(attention: Any, *arguments: Any, backend: str, **options: Any) -> Any:
    try:
        return attention(*arguments, backend=backend, **options)
    except rt.Unsupported as refusal:
        if backend in ("eager", "tiled") and torch.get_default_device().type == "cpu":
            raise
        pytest.skip(str(refusal).splitlines()[-1].strip())


GRID = [(mask, "") for mask in MASKS] + [(mask, word) for word in OPTIONS for mask in ("causal", "window", "no history in reach")]


@pytest.mark.parametrize(("mask", "word"), GRID)
def test_dense(mask: str, word: str, backend: str) -> None:
    options = options_of(word, packed=False)
    leaves, wide, own, exact = leaves_of([torch.randn(B, T, H, D), torch.randn(B, S, HK, D), torch.randn(B, S, HK, DV)], options)
    found = run_or_skip(rt.attention_with_lse, *leaves[:3], MASKS[mask], backend=backend, **own)
    check(found, definition(*wide[:3], MASKS[mask], **exact), leaves, wide, 2e-5)


@pytest.mark.parametrize(("mask", "word"), [case for case in GRID if case[0] not in ("full", "targets alone")])
def test_packed(mask: str, word: str, backend: str) -> None:
    cu = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    options = options_of(word, packed=True)
    leaves, wide, own, exact = leaves_of([torch.randn(ROWS, h, d) for h, d in ((H, D), (HK, D), (HK, DV))], options)
    found = run_or_skip(rt.attention_packed_with_lse, *leaves[:3], cu, cu, MASKS[mask], backend=backend, **own)
    outs, lses = [], []
    for b, (start, n) in enumerate(zip(cu.tolist(), LENGTHS, strict=False)):
        its = dict(exact)
        if "bias" in its:
            its["bias"] = (its["bias"] if its["bias"].shape[1] == 1 else its["bias"][:, start : start + n])[..., :n]
        if its.get("alibi") is not None and its["alibi"].ndim == 2:
            its["alibi"] = its["alibi"][b]
        if n:
            batch = {"batch": b} if "dropout" in its else {}
            o, lse = definition(*(x[None, start : start + n] for x in wide[:3]), MASKS[mask], **its, **batch)
            outs.append(o[0])
            lses.append(lse[0])
    check(found, (torch.cat(outs), torch.cat(lses, dim=1)), leaves, wide, 2e-5)


@pytest.mark.parametrize("poisoned", ["q", "k", "v", "do"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_bad_target_reaches_no_other(poisoned: str, softcap: float | None) -> None:
    # the middle row of 20 is one of 12 targets
    assert_nan_only_where_seen("tiled", rt.CAUSAL & rt.Targets(12), 20, 20, poisoned, softcap)


def test_a_bad_target_of_packed_sequences_reaches_no_other() -> None:
    """An empty sequence has no row that could carry a NaN to another."""
    cu = torch.tensor([0, 0, 9, 9, 20, 20])
    x = [torch.randn(20, 2, 8) for _ in range(3)]
    mask, bad, others = rt.CAUSAL & rt.Targets(4), 18, torch.arange(20) != 18
    results = []
    for spoil in (False, True):
        leaves = [y.clone() for y in x]
        for y in leaves:
            y[bad] = torch.nan if spoil else y[bad]
            y.requires_grad_()
        o, lse = rt.attention_packed_with_lse(*leaves, cu, cu, mask)
        results.append([o.detach(), lse.detach().T, *torch.autograd.grad(o, leaves, torch.ones_like(o))])
    clean, found = results
    assert found[0][bad].isnan().all()
    # the bad target's gradient reaches the keys that it sees, which are the history of its sequence
    unseen = others & ((torch.arange(20) < 9) | (torch.arange(20) >= 16))
    for n, rows in ((0, others), (1, others), (2, others), (3, unseen), (4, unseen)):
        assert torch.equal(found[n][rows], clean[n][rows]), n


def test_keys_of_a_sequence_without_queries_are_never_read() -> None:
    q, k, v = torch.randn(9, 2, 8), torch.randn(15, 2, 8), torch.randn(15, 2, 8)
    k[2], v[3] = torch.nan, torch.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = rt.attention_packed(*leaves, torch.tensor([0, 0, 9]), torch.tensor([0, 6, 15]), rt.CAUSAL & rt.Targets(4))
    _, dk, dv = torch.autograd.grad(o.square().sum(), leaves)
    assert not dk[:6].any()
    assert not dv[:6].any()


def test_second_derivatives() -> None:
    mask, cu = rt.CAUSAL & rt.Targets(3), torch.tensor([0, 3, 3, 6])
    x = [torch.randn(1, 6, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    for attention in (
        lambda *x: rt.attention(*x, mask, backend="eager"),
        lambda *x: rt.attention_packed(*(y[0] for y in x), cu, cu, mask, backend="eager"),
    ):
        assert torch.autograd.gradgradcheck(attention, x)


def test_one_at_a_time_equals_all_at_once() -> None:
    """Each target is attention of one query after the history, bit for bit where the kernel takes rows alone."""
    q, k, v = (torch.randn(1, 30, 2, 16) for _ in range(3))
    o, lse = rt.attention_with_lse(q, k, v, rt.CAUSAL & rt.Window(12) & rt.Targets(7), backend="eager")
    for c in range(23, 30):
        rows = [torch.cat([x[:, :23], x[:, c : c + 1]], dim=1) for x in (q, k, v)]
        due = rt.attention_with_lse(*rows, rt.CAUSAL & rt.Window(12), backend="eager")
        torch.testing.assert_close(o[:, c], due[0][:, -1])
        torch.testing.assert_close(lse[..., c], due[1][..., -1])


def test_half_precision_is_rounded_once_more_at_most() -> None:
    q, k, v = (torch.randn(1, 200, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    mask = rt.CAUSAL & rt.Targets(50)
    exact = reference.attention(q.double(), k.double(), v.double(), mask)[0]
    plain = reference.attention(q, k, v, mask)[0].double()
    worst = [(x.double() - exact).abs().max().item() for x in (rt.attention(q, k, v, mask), plain)]
    assert worst[0] <= 2 * worst[1]


def test_numbers_of_targets() -> None:
    assert rt.CAUSAL & rt.Targets(0) == rt.CAUSAL
    assert rt.Targets(np.int64(3)) & rt.Targets(5) == rt.Targets(5)
    assert repr(rt.CAUSAL & rt.Chunk(8) & rt.Targets(3)) == "CAUSAL & Chunk(8) & Targets(3)"
    assert eval(repr(MASKS["window"]), vars(rt)) == MASKS["window"]
    assert rt.Targets(64)._repr_html_().count("<rect") > 64
    for wrong in (-1, 2.5, True, "3"):
        with pytest.raises(rt.InvalidInput, match=re.escape(f"Targets: n is {wrong!r}; must be an integer of at least 0")):
            rt.Targets(wrong)  # type: ignore[arg-type]


def test_strides_autocast_and_inference() -> None:
    q, k, v = (torch.randn(2, 4, 20, 16).transpose(1, 2) for _ in range(3))
    mask = rt.CAUSAL & rt.Targets(6)
    due = rt.attention(*(x.contiguous() for x in (q, k, v)), mask)
    with torch.inference_mode():
        assert torch.equal(rt.attention(q, k, v, mask), due)
    with torch.autocast(q.device.type, torch.bfloat16):
        found = rt.attention(q, k, v, mask)
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous()
    torch.testing.assert_close(found.float(), due, rtol=0.05, atol=0.05)


def test_padded_keys_and_nested_tensors() -> None:
    q, k, v = (torch.randn(2, 20, 2, 16) for _ in range(3))
    mask, padding = rt.CAUSAL & rt.Targets(6), torch.zeros(2, 20, dtype=torch.bool)
    padding[0, :5] = padding[1, 17] = True
    due = rt.attention(q, k, v, mask, bias=~padding[:, None, None])
    torch.testing.assert_close(rt.attention(q, k, v, mask, key_padding_mask=padding), due)
    nested = [torch.nested.nested_tensor([x[0, :9], x[1]], layout=torch.jagged) for x in (q, k, v)]
    found = rt.attention(*nested, mask)
    torch.testing.assert_close(found[1], rt.attention(q[1:], k[1:], v[1:], mask)[0])
    torch.testing.assert_close(found[0], rt.attention(q[:1, :9], k[:1, :9], v[:1, :9], mask)[0])


def test_transforms() -> None:
    q, k, v = (torch.randn(3, 2, 14, 2, 16) for _ in range(3))
    mask = rt.CAUSAL & rt.Targets(4)
    slopes = torch.rand(2)
    due = torch.stack([rt.attention(*x, mask, alibi=slopes) for x in zip(q, k, v, strict=True)])
    torch.testing.assert_close(vmap(lambda q, k, v: rt.attention(q, k, v, mask, alibi=slopes))(q, k, v), due)
    per_sample = vmap(grad(lambda k: rt.attention(q[0], k, v[0], mask).square().sum()))(k)
    for x, found in zip(k, per_sample, strict=True):
        leaf = x.clone().requires_grad_()
        (due,) = torch.autograd.grad(rt.attention(q[0], leaf, v[0], mask).square().sum(), leaf)
        torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-5)


def test_compiled() -> None:
    q, k, v = (torch.randn(2, 20, 2, 16, requires_grad=True) for _ in range(3))
    cu, mask = torch.tensor([0, 13, 13, 40], dtype=torch.int32), rt.CAUSAL & rt.Window(7) & rt.Targets(6)

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return rt.attention(q, k, v, mask), rt.attention_packed(*(x.flatten(0, 1) for x in (q, k, v)), cu, cu, mask)

    found, due = torch.compile(both, fullgraph=True, backend="aot_eager")(q, k, v), both(q, k, v)
    torch.testing.assert_close(found, due)
    grads = [torch.autograd.grad(sum(y.square().sum() for y in pair), (q, k, v)) for pair in (found, due)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_explained() -> None:
    q = torch.randn(1, 20, 2, 16)
    mask = rt.CAUSAL & rt.Targets(6)
    found = rt.explain(q, q, q, mask, softcap=3.0)
    assert "runs the targets over the history" in found
    assert "mha causal dense" in found
    assert rt.explain(q, q, q, rt.Targets(20)).backend is not None


def test_the_mask_is_drawn_and_counted() -> None:
    """Text, matrix and number of pairs agree, for fewer queries than keys and for more."""
    for mask in MASKS.values():
        for T, S in ((30, 38), (38, 30), (30, 30)):
            seen = materialise(mask, T, S).cpu()
            drawn = rt.exact.masks.draw(mask, T, S).split("\n")
            assert ["".join("#" if x else "." for x in row) for row in seen.tolist()] == drawn
            assert rt.exact.masks.pairs(mask, T, S) == int(seen.sum())


X = torch.zeros(1, 8, 2, 16, device="cpu")
CU = torch.tensor([0, 3, 8], device="cpu")
REFUSED: dict[str, tuple[Any, str]] = {
    "too many": (lambda m: rt.attention(X, X, X, rt.Targets(9)), "mask targets(9) over 8 queries and 8 keys; has more targets"),
    "too many queries": (lambda m: rt.attention(X[:, :2], X, X, m), "over 2 queries and 8 keys"),
    "a short sequence": (
        lambda m: rt.attention_packed(X[0], X[0], X[0], CU, CU, m),
        "mask causal & targets(4), and sequence 0 has 3 queries and 3 keys; must have at least its targets of both",
    ),
    "a recipe": (lambda m: rt.attention(X, X, X, m, precision="int8"), "mask causal & targets(4) with precision int8; has"),
    "lists": (
        lambda m: rt.attention(X, X, X, m, blocks=rt.Blocks.from_dense(torch.ones(1, 1, 1, 1, dtype=torch.bool, device="cpu"))),
        "mask causal & targets(4) with blocks=; lists of blocks have no targets",
    ),
    "alibi and dropout": (
        lambda m: rt.attention_packed(X[0], X[0], X[0], CU, CU, m, alibi=torch.ones(2, device="cpu"), dropout=0.1),
        "with alibi and dropout in packed sequences; has one of them",
    ),
    "pages": (
        lambda m: rt.attention_paged(X, PagedKV(X, X, CU[None, :1].int(), CU[2:].int()), m),
        "mask causal & targets(4) in a problem of paged attention; has masks without targets",
    ),
    "quantised": (lambda m: rt.attention_quantised(rt.quantise_qkv(X, X, X), m), "in a problem of dense attention"),
    "intervals": (lambda m: m.first_key(3), "in a computation over intervals of keys"),
    "a union": (lambda m: m | rt.FULL, "a union of masks is no interval"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    run, words = REFUSED[name]
    with pytest.raises((rt.InvalidInput, rt.Unsupported), match=re.escape(words)):
        run(rt.CAUSAL & rt.Targets(4))
