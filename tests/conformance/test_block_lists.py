"""Lists of blocks on every backend: against the definition with the pairs written out, one by one."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.exact import dispatch, reference
from rooftile.exact.blocks import Blocks, packed
from rooftile.exact.masks import CAUSAL, FULL, Mask, Prefix, Window
from rooftile.exact.ops.listed import with_blocks
from rooftile.exact.spec import Call, CallSettings, Options, Spec
from rooftile.runtime.devices import arch
from tests.conformance.exact import ulp

F32, BF16 = torch.float32, torch.bfloat16


class Lists(NamedTuple):
    """A problem with random lists. `lengths` are those of packed sequences."""

    name: str
    T: int = 200
    S: int = 260
    H: int = 2
    Hk: int = 2
    heads: int = 2  # lists for so many heads
    batch: int = 2  # and so many sequences, of 2
    size: tuple[int, int] = (64, 64)
    D: int = 32
    mask: Mask = FULL
    part: int = 0  # blocks of each list with bits
    density: float = 0.5
    dtype: torch.dtype = F32
    lengths: tuple[tuple[int, int], ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012 - a NamedTuple's default


CASES = [
    Lists("one list", heads=1, batch=1),
    Lists("causal", mask=CAUSAL, size=(64, 128)),
    Lists("lists of query heads", H=4, heads=4, mask=Window(50, 30), size=(128, 64), part=1),
    Lists("groups of 5", T=70, H=5, Hk=1, heads=1, batch=1, mask=CAUSAL),
    Lists("more queries", T=260, S=130, mask=CAUSAL, heads=1, part=2),
    Lists("prefix", mask=Prefix(70), size=(192, 64), batch=1),
    Lists("sparse", density=0.15, mask=CAUSAL, options={"sinks": True}),
    Lists("no block", density=0.0),
    Lists("every option", H=4, heads=2, options={"sinks": True, "alibi": True, "softcap": 3.0, "dropout": 0.3, "seed": 3}),
    Lists("bf16, D 64", D=64, mask=CAUSAL, dtype=BF16, part=1, size=(64, 64)),
    Lists("packed", H=4, lengths=((70, 100), (0, 30), (130, 130), (1, 0)), mask=CAUSAL, part=1, batch=1),
    Lists("packed, one list", lengths=((64, 64), (65, 129)), heads=1, batch=1, size=(64, 128)),
    Lists("bf16, D 128, full", T=300, S=390, D=128, size=(128, 128), dtype=BF16),
    Lists("bf16, groups, causal", T=400, S=400, H=4, heads=4, D=128, size=(128, 128), dtype=BF16, mask=CAUSAL),
    Lists("bf16, lists of key heads", T=300, S=520, H=8, heads=2, D=64, size=(256, 128), dtype=BF16, mask=CAUSAL),
    Lists("bf16, window", T=300, S=300, D=96, size=(128, 256), dtype=BF16, mask=Window(150, 20), options={"softcap": 5.0}),
    Lists("fp16, sparse", T=1100, S=1300, H=1, Hk=1, heads=1, D=64, size=(128, 128), dtype=torch.float16, density=0.3),
    Lists("bf16, no block", T=200, S=200, D=128, size=(128, 128), dtype=BF16, density=0.0),
    Lists("bf16, smaller keys", T=300, S=300, D=128, size=(128, 64), dtype=BF16, mask=CAUSAL, options={"sinks": True}),
    Lists("bf16, D 256", T=200, S=330, D=256, size=(128, 128), dtype=BF16, mask=CAUSAL),
    Lists(
        "bf16, packed",
        H=4,
        lengths=((70, 100), (0, 30), (300, 300), (1, 0), (129, 257)),
        D=64,
        size=(128, 128),
        dtype=BF16,
        mask=CAUSAL,
        batch=1,
    ),
    Lists("bf16, packed, full", lengths=((300, 200), (10, 500)), D=128, size=(256, 256), dtype=BF16, heads=1, batch=1),
    Lists("no query", T=0, S=70),
    Lists("no key", T=70, S=0),
]


class Made(NamedTuple):
    inputs: tuple[Tensor, ...]  # q, k, v
    offsets: tuple[Tensor, ...]  # none, or cu_q and cu_k
    blocks: Blocks
    seen: Tensor  # booleans (B or sequences, H, T, S), the longest ones for packed sequences
    options: dict[str, Any]


def made(case: Lists, device: torch.device) -> Made:
    """Tensors of a case, and its pairs by hand."""
    torch.manual_seed(len(case.name))
    rows, keys = case.size
    sequences = case.lengths or ((case.T, case.S),) * 2
    B, group, per = len(sequences), case.H // case.Hk, case.H // case.heads
    places = sum(T for T, _ in sequences) // rows + B if case.lengths else -(-case.T // rows)
    most = max(-(-S // keys) for _, S in sequences)
    counts = torch.zeros(case.batch, case.heads, places, dtype=torch.int32)
    # nobody reads behind a count
    indices = torch.full((case.batch, case.heads, places, most + 2), 7_000_000, dtype=torch.int32)
    whole = torch.rand(case.batch, case.heads, places, case.part, rows, keys) < 0.7
    longest = [max(lengths) for lengths in zip(*sequences, strict=True)]
    seen = torch.zeros(B, case.H, *longest, dtype=torch.bool)
    first = 0
    for b, (T, S) in enumerate(sequences):
        place_0 = first // rows + b if case.lengths else 0
        first += T
        for h in range(case.heads):
            for i in range(-(-T // rows)):
                listed = torch.randperm(-(-S // keys))
                listed = listed[torch.rand(len(listed)) < case.density].tolist()
                at = (min(b, case.batch - 1), h, place_0 + i)
                if not case.lengths and b >= case.batch:
                    listed = indices[at][: counts[at]].tolist()
                counts[at] = len(listed)
                indices[at][: len(listed)] = torch.tensor(listed, dtype=torch.int32)
                for n, j in enumerate(listed):
                    here = whole[at][n] if n < case.part else torch.ones(rows, keys, dtype=torch.bool)
                    there = (slice(i * rows, min((i + 1) * rows, T)), slice(j * keys, min((j + 1) * keys, S)))
                    part = here[: there[0].stop - there[0].start, : there[1].stop - there[1].start]
                    seen[b, h * per : (h + 1) * per, there[0], there[1]] = part
    bits = packed(whole).to(device) if case.part else None
    blocks = Blocks(counts.to(device), indices.to(device), case.size, bits)
    shapes = [(case.H, case.D), (case.H // group, case.D), (case.H // group, case.D)]
    total = [sum(lengths) for lengths in zip(*sequences, strict=True)]
    lead = [(total[0],), (total[1],), (total[1],)] if case.lengths else [(2, case.T), (2, case.S), (2, case.S)]
    inputs = tuple(torch.randn(*a, *b, device=device, dtype=case.dtype) for a, b in zip(lead, shapes, strict=True))
    options = dict(case.options)
    for name in ("sinks", "alibi"):
        if options.get(name):
            options[name] = torch.rand(case.H, device=device)
    cu = [torch.tensor([0, *n], dtype=torch.int32).cumsum(0).to(device, torch.int32) for n in zip(*sequences, strict=True)]
    return Made(inputs, tuple(cu) if case.lengths else (), blocks, seen.to(device), options)


def definition(case: Lists, it: Made, dtype: torch.dtype) -> list[Tensor]:
    """o, lse, dq, dk, dv by the definition in a dtype, from the pairs by hand."""
    leaves = [x.to(dtype).requires_grad_() for x in it.inputs]
    options = {name: x.to(dtype) if isinstance(x, Tensor) else x for name, x in it.options.items()}
    if "seed" in options:
        options["seed"] = torch.tensor([options["seed"]], device=it.seen.device)
    parts = []
    if case.lengths:
        for b, (T, S) in enumerate(case.lengths):
            at = [(int(cu[b]), int(cu[b + 1])) for cu in (it.offsets[0], it.offsets[1], it.offsets[1])]
            here = [x[None, start:stop] for x, (start, stop) in zip(leaves, at, strict=True)]
            parts.append(reference.attention(*here, case.mask, seen=it.seen[b, None, :, :T, :S], batch=b, **options))
        o, lse = torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], dim=-1)
    else:
        o, lse = reference.attention(*leaves, case.mask, seen=it.seen, **options)
    return [o, lse, *gradients(o, lse, leaves)]


def gradients(o: Tensor, lse: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    do, dlse = (torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in (o, lse))
    total = (o * do).sum() + (lse.masked_fill(lse == -math.inf, 0.0) * dlse).sum()
    return torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_definition_with_the_pairs_by_hand(case: Lists, backend: str, device: torch.device) -> None:
    assert_by_hand(case, backend, device)


def assert_by_hand(case: Lists, backend: str, device: torch.device) -> None:
    it = made(case, device)
    leaves = [x.clone().requires_grad_() for x in it.inputs]
    attention = rt.attention_packed_with_lse if case.lengths else rt.attention_with_lse
    try:
        o, lse = attention(*leaves, *it.offsets, case.mask, blocks=it.blocks, backend=backend, **it.options)
    except rt.Unsupported as refusal:
        assert "blocks" in str(refusal) or "tensors are on" in str(refusal)  # noqa: PT017
        return
    found = [o, lse, *gradients(o, lse, leaves)]
    exact, plain = definition(case, it, torch.float64), definition(case, it, case.dtype)
    largest = max((x[x.isfinite()].abs().max().item() for x in exact if x.isfinite().any()), default=0.0)
    for name, x, due, usual in zip(("o", "lse", "dq", "dk", "dv"), found, exact, plain, strict=True):
        assert torch.equal(x == -math.inf, due == -math.inf), name
        there = due != -math.inf
        if not there.any():
            continue
        wrong, normal = ((y[there].double() - due[there]).abs().max().item() for y in (x.detach(), usual.detach()))
        slack = 8 * max(ulp(case.dtype, due[there].abs().max().item()), ulp(F32, largest))
        assert wrong <= 2 * normal + slack, f"{name}: {wrong:.3g}, due {2 * normal + slack:.3g}"


def runs(backend: str, device: torch.device) -> bool:
    spec = Spec(dtype=F32, dim=32, dim_v=32, scale=1.0, block_size=(64, 64), device=arch(device))
    return not list(dispatch.BACKENDS[backend].refusals(spec))


@pytest.mark.parametrize("mask", [FULL, CAUSAL, CAUSAL & Window(40)], ids=str)
def test_all_blocks_are_the_mask_alone(mask: Mask, backend: str, device: torch.device) -> None:
    if not runs(backend, device):
        pytest.skip("has no lists here")
    q, k, v = (torch.randn(1, n, 2, 32, device=device) for n in (130, 200, 200))
    blocks = Blocks.from_dense(torch.ones(3, 4, dtype=torch.bool, device=device), (64, 64))
    due = rt.attention_with_lse(q, k, v, mask, backend=backend)
    found = rt.attention_with_lse(q, k, v, mask, blocks=blocks, backend=backend)
    for a, b in zip(found, due, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_list_and_its_complement_merged_are_the_whole(backend: str, device: torch.device) -> None:
    if not runs(backend, device):
        pytest.skip("has no lists here")
    q, k, v = (torch.randn(2, 150, 2, 32, device=device) for _ in range(3))
    keep = torch.rand(2, 2, 3, 3, device=device) < 0.5
    lists = [Blocks.from_dense(x, (64, 64)) for x in (keep, ~keep)]
    parts = [rt.attention_with_lse(q, k, v, CAUSAL, blocks=some, backend=backend) for some in lists]
    o, lse = rt.merge(parts)
    due, due_lse = rt.attention_with_lse(q, k, v, CAUSAL, backend=backend)
    torch.testing.assert_close(o, due, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, due_lse, atol=1e-5, rtol=1e-5)


def test_the_order_of_a_list_does_not_matter_and_a_block_that_is_not_there_is_passed_over(
    backend: str, device: torch.device
) -> None:  # fmt: skip
    """A GPU's lists are not read by the checks: the operators below them get the lists as they are."""
    if not runs(backend, device):
        pytest.skip("has no lists here")
    q, k, v = (torch.randn(1, 130, 2, 32, device=device) for _ in range(3))
    lists = {"right": [[0, 2], [1, 0], [2, 1]], "turned": [[2, 0], [0, 1], [1, 2]]}
    far = [[0, 2, 3, -1, 2**30], [1, 0, 2**31 - 1, -(2**31), 3], [2, 1, 5, 5, 5]]
    spec = Spec(dtype=F32, dim=32, dim_v=32, scale=0.2, mask=CAUSAL, block_size=(64, 64), device=arch(device))
    found = []
    for indices in (*lists.values(), far):
        counts = torch.full((1, 1, 3), len(indices[0]), dtype=torch.int32, device=device)
        given = torch.tensor(indices, dtype=torch.int32, device=device)[None, None]
        options = Options(block_counts=counts, block_indices=given)
        found.append(dispatch.BACKENDS[backend].forward(q, k, v, options, spec)[0])
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[2], found[0], atol=1e-5, rtol=1e-5)


