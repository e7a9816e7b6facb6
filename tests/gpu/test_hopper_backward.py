"""The Hopper backward beyond the conformance suite."""

from __future__ import annotations

import pytest
import torch

import rooftile as rt
from rooftile.exact.backends.hopper import DIMS
from rooftile.exact.masks import CAUSAL, FULL, Chunk, Mask, Prefix, Window

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

MASKS = [FULL, CAUSAL, Window(100, 7), CAUSAL & Window(300), Prefix(70) & Window(500), Chunk(90)]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def gradients(q, k, v, mask: Mask = FULL, do=None, backend: str = "hopper", dlse=None, **options) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse = rt.attention_with_lse(*leaves, mask, backend=backend, **options)
    outputs, given = [o], [do]
    if dlse is not None:
        outputs, given = [o, lse], [do, dlse]
    return torch.autograd.grad(outputs, leaves, given)


def assert_as_defined(found, q, k, v, mask: Mask, do, dlse=None, **options) -> None:
    """At most twice as wrong as plain attention in the same dtype, plus rounding."""
    wide = [x.double() for x in (q, k, v)]
    exact = gradients(*wide, mask, do.double(), "eager", None if dlse is None else dlse.double(), **options)
    plain = gradients(q, k, v, mask, do, "eager", dlse, **options)
    for name, x, near, far in zip(("dq", "dk", "dv"), found, exact, plain, strict=True):
        assert not x.isnan().any(), name
        room = 2 * (far.double() - near).abs().max() + 8 * torch.finfo(q.dtype).eps * near.abs().max()
        assert (x.double() - near).abs().max() <= room, name


def poison() -> None:
    """Leaves NaN in the memory that the next calls are given."""
    del_me = torch.full((2**27,), float("nan"), device="cuda")
    del del_me


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_ragged_lengths(dim: int, dim_v: int, mask: Mask, deterministic: bool) -> None:
    for T, S in ((1, 300), (257, 257), (640, 333), (333, 640)):
        q, k, v = randn(2, T, 4, dim), randn(2, S, 2, dim), randn(2, S, 2, dim_v)
        do = randn(2, T, 4, dim_v)
        poison()
        found = gradients(q, k, v, mask, do, deterministic=deterministic)
        assert_as_defined(found, q, k, v, mask, do)


@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@pytest.mark.parametrize("mask", [FULL, CAUSAL, CAUSAL & Window(300)], ids=str)
def test_repeated_runs(dim: int, dim_v: int, mask: Mask) -> None:
    """With an order asked for all gradients have the same bits; without, dk and dv do and dq nearly."""
    q, k, v = randn(4, 2048, 8, dim), randn(4, 2048, 2, dim), randn(4, 2048, 2, dim_v)
    do = randn(4, 2048, 8, dim_v)
    first = gradients(q, k, v, mask, do, deterministic=True)
    for _ in range(5):
        assert all(torch.equal(x, y) for x, y in zip(first, gradients(q, k, v, mask, do, deterministic=True), strict=True))
    dq, dk, dv = gradients(q, k, v, mask, do)
    for _ in range(5):
        dq_2, dk_2, dv_2 = gradients(q, k, v, mask, do)
        assert torch.equal(dk_2, dk)
        assert torch.equal(dv_2, dv)
        torch.testing.assert_close(dq_2, dq, rtol=0.02, atol=0.002)


@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@pytest.mark.parametrize("batch", [1, 16, 48])
def test_groups_whole_and_in_parts(dim: int, dim_v: int, batch: int) -> None:
    """With few tiles of keys, a group is split into parts with separate sums."""
    q, k, v = randn(batch, 700, 8, dim), randn(batch, 1100, 2, dim), randn(batch, 1100, 2, dim_v)
    do = randn(batch, 700, 8, dim_v)
    found = gradients(q, k, v, CAUSAL, do)
    due = gradients(q, k, v, CAUSAL, do, "triton")
    for name, x, y in zip(("dq", "dk", "dv"), found, due, strict=True):
        assert (x - y).abs().max() <= 0.02 * y.abs().max(), name


