"""F.scaled_dot_product_attention on CUDA runs on Rooftile, forward and backward, eager, compiled and captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel

import rooftile
from rooftile.integrations.torch_sdpa import route

pytestmark = pytest.mark.gpu

FLASH = torch.ops.aten._scaled_dot_product_flash_attention
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """How often Rooftile ran, and how often the stock kernel was left to run."""
    counted: Counter = Counter()
    for name in ("forward", "backward"):
        inner = getattr(route, name)

        def count(*args, inner=inner, name=name):
            found = inner(*args)
            counted[name if found is not None else "stock"] += 1
            return found

        monkeypatch.setattr(route, name, count)
    yield counted
    rooftile.disable()
    torch._dynamo.reset()


def tensors(T=200, S=None, H=4, Hk=None, D=64, dtype=torch.bfloat16):
    shapes = ((2, H, T, D), (2, Hk or H, S or T, D), (2, Hk or H, S or T, D))
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]


def sdpa_and_gradients(q, k, v, **options):
    o = F.scaled_dot_product_attention(q, k, v, **options)
    do = torch.linspace(-1, 1, o.numel(), device="cuda").reshape(o.shape).to(o.dtype)
    return [o, *torch.autograd.grad(o, (q, k, v), do)]


def exactly(q, k, v, **options):
    """In fp64, by PyTorch's plain attention; and how far that is in the inputs' own dtype."""
    with sdpa_kernel(SDPBackend.MATH):
        exact = sdpa_and_gradients(*(x.detach().double().requires_grad_() for x in (q, k, v)), **options)
        plain = sdpa_and_gradients(q, k, v, **options)
    return exact, [(p.double() - e).abs().max().item() for p, e in zip(plain, exact, strict=True)]


def assert_close(found, exact, plain_errors):
    """At most twice as wrong as plain attention in the same dtype, plus rounding."""
    for x, e, plain in zip(found, exact, plain_errors, strict=True):
        ulp = torch.finfo(x.dtype).eps * e.abs().max().item()
        assert (x.double() - e).abs().max().item() <= 2 * plain + 8 * ulp


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {}),
        ({}, {"is_causal": True}),
        ({"T": 77, "S": 200}, {}),
        ({"D": 128}, {"is_causal": True, "scale": 0.05}),
        ({"D": 80}, {"is_causal": True}),
        ({"H": 6, "Hk": 2}, {"is_causal": True, "enable_gqa": True}),
    ],
    ids=str,
)
def test_sdpa_runs_on_rooftile(ran, sizes, options, dtype):
    inputs = tensors(**sizes, dtype=dtype)
    exact, plain = exactly(*inputs, **options)
    rooftile.enable()
    found = sdpa_and_gradients(*inputs, **options)
    assert ran == {"forward": 1, "backward": 1}
    assert_close(found, exact, plain)


def layouts():
    x = torch.randn(2, 200, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    return {
        "contiguous": [y.detach() for y in tensors()],
        "transposed": [y.detach().transpose(1, 2).contiguous().transpose(1, 2) for y in tensors()],
        "qkv in one": [x[:, :, n].transpose(1, 2) for n in range(3)],
    }


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "qkv in one"])
def test_outputs_are_laid_out_as_the_stock_kernel_does(ran, layout):
    """Shapes, strides and dtypes of all nine outputs and three gradients; Inductor asserts them."""
    q, k, v = layouts()[layout]

    def described():
        found = FLASH(q, k, v, 0.0, True, False)
        o, lse, cu_q, cu_k, max_q, max_k, state, offset, _ = found
        grads = FLASH_BACKWARD(torch.ones_like(o), q, k, v, o, lse, cu_q, cu_k, max_q, max_k, 0.0, True, state, offset)
        return [(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in (*found[:8], *grads)]

    due = described()
    assert not ran
    rooftile.enable()
    assert described() == due
    assert ran == {"forward": 1, "backward": 1}


def test_dropout_stays_with_the_stock_kernel(ran):
    inputs = tensors()
    rooftile.enable()
    torch.manual_seed(3)
    found = sdpa_and_gradients(*inputs, dropout_p=0.4, is_causal=True)
    assert "forward" not in ran
    assert "backward" not in ran
    rooftile.disable()
    # whichever of PyTorch's kernels that is
    torch.manual_seed(3)
    due = sdpa_and_gradients(*inputs, dropout_p=0.4, is_causal=True)
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x, y, atol=1e-2, rtol=1e-2)


def test_a_mask_goes_past_it(ran):
    q, k, v = tensors()
    rooftile.enable()
    F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(200, 200, device="cuda", dtype=torch.bool).tril())
    assert not ran


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled(ran):
    inputs = tensors()
    exact, plain = exactly(*inputs, is_causal=True)
    rooftile.enable()
    compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True)
    o = compiled(*inputs, is_causal=True)
    do = torch.linspace(-1, 1, o.numel(), device="cuda").reshape(o.shape).to(o.dtype)
    found = [o, *torch.autograd.grad(o, inputs, do)]
    assert ran == {"forward": 1, "backward": 1}
    assert_close(found, exact, plain)


def test_captured_in_a_cuda_graph(ran):
    q, k, v = (x.detach() for x in tensors())
    rooftile.enable()
    due = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    o.zero_()
    graph.replay()
    assert ran == {"forward": 2}
    assert torch.equal(o, due)


def test_multihead_attention(ran):
    layer = torch.nn.MultiheadAttention(256, 4, batch_first=True, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 100, 256, device="cuda", dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.MATH):
        due = layer(x, x, x, need_weights=False)[0]
    rooftile.enable()
    found = layer(x, x, x, need_weights=False)[0]
    assert ran == {"forward": 1}
    torch.testing.assert_close(found, due, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("causal", "left", "right", "mask"),
    [
        (False, -1, -1, rooftile.FULL),
        (True, -1, -1, rooftile.CAUSAL),
        (True, 40, 0, rooftile.CAUSAL & rooftile.Window(40)),
    ],
    ids=["full", "causal", "window"],
)
def test_packed_sequences(ran, causal, left, right, mask):
    """torch.nn.attention.varlen goes through these operators."""
    cu = torch.tensor([0, 100, 130, 400], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(400, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    due = rooftile.attention_packed(*(x.double() for x in (q, k, v)), cu, cu, mask, backend="eager")
    do = torch.randn_like(q)
    grads_due = torch.autograd.grad(due, (q, k, v), do.double())
    rooftile.enable()
    windows = {"window_size_left": left, "window_size_right": right}
    operands = (cu, cu, 270, 270, 0.0, causal)
    with torch.no_grad():
        o, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(q, k, v, *operands, False, **windows)
        grads = torch.ops.aten._flash_attention_backward(do, q, k, v, o, lse, *operands, state, unused, **windows)
    assert ran == {"forward": 1, "backward": 1}
    assert lse.shape == (4, 400)
    for x, y in zip((o, *grads), (due, *grads_due), strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=3e-2, rtol=3e-2)


def kernels(call) -> list[str]:
    """Returns the names of the GPU kernels of a call, after one call that may set up other things."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