def test_a_nan_shows_where_it_is_seen_and_nowhere_else(backend: str, device: torch.device) -> None:
    if not runs(backend, device):
        pytest.skip("has no lists here")
    case = Lists("nan", mask=CAUSAL, part=1)
    it = made(case, device)
    q, k, v = (x.clone() for x in it.inputs)
    k[1, 70, 0, 3], v[0, 150, 1, 2], q[0, 3, 1, 1] = math.nan, math.nan, math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, _ = rt.attention_with_lse(*leaves, case.mask, blocks=it.blocks, backend=backend)
    visible = it.seen & rt.exact.masks.materialise(CAUSAL, case.T, case.S, device)
    due = torch.zeros(2, case.T, 2, dtype=torch.bool, device=device)
    due[1, :, 0] |= visible[1, 0, :, 70]
    due[0, :, 1] |= visible[0, 1, :, 150]
    due[0, 3, 1] |= visible[0, 1, 3].any()
    assert torch.equal(o.isnan().any(-1), due)
    dq, dk, _ = torch.autograd.grad(o.nan_to_num().sum(), leaves)
    # a key that no lost row sees has a gradient
    clean = ~(visible & (due.mT[..., None])).any(2)
    assert dk.isfinite().all(-1).mT[clean].all()
    assert dq.isfinite().all(-1)[~due].all()