@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_a_gradient_through_lse(dim: int, dim_v: int) -> None:
    q, k, v = randn(2, 300, 4, dim), randn(2, 500, 4, dim), randn(2, 500, 4, dim_v)
    do, dlse = randn(2, 300, 4, dim_v), randn(2, 4, 300, dtype=torch.float32)
    assert_as_defined(gradients(q, k, v, CAUSAL, do, dlse=dlse), q, k, v, CAUSAL, do, dlse)


@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_the_mask_hides_stays_hidden(dim: int, dim_v: int, deterministic: bool, bad: float) -> None:
    """Keys and values after 300 are seen by later queries only; gradients of outputs before 100 reach early keys only."""
    q, k, v, do = (randn(1, 400, 2, d) for d in (dim, dim, dim_v, dim_v))
    due = gradients(q, k, v, CAUSAL, do, deterministic=deterministic)
    k_bad, v_bad = k.clone(), v.clone()
    k_bad[:, 301:] = bad
    v_bad[:, 301:] = bad
    dq, _, _ = gradients(q, k_bad, v_bad, CAUSAL, do, deterministic=deterministic)
    torch.testing.assert_close(dq[:, :301], due[0][:, :301], rtol=0.02, atol=0.02)
    assert dq[:, 301:].isnan().any()
    do_bad = do.clone()
    do_bad[:, :100] = bad
    dq, dk, dv = gradients(q, k, v, CAUSAL, do_bad, deterministic=deterministic)
    for name, x, y in (("dq", dq, due[0]), ("dk", dk, due[1]), ("dv", dv, due[2])):
        torch.testing.assert_close(x[:, 100:], y[:, 100:], rtol=0.02, atol=0.02, msg=name)


@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_gradients_next_door_do_not_leak(dim: int, dim_v: int) -> None:
    cu = torch.tensor([0, 100, 100, 333, 500], dtype=torch.int32, device="cuda")
    q, k, v = randn(500, 4, dim), randn(500, 2, dim), randn(500, 2, dim_v)
    do = randn(500, 4, dim_v)

    def packed(q, k, v, do):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(rt.attention_packed(*leaves, cu, cu, CAUSAL, backend="hopper"), leaves, do)

    due = packed(q, k, v, do)
    alone = gradients(*(x[None, 100:333] for x in (q, k, v)), CAUSAL, do[None, 100:333])
    for x, y in zip(due, alone, strict=True):
        torch.testing.assert_close(x[100:333], y[0], rtol=0.02, atol=0.02)
    for x in (q, k, v, do):
        spoiled = x.clone()
        spoiled[:100] = float("nan")
        spoiled[333:] = float("nan")
        found = packed(*(spoiled if y is x else y for y in (q, k, v, do)))
        for one, other in zip(found, due, strict=True):
            torch.testing.assert_close(one[100:333], other[100:333], rtol=0.02, atol=0.02)


def test_streams_side_by_side() -> None:
    inputs = [[randn(2, 1500, 8, 128) for _ in range(4)] for _ in range(2)]
    due = [gradients(*x[:3], CAUSAL, x[3], deterministic=True) for x in inputs]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found: list[list[tuple[torch.Tensor, ...]]] = [[], []]
    for _ in range(5):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[n].append(gradients(*inputs[n][:3], CAUSAL, inputs[n][3], deterministic=True))
    torch.cuda.synchronize()
    for n in range(2):
        for grads in found[n]:
            assert all(torch.equal(x, y) for x, y in zip(grads, due[n], strict=True))


@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_a_graph_replays(dim: int, dim_v: int) -> None:
    q, k, v = (randn(2, 700, 4, d).requires_grad_() for d in (dim, dim, dim_v))
    do = randn(2, 700, 4, dim_v)
    due = gradients(q, k, v, CAUSAL, do, deterministic=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = rt.attention(q, k, v, CAUSAL, backend="hopper", deterministic=True)
        captured = torch.autograd.grad(o, (q, k, v), do)
    for _ in range(3):
        for x in captured:
            x.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(captured, due, strict=True))