REFUSED = {
    "attn_mask": ({}, lambda: {"attn_mask": torch.randn(1, 1, 200, 200, device="cuda", dtype=torch.bfloat16)}),
    "boolean attn_mask": ({}, lambda: {"attn_mask": torch.ones(200, 200, device="cuda", dtype=torch.bool).tril(3)}),
    "dropout": ({}, lambda: {"dropout_p": 0.3}),
    "more queries than keys": ({"T": 300, "S": 200}, lambda: {"is_causal": True}),
    "fp32": ({"dtype": torch.float32}, dict),
    "a wide head": ({"D": 320}, dict),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_what_is_refused_runs_the_same_kernels_as_before(ran, name, compiled):
    """Forward and backward; on Hopper that is cuDNN, wherever PyTorch picks it."""
    sizes, options = REFUSED[name]
    inputs, options = tensors(**sizes), options()

    def run():
        function = torch.compile(sdpa_and_gradients, dynamic=False) if compiled else sdpa_and_gradients
        return lambda: function(*inputs, **options)

    before = kernels(run())
    torch._dynamo.reset()
    rooftile.enable()
    assert kernels(run()) == before
    assert "forward" not in ran
    torch._dynamo.reset()
    rooftile.disable()
    assert kernels(run()) == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("picked", ["CUDNN_ATTENTION", "FLASH_ATTENTION"])
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_an_accepted_call_is_right_whichever_kernel_pytorch_picked(ran, picked, compiled, gradients, is_causal):
    inputs = tensors(H=6, Hk=2, D=128)
    options = {"is_causal": is_causal, "enable_gqa": True}
    exact, plain = exactly(*inputs, **options)

    def answer(*inputs):
        with torch.set_grad_enabled(gradients):
            return F.scaled_dot_product_attention(*inputs, **options)

    with sdpa_kernel(getattr(SDPBackend, picked)):
        try:
            answer(*inputs)
        except RuntimeError as error:
            pytest.skip(f"PyTorch's {picked} does not run here: {error}")
        rooftile.enable()
        o = (torch.compile(answer) if compiled else answer)(*inputs)
        found = [o]
        if gradients:
            do = torch.linspace(-1, 1, o.numel(), device="cuda").reshape(o.shape).to(o.dtype)
            found += torch.autograd.grad(o, inputs, do)
    assert ran == ({"forward": 1, "backward": 1} if gradients else {"forward": 1})
    assert_close(found, exact[: len(found)], plain[: len(found)])


@pytest.mark.sm90
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "qkv in one"])
def test_outputs_are_laid_out_as_cudnns(ran, layout):
    q, k, v = layouts()[layout]

    def described():
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        o, lse, *offsets, seed, offset, _ = cudnn(q, k, v, None, True, 0.0, True)
        operands = (q, k, v, o, lse, seed, offset, None, *offsets, 0.0, True)
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(torch.ones_like(o), *operands)
        found = (o, lse, *offsets, seed, offset, *grads)
        return [(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in found]

    due = described()
    assert not ran
    rooftile.enable()
    assert described() == due
    assert ran == {"forward": 1, "backward": 1}


@pytest.mark.sm90
def test_values_of_another_width(ran):
    """Only cuDNN's operator takes them."""
    q, k, v = (torch.randn(2, 4, 200, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for D in (192, 192, 128))
    exact, plain = exactly(q, k, v, is_causal=True)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        try:
            sdpa_and_gradients(q, k, v, is_causal=True)
        except RuntimeError as error:
            pytest.skip(f"this cuDNN does not run it: {error}")
        rooftile.enable()
        found = sdpa_and_gradients(q, k, v, is_causal=True)
    assert ran == {"forward": 1, "backward": 1}
    assert_close(found, exact, plain)


def test_disabling_restores_the_stock_kernel_and_leaves_the_choice_alone(ran):
    q, k, v = tensors()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    rooftile.enable()
    assert current_flash_attention_impl() == "rooftile"
    assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
    rooftile.disable()
    assert current_flash_attention_impl() is None
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if cudnn else (SDPBackend.FLASH_ATTENTION,):
        with sdpa_kernel([kernel, SDPBackend.MATH]):
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert not ran