def test_seams_autocast_inference_compile_and_func() -> None:
    q, k, v = (torch.randn(1, 130, 2, 32) for _ in range(3))
    blocks = Blocks.from_dense(torch.rand(2, 3, 3) < 0.6, (64, 64))
    due = rt.attention(q, k, v, CAUSAL, blocks=blocks)
    with torch.inference_mode():
        torch.testing.assert_close(rt.attention(q, k, v, CAUSAL, blocks=blocks), due)
    with torch.autocast("cpu", torch.bfloat16):
        assert rt.attention(q, k, v, CAUSAL, blocks=blocks).dtype == torch.bfloat16
    turned = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    torch.testing.assert_close(rt.attention(*turned, CAUSAL, blocks=blocks), due)

    def loss(q: Tensor) -> Tensor:
        return rt.attention(q, k, v, CAUSAL, blocks=blocks).square().sum()

    leaf = q.clone().requires_grad_()
    (by_autograd,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(q), by_autograd)
    # the gradient and the forward in one graph
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    leaf = q.clone().requires_grad_()
    (in_graph,) = torch.autograd.grad(compiled(leaf), leaf)
    torch.testing.assert_close(in_graph, by_autograd)


def test_lists_that_changed_are_transposed_anew() -> None:
    q, k, v = (torch.randn(1, 130, 2, 32, requires_grad=True) for _ in range(3))
    blocks = Blocks.from_dense(torch.eye(3, dtype=torch.bool), (64, 64))
    rt.attention(q, k, v, blocks=blocks).sum().backward()
    blocks.indices[0, 0, 0, 0] = 2
    (dk,) = torch.autograd.grad(rt.attention(q, k, v, blocks=blocks).square().sum(), k)
    (due,) = torch.autograd.grad(rt.attention(q, k, v, blocks=blocks, backend="eager").square().sum(), k)
    torch.testing.assert_close(dk, due, atol=1e-4, rtol=1e-4)