def test_gradients_that_the_copy_engine_cannot_read_are_copied() -> None:
    q, k, v, do = (randn(2, 130, 2, 64) for _ in range(4))
    due = gradients(q, k, v, CAUSAL, do, deterministic=True)
    odd = torch.zeros(2, 130, 2, 65, device="cuda", dtype=do.dtype)[..., :64].copy_(do)
    assert all(torch.equal(x, y) for x, y in zip(gradients(q, k, v, CAUSAL, odd, deterministic=True), due, strict=True))
    one = randn(1, 1, 1, 64).expand(2, 130, 2, 64)
    for x, y in zip(
        gradients(q, k, v, CAUSAL, one, deterministic=True),
        gradients(q, k, v, CAUSAL, one.clone(), deterministic=True),
        strict=True,
    ):
        assert torch.equal(x, y)


def test_elements_beyond_2_31() -> None:
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free GPU memory")
    T, H, D = 2**19 + 64, 64, 64
    q, k, v, do = (torch.zeros(1, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    assert q.numel() > 2**31
    ends = slice(T - 300, T)
    for x in (q, k, v, do):
        x[:, ends] = torch.randn_like(x[:, ends])
    found = gradients(q, k, v, CAUSAL & Window(200), do)
    due = gradients(*(x[:, T - 600 :] for x in (q, k, v)), CAUSAL & Window(200), do[:, T - 600 :])
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x[:, ends], y[:, 300:], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Window(100, 7)], ids=str)
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_every_tile_of_a_packed_batch_is_computed(dim: int, dim_v: int, mask: Mask) -> None:
    """The last tiles come in the order of their work, up to 32 sequences; queries and keys need not be equally many."""
    draw = torch.Generator().manual_seed(0)
    for batch, longest in ((1, 900), (5, 900), (32, 300), (33, 300), (80, 70)):
        lengths = [torch.randint(longest, (batch,), generator=draw) for _ in range(2)]
        lengths[0][batch // 2] = 0 if batch > 1 else 5
        cu_q, cu_k = (torch.cat([torch.zeros(1, dtype=torch.int64), x.cumsum(0)]).int().cuda() for x in lengths)
        total_q, total_k = (int(x.sum()) for x in lengths)
        q, k, v = randn(total_q, 4, dim), randn(total_k, 2, dim), randn(total_k, 2, dim_v)
        do = randn(total_q, 4, dim_v)
        answers = []
        for backend in ("triton", "hopper"):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            poison()
            o = rt.attention_packed(*leaves, cu_q, cu_k, mask, backend=backend)
            answers.append((o, *torch.autograd.grad(o, leaves, do)))
        for name, due, found in zip(("o", "dq", "dk", "dv"), *answers, strict=True):
            assert (found - due).abs().max() <= 0.02 * due.abs().max() + 1e-3, (name, batch)


@pytest.mark.parametrize("kernel", ["hopper", "triton"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_row_that_sees_only_its_sink_does_not_use_do(kernel: str, deterministic: bool) -> None:
    q, k, v = randn(1, 300, 2, 64), randn(1, 190, 2, 64), randn(1, 190, 2, 64)
    do, sinks = randn(1, 300, 2, 64), torch.tensor([0.5, -1.0], device="cuda")

    def found(do: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
        o = rt.attention(*leaves[:3], CAUSAL, sinks=leaves[3], backend=kernel, deterministic=deterministic)
        return torch.autograd.grad(o, leaves, do)

    clean = found(do)
    do[:, 4] = float("nan")
    for name, x, due in zip(("dq", "dk", "dv", "dsinks"), found(do), clean, strict=True):
        # what a repair computes again is added up in another order
        torch.testing.assert_close(x, due, rtol=2e-2, atol=2e-2, msg=lambda text, name=name: f"{name}: {text}")
