"""Properties that need a GPU: offsets beyond 2^31, captured graphs, no synchronisation on the hot path, atomics."""

from __future__ import annotations

import pytest
import torch

import rooftile as rt
from rooftile.exact.cases import CASES
from rooftile.exact.masks import CAUSAL, FULL, Window

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
GIB = 2**30


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, **options) -> torch.Tensor:
    return torch.randn(shape, device=CUDA, dtype=dtype, **options)


def needs(gib: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free GPU memory; has {free / GIB:.0f}")


def test_the_fast_backend_runs_here() -> None:
    q = randn(1, 256, 4, 64, requires_grad=True)
    fast = "hopper" if torch.cuda.get_device_capability() == (9, 0) else "triton"
    assert f"{fast:8} runs it" in rt.explain(q, q, q, CAUSAL & Window(64))


def test_positions_beyond_2_31_elements() -> None:
    """One long sequence; the last rows see a window of the last keys, so a short problem has the same answer."""
    needs(60)
    H, D, window, rows = 64, 128, 100, 64
    T = 2**31 // (H * D) + 300
    q, k, v = (randn(1, T, H, D).requires_grad_() for _ in range(3))
    mask = CAUSAL & Window(window)
    o, lse = rt.attention_with_lse(q, k, v, mask, backend="triton")
    do = torch.zeros_like(o)
    do[:, -rows:] = randn(1, rows, H, D)
    grads = torch.autograd.grad(o, (q, k, v), do)

    near = [x.detach()[:, -(rows + window) :].double().requires_grad_() for x in (q, k, v)]
    due, due_lse = rt.attention_with_lse(near[0][:, -rows:], *near[1:], mask, backend="eager")
    due_grads = torch.autograd.grad(due, near, do[:, -rows:].double())
    torch.testing.assert_close(o[:, -rows:].double(), due, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse[..., -rows:].double(), due_lse, rtol=1e-3, atol=1e-3)
    for grad, due in zip(grads, due_grads, strict=True):
        torch.testing.assert_close(grad[:, -(rows + window) :].double(), due, rtol=3e-2, atol=3e-2)
        assert (grad[:, : T - rows - window - 128] == 0).all()


def test_heads_and_batches_beyond_2_31_elements() -> None:
    """A view with strides so large that the last head of the last sequence starts beyond 2^31 elements."""
    needs(20)
    B, T, H, D = 2, 64, 2, 64
    buffer = randn(2**31 + 2**20)
    far = 2**31 - T * H * D
    q = torch.as_strided(buffer, (B, T, H, D), (far + T * D, D, T * D, 1))
    k, v = randn(B, T, H, D), randn(B, T, H, D)
    torch.testing.assert_close(
        rt.attention(q, k, v, backend="triton"), rt.attention(q.clone(), k, v, backend="triton"), rtol=0, atol=0
    )


@pytest.mark.parametrize("name", ["causal", "everything", "packed-everything", "bf16"])
def test_a_captured_graph_replays_on_new_data(name: str) -> None:
    case = CASES[name]
    (q, k, v, *cu), mask, options = case.inputs(CUDA, requires_grad=True)
    if "seed" in options:
        options["seed"] = torch.tensor([options["seed"]], device=CUDA)
    attend = rt.attention_packed if cu else rt.attention

    def step():
        o = attend(q, k, v, *cu, mask, **options)
        return (o, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o)))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # the same stream throughout: autograd adds up where a leaf's gradient was first asked for
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    with torch.no_grad():
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
    if "seed" in options:
        options["seed"].add_(1)
    graph.replay()
    found = [x.clone() for x in captured]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again = step()
    torch.cuda.current_stream().wait_stream(stream)
    for x, y in zip(found, again, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", ["causal", "everything", "packed-everything"])
def test_the_hot_path_does_not_wait_for_the_gpu(name: str) -> None:
    case = CASES[name]
    (q, k, v, *cu), mask, options = case.inputs(CUDA, requires_grad=True)
    attend = rt.attention_packed if cu else rt.attention
    attend(q, k, v, *cu, mask, **options).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        o = attend(q, k, v, *cu, mask, **options)
        grads = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert o.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)


def test_offsets_on_the_gpu_are_trusted_unless_asked() -> None:
    q = randn(10, 2, 64)
    wrong = torch.tensor([0, 4, 9], device=CUDA)
    with pytest.raises(rt.InvalidInput, match="cu_q ends at 9; must end at 10, the number of queries"):
        rt.attention_packed(q, q, q, wrong, wrong, validate=True)
    on_host = wrong.cpu()
    with pytest.raises(rt.InvalidInput, match="cu_q ends at 9"):
        rt.attention_packed(q, q, q, on_host, on_host)


