"""The Hopper kernels beyond the conformance suite: the order in which tiles are drawn does not affect the results."""

from __future__ import annotations

import pytest
import torch

import rooftile as rt
from rooftile.exact.backends.hopper import DIMS
from rooftile.exact.backends.hopper.flash_fwd.launch_forward import tile_of
from rooftile.exact.masks import CAUSAL, FULL, Chunk, Mask, Prefix, Window
from rooftile.exact.spec import Sizes, Spec

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

MASKS = [FULL, CAUSAL, Window(100, 7), CAUSAL & Window(300), Prefix(70) & Window(500), Chunk(90)]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def assert_as_defined(o: torch.Tensor, q, k, v, mask: Mask, **options) -> None:
    """At most twice as wrong as plain attention in the same dtype, plus rounding."""
    exact = rt.attention(*(x.double() for x in (q, k, v)), mask, backend="eager", **options)
    plain = (rt.attention(q, k, v, mask, backend="eager", **options).double() - exact).abs().max()
    assert (o.double() - exact).abs().max() <= 2 * plain + 8 * torch.finfo(q.dtype).eps


def poison() -> None:
    """Leaves NaN in the memory that the next calls are given."""
    del_me = torch.full((2**27,), float("nan"), device="cuda")
    del del_me


@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("T", "S"), [(1, 300), (257, 257), (1153, 640), (640, 1153), (2049, 2049)])
def test_ragged_lengths_write_every_row_and_no_other(dim: int, dim_v: int, mask: Mask, T: int, S: int) -> None:
    q, k, v = randn(2, T, 4, dim), randn(2, S, 2, dim), randn(2, S, 2, dim_v)
    poison()
    o, lse = rt.attention_with_lse(q, k, v, mask, backend="hopper")
    assert o.isfinite().all()
    assert not lse.isnan().any()
    assert_as_defined(o, q, k, v, mask)


@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
def test_repeated_runs_are_bit_equal(dim: int, dim_v: int, mask: Mask) -> None:
    """The tiles go to other programs each time."""
    for B, T in ((16, 512), (4, 1000), (1, 8192)):
        q, k, v = (randn(B, T, 4, d) for d in (dim, dim, dim_v))
        first, first_lse = rt.attention_with_lse(q, k, v, mask, backend="hopper")
        for _ in range(20):
            o, lse = rt.attention_with_lse(q, k, v, mask, backend="hopper")
            assert torch.equal(o, first)
            assert torch.equal(lse, first_lse)


@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rise", [0.5, 4.0, 9.0])
def test_scores_that_rise_along_the_walk(dim: int, dim_v: int, mask: Mask, dtype: torch.dtype, rise: float) -> None:
    """Keys are walked from the last to the first; each 64 have scores above all before them, in some rows more than in others."""
    q, k, v = (randn(2, 1100, 2, d, dtype=dtype) for d in (dim, dim, dim_v))
    q[..., 0] = dim**0.5 * (torch.arange(1100, device="cuda") % 7 / 3)[None, :, None]
    k[..., 0] = rise * (torch.arange(1100, 0, -1, device="cuda") / 64)[None, :, None]
    o, lse = rt.attention_with_lse(q, k, v, mask, backend="hopper")
    assert_as_defined(o, q, k, v, mask)
    due = rt.attention_with_lse(*(x.double() for x in (q, k, v)), mask, backend="eager")[1]
    torch.testing.assert_close(lse.double(), due, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("T", "Hk", "packed"), [(1, 2, False), (1, 1, True), (5, 1, False), (37, 2, False), (37, 4, True)])