def test_lists_made_in_inference_mode_serve_training() -> None:
    with torch.inference_mode():
        blocks = Blocks.from_dense(torch.rand(2, 2) < 0.9, (64, 64))
    q = torch.randn(1, 100, 2, 32, requires_grad=True)
    (grad,) = torch.autograd.grad(rt.attention(q, q, q, blocks=blocks).sum(), q)
    assert grad.isfinite().all()


def test_packed_lists_are_transposed_within_sequences() -> None:
    """Lists of places past a sequence's end, and blocks past its keys, are nobody's."""
    blocks = Blocks.from_dense(torch.ones(1, 1, 5, 3, dtype=torch.bool), (64, 64))
    cu = torch.tensor([0, 70, 70, 190])
    lists = blocks.transposed_packed(5, cu, cu)
    found = [lists.entries[0, 0, j, : lists.counts[0, 0, j]].tolist() for j in range(5)]
    # 70 queries and keys in places 0 and 1, none in 2, 120 in 3 and 4
    first, second = ([[0, n], [1, n]] for n in (0, 1))
    assert found == [first, second, [], first, second]


def test_the_transposed_lists_are_made_once() -> None:
    blocks = Blocks.from_dense(torch.rand(2, 3, 5) < 0.5)
    assert blocks.transposed(5).entries is blocks.transposed(5).entries


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"T": 300}, "has lists for 2 blocks of queries; 300 queries in blocks of 128 are 3"),
        ({"blocks": torch.ones(2, 2)}, "must be rooftile.Blocks"),
        ({"keep": torch.ones(3, 2, 2, dtype=torch.bool)}, "lists for 3 heads; must be 1, or 2 of k, or 4 of q"),
        ({"keep": torch.ones(3, 1, 2, 2, dtype=torch.bool)}, "a batch of 3; must be 1 or 1, the batch of q"),
        ({"index": 2}, "blocks.indices has 0 to 2; there are blocks of keys 0 to 1"),
        ({"index": 1}, "a block twice in a list"),
        ({"count": 3}, "a list has room for 0 to 2"),
        ({"precision": "fp8"}, "blocks with precision"),
        ({"backend": "sdpa"}, "sdpa - blocks; has none"),
        ({"key_padding_mask": torch.zeros(1, 256, dtype=torch.bool)}, None),
    ],
)
def test_bad_lists_get_a_sentence(change: dict[str, Any], sentence: str | None) -> None:
    q = torch.randn(1, change.pop("T", 256), 4, 32)
    k, v = (torch.randn(1, 256, 2, 32) for _ in range(2))
    blocks = Blocks.from_dense(change.pop("keep", torch.ones(2, 2, dtype=torch.bool)))
    if "index" in change:
        blocks.indices[0, 0, 0, 0] = change.pop("index")
    if "count" in change:
        blocks.counts[0, 0, 0] = change.pop("count")
    words = {"blocks": blocks} | change
    if sentence is None:
        torch.testing.assert_close(rt.attention(q, k, v, **words), rt.attention(q, k, v, blocks=blocks))
        return
    with pytest.raises((rt.InvalidInput, rt.Unsupported)) as refusal:
        rt.attention(q, k, v, **words)
    assert sentence in " ".join(str(refusal.value).split())