def test_inputs_on_two_devices_are_refused() -> None:
    q = randn(1, 8, 2, 64)
    with pytest.raises(rt.InvalidInput, match="k is on cpu; q is on cuda:0, and all inputs must be on one device"):
        rt.attention(q, q.cpu(), q)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, CAUSAL & Window(300)], ids=str)
def test_deterministic_gradients_are_bit_equal_at_size(mask: rt.Mask) -> None:
    """Enough programs that atomic adds would land in another order."""
    q, k, v = (randn(4, 2048, h, 128).requires_grad_() for h in (16, 4, 4))
    do = randn(4, 2048, 16, 128)
    runs = []
    for _ in range(4):
        o = rt.attention(q, k, v, mask, deterministic=True, backend="triton")
        runs.append((o.detach(), *torch.autograd.grad(o, (q, k, v), do)))
    for other in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], other, strict=True))


def test_forward_and_backward_take_no_memory_of_t_by_s() -> None:
    T, H, D = 32768, 1, 64
    q, k, v = (randn(1, T, H, D).requires_grad_() for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rt.attention(q, k, v, CAUSAL, backend="triton").sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 40 * T * H * D * 4 < T * T * 2


def test_every_stream_is_the_callers() -> None:
    """A kernel launched on the wrong stream would read inputs that are not there yet."""
    q = randn(2, 4096, 8, 64)
    due = rt.attention(q * 3, q, q, CAUSAL)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        o = rt.attention(q * 3, q, q, CAUSAL)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(o, due)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_repeated_packed_call_reads_its_own_offsets(stride: int, with_sinks: bool) -> None:
    """Offsets may be strided, and are other ones in each call of a signature; gradients follow them."""
    sinks = torch.randn(4, device=CUDA, requires_grad=True) if with_sinks else None
    for ends in ([0, 30, 200], [0, 130, 200], [0, 0, 200], [0, 199, 200]):
        spread = torch.zeros(len(ends) * stride, dtype=torch.int32, device=CUDA)
        spread[::stride] = torch.tensor(ends, dtype=torch.int32)
        cu = spread[::stride]
        tensors = [randn(200, heads, 64).requires_grad_() for heads in (4, 2, 2)]
        o = rt.attention_packed(*tensors, cu, cu, CAUSAL, sinks=sinks)
        leaves = [*tensors, *([] if sinks is None else [sinks])]
        do = torch.randn_like(o)
        found = [o, *torch.autograd.grad(o, leaves, do)]
        wide = [x.detach().double().requires_grad_() for x in leaves]
        due = rt.attention_packed(*wide[:3], cu, cu, CAUSAL, backend="eager", sinks=wide[3] if with_sinks else None)
        for x, y in zip(found, [due, *torch.autograd.grad(due, wide, do.double())], strict=True):
            assert (x.double() - y).abs().max() <= 0.02 * max(1.0, y.abs().max().item())


def test_saved_tensors_may_come_back_with_other_strides() -> None:
    """A hook may keep what the backward needs elsewhere; a prepared backward must not read it by the old strides."""
    tensors = [randn(2, 4, 150, 64).transpose(1, 2).requires_grad_() for _ in range(3)]
    grads = []
    for hooks in (False, False, True):
        pack, unpack = (lambda x: x.contiguous().cpu(), lambda x: x.to(CUDA)) if hooks else (lambda x: x, lambda x: x)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            o = rt.attention(*tensors, CAUSAL, deterministic=True)
        grads.append(torch.autograd.grad(o, tensors, torch.ones_like(o)))
    for x, y in zip(grads[0], grads[2], strict=True):
        assert torch.equal(x, y)
    for x, y in zip(grads[0], grads[1], strict=True):
        assert torch.equal(x, y)


def test_a_repeated_call_under_autocast_and_inference_mode() -> None:
    q, k, v = (randn(2, 70, 4, 64) for _ in range(3))
    due = rt.attention(q, k, v, CAUSAL)
    wide = [x.float() for x in (q, k, v)]
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.equal(rt.attention(q, k, v, CAUSAL), due)
            assert torch.equal(rt.attention(*wide, CAUSAL), due)
        with torch.inference_mode():
            assert torch.equal(rt.attention(q, k, v, CAUSAL), due)
        with torch.autocast("cuda", dtype=torch.float16):
            assert rt.attention(q, k, v, CAUSAL).dtype == torch.float16