def test_heads_of_a_group_share_tiles(dim: int, dim_v: int, mask: Mask, T: int, Hk: int, packed: bool) -> None:
    B, H, S = 50, 16, 333
    q, k, v = randn(B, T, H, dim), randn(B, S, Hk, dim), randn(B, S, Hk, dim_v)
    options = {"softcap": 30.0, "sinks": torch.randn(H, device="cuda")}
    layout = "packed" if packed else "dense"
    spec = Spec(dtype=q.dtype, dim=dim, dim_v=dim_v, mask=mask, scale=1.0, group=H // Hk, layout=layout, device="sm90")
    sizes = Sizes(B=B, T=B * T if packed else T, S=S, H=H, Hk=Hk)
    assert tile_of(spec, sizes, q.device).HEADS_PER_TILE > 1
    # behind the mask of some: those tiles are walked again with care
    v[3, S - 2] = float("nan")
    poison()
    if packed:
        cu = [torch.arange(0, B * n + 1, n, dtype=torch.int32, device="cuda") for n in (T, S)]
        flat = (x.flatten(0, 1) for x in (q, k, v))
        o, lse = rt.attention_packed_with_lse(*flat, *cu, mask, backend="hopper", **options)
        o, lse = o.unflatten(0, (B, T)), lse.unflatten(1, (B, T)).transpose(0, 1)
    else:
        o, lse = rt.attention_with_lse(q, k, v, mask, backend="hopper", **options)
    due, due_lse = rt.attention_with_lse(*(x.double() for x in (q, k, v)), mask, backend="eager", **options)
    assert torch.equal(o.isnan(), due.isnan())
    torch.testing.assert_close(o.double(), due, rtol=0.02, atol=0.02, equal_nan=True)
    torch.testing.assert_close(lse.double(), due_lse, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_a_nan_stays_in_its_row(dim: int, dim_v: int) -> None:
    """Under a mask the rows beside it are computed once more, in another order."""
    q, k, v = (randn(1, 2100, 2, d) for d in (dim, dim, dim_v))
    due = rt.attention(q, k, v, backend="hopper")
    q[:, 1000, 1, 3] = float("nan")
    o = rt.attention(q, k, v, backend="hopper")
    assert o[:, 1000, 1].isnan().all()
    o[:, 1000, 1] = due[:, 1000, 1]
    assert torch.equal(o, due)


@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_behind_the_mask_do_not_leak(dim: int, dim_v: int, bad: float) -> None:
    q, k, v = (randn(1, 400, 2, d) for d in (dim, dim, dim_v))
    due = rt.attention(q, k, v, CAUSAL, backend="hopper")
    k[:, 301:] = bad
    v[:, 301:] = bad
    o = rt.attention(q, k, v, CAUSAL, backend="hopper")
    torch.testing.assert_close(o[:, :301], due[:, :301], rtol=0.02, atol=0.02)
    assert o[:, 301:].isnan().all()


def test_values_next_door_do_not_leak() -> None:
    q, k, v = (randn(300, 2, 128) for _ in range(3))
    cu = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    due = rt.attention_packed(q, k, v, cu, cu, backend="hopper")
    v[100:] = float("nan")
    o = rt.attention_packed(q, k, v, cu, cu, backend="hopper")
    torch.testing.assert_close(o[:100], due[:100], rtol=0.02, atol=0.02)
    assert o[100:].isnan().all()


def test_streams_side_by_side_draw_their_own_tiles() -> None:
    inputs = [[randn(2, 3000, 8, 128) for _ in range(3)] for _ in range(2)]
    due = [rt.attention(*x, CAUSAL, backend="hopper") for x in inputs]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(10):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[n].append(rt.attention(*inputs[n], CAUSAL, backend="hopper"))
    torch.cuda.synchronize()
    for n in range(2):
        for o in found[n]:
            assert torch.equal(o, due[n])


def test_a_graph_replays_beside_plain_calls() -> None:
    q, k, v = (randn(2, 3000, 8, 64) for _ in range(3))
    due = rt.attention(q, k, v, CAUSAL, backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rt.attention(q, k, v, CAUSAL, backend="hopper")
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        captured.zero_()
        with torch.cuda.stream(other):
            beside = rt.attention(q, k, v, CAUSAL, backend="hopper")
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, due)
        assert torch.equal(beside, due)


def test_what_the_copy_engine_cannot_read_is_copied() -> None:
    q, k, v = (randn(2, 130, 2, 64) for _ in range(3))
    due = rt.attention(q, k, v, CAUSAL, backend="hopper")
    misaligned = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape).copy_(q)
    odd_stride = torch.zeros(2, 130, 2, 65, device="cuda", dtype=k.dtype)[..., :64].copy_(k)
    assert torch.equal(rt.attention(misaligned, odd_stride, v, CAUSAL, backend="hopper"), due)
    every_other = torch.zeros(2, 130, 2, 128, device="cuda", dtype=v.dtype)[..., ::2].copy_(v)
    assert torch.equal(rt.attention(q, k, every_other, CAUSAL, backend="hopper"), due)
    one_head = k[:, :, :1]
    expanded = one_head.expand(2, 130, 2, 64)
    assert torch.equal(
        rt.attention(q, expanded, v, CAUSAL, backend="hopper"), rt.attention(q, expanded.clone(), v, CAUSAL, backend="hopper")
    )


def test_elements_beyond_2_31() -> None:
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    B, T, H, D = 2, 300, 2, 64
    buffer = randn(2**31 + 2**20)
    far = 2**31 - T * H * D
    q = torch.as_strided(buffer, (B, T, H, D), (far + T * D, D, T * D, 1))
    k, v = randn(B, T, H, D), randn(B, T, H, D)
    due = rt.attention(q.clone(), k, v, CAUSAL, backend="hopper")
    assert torch.equal(rt.attention(q, k, v, CAUSAL, backend="hopper"), due)
    # the walk with care reads by itself
    v[:, 200:] = float("nan")
    due = rt.attention(q.clone(), k, v, CAUSAL, backend="hopper")
    torch.testing.assert_close(rt.attention(q, k, v, CAUSAL, backend="hopper"), due, rtol=0, atol=0, equal_nan=True)