def test_the_lists_of_a_packed_call_have_their_places() -> None:
    q = torch.randn(200, 2, 32)
    cu = torch.tensor([0, 70, 200], dtype=torch.int32)
    with pytest.raises(rt.InvalidInput, match=r"it must be \(1, heads, 5\): sequence b has its lists from cu_q\[b\] // 64"):
        rt.attention_packed(q, q, q, cu, cu, blocks=Blocks.from_dense(torch.ones(4, 3, dtype=torch.bool), (64, 64)))


def test_nested_tensors_with_lists_are_refused() -> None:
    q = torch.nested.nested_tensor([torch.randn(5, 2, 32), torch.randn(3, 2, 32)], layout=torch.jagged)
    with pytest.raises(rt.InvalidInput, match="blocks with nested tensors"):
        rt.attention(q, q, q, blocks=Blocks.from_dense(torch.ones(1, 1, dtype=torch.bool)))


def test_a_call_without_lists_is_left_alone() -> None:
    q, k, v = (torch.randn(1, 8, 2, 32) for _ in range(3))
    call = Call(q, k, v, CAUSAL, Options(), CallSettings())
    assert with_blocks(call, None) is call


def test_explain_knows_them() -> None:
    q, k, v = (torch.randn(1, 8, 2, 32) for _ in range(3))
    blocks = Blocks.from_dense(torch.ones(1, 1, dtype=torch.bool))
    shown = rt.explain(q, k, v, CAUSAL, blocks=blocks)
    assert "blocks(128x128)" in shown
    assert "sdpa     - blocks; has none" in shown


def test_sizes_are_whole_numbers_of_any_kind() -> None:
    counts, indices = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    assert Blocks(counts, indices, np.int64(64)).block_size == Blocks(counts, indices, [64, np.int32(64)]).block_size == (64, 64)
    for size in (64.0, "64", None, (64,), (64, 96), True):
        with pytest.raises(rt.InvalidInput, match=r"blocks: block_size is .*; must be \(queries, keys\) of a block, multiples"):
            Blocks(counts, indices, size)
    with pytest.raises(rt.InvalidInput, match="blocks: counts is None; must be an int32 tensor of 3 axes"):
        Blocks(None, indices)
