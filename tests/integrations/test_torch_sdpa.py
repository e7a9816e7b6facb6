"""F.scaled_dot_product_attention, and modules built on it, run on Rooftile with unchanged results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

import rooftile
from rooftile import InvalidInput, Unsupported
from rooftile.integrations import torch_sdpa
from rooftile.integrations.torch_sdpa import dense, route, varlen

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def tensors(T=33, S=None, H=4, Hk=None, D=16, dtype=torch.float32):
    shapes = ((2, H, T, D), (2, Hk or H, S or T, D), (2, Hk or H, S or T, D))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def sdpa_and_gradients(q, k, v, **options):
    o = F.scaled_dot_product_attention(q, k, v, **options)
    do = torch.linspace(-1, 1, o.numel(), dtype=torch.float32).reshape(o.shape).to(o.dtype)
    return [o, *torch.autograd.grad(o, (q, k, v), do)]


def assert_same(found, due, atol=2e-5):
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x, y, atol=atol, rtol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {}),
        ({}, {"is_causal": True}),
        ({"T": 20, "S": 45}, {}),
        ({"T": 45, "S": 20}, {}),
        ({"T": 20, "S": 45}, {"is_causal": True}),
        ({"H": 6, "Hk": 2}, {"is_causal": True, "enable_gqa": True}),
        ({"T": 20, "S": 45, "Hk": 1}, {"is_causal": True, "enable_gqa": True}),
        ({}, {"scale": 0.3, "is_causal": True}),
        ({"T": 1, "S": 17}, {}),
    ],
    ids=str,
)
def test_sdpa_runs_on_rooftile_and_gives_the_same(calls, sizes, options):
    inputs = tensors(**sizes)
    with sdpa_kernel(SDPBackend.MATH):
        due = sdpa_and_gradients(*inputs, **options)
    rooftile.enable()
    found = sdpa_and_gradients(*inputs, **options)
    assert calls == {"forward": 1, "backward": 1}
    assert_same(found, due)


def test_bf16_keeps_its_dtype(calls):
    inputs = tensors(dtype=torch.bfloat16)
    due = sdpa_and_gradients(*inputs, is_causal=True)
    rooftile.enable()
    found = sdpa_and_gradients(*inputs, is_causal=True)
    assert calls == {"forward": 1, "backward": 1}
    assert all(x.dtype == torch.bfloat16 for x in found)
    assert_same([x.float() for x in found], [x.float() for x in due], atol=0.05)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"T": 45, "S": 20}, {"is_causal": True}),
        ({}, {"attn_mask": torch.ones(33, 33, dtype=torch.bool).tril(3)}),
    ],
    ids=("causal, more queries than keys", "attn_mask"),
)
def test_what_rooftile_leaves_to_the_stock_kernel(calls, sizes, options):
    inputs = tensors(**sizes)
    with sdpa_kernel(SDPBackend.MATH):
        due = sdpa_and_gradients(*inputs, **options)
    rooftile.enable()
    assert_same(sdpa_and_gradients(*inputs, **options), due)
    assert not calls


def test_a_backend_without_gain_is_left_to_the_stock_kernel(calls):
    rooftile.enable(backend="sdpa")
    q, k, v = tensors()
    due = FLASH(q, k, v)[0]
    assert torch.equal(F.scaled_dot_product_attention(q, k, v), due)
    assert not calls


def test_dropout_stays_with_the_stock_path(calls):
    q, k, v = tensors()
    torch.manual_seed(3)
    due = sdpa_and_gradients(q, k, v, dropout_p=0.4)
    rooftile.enable()
    torch.manual_seed(3)
    assert_same(sdpa_and_gradients(q, k, v, dropout_p=0.4), due)
    # on the CPU PyTorch does not call the hook
    assert dense.cpu_forward(q, k, v, 0.4) is None
    assert dense.flash_forward(q, k, v, 0.4) is None
    assert not calls


@pytest.mark.parametrize("sizes", [{"T": 20, "S": 45}, {"T": 45, "S": 20}], ids=str)
def test_on_cuda_causal_attention_is_square(calls, sizes):
    """SDPA never uses the operator's own alignment: the stock kernel keeps such calls."""
    q, k, v = (x.detach() for x in tensors(**sizes))
    assert dense.flash_forward(q, k, v, 0.0, True) is None
    assert dense.flash_backward(q, q, k, v, q, q, None, None, 20, 20, 0.0, True, None, None) is None
    assert dense.flash_forward(q, k, v, 0.0, False, True) is None
    assert dense.flash_forward(q, k, v) is not None


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "qkv in one", "expanded"])
def test_what_cuda_would_get(calls, layout):
    """Compares the results of the CUDA operators, on CPU tensors, with their fakes."""
    q, k, v = layouts()[layout]
    flash, flash_backward = (getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{end}") for end in ("", "_backward"))

    def described(*outputs):
        return [(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in outputs]

    fakes = [torch.empty_strided(x.shape, x.stride(), device="meta") for x in (q, k, v)]
    due = flash(*fakes, 0.0, True, False)
    rest = (None, None, 24, 24, 0.0, True)
    due_grads = flash_backward(torch.empty_like(due[0]), *fakes, due[0], due[1], *rest, due[6], due[7])

    found = dense.flash_forward(q, k, v, 0.0, True, scale=0.2)
    do = torch.randn(q.shape)
    grads = dense.flash_backward(do, q, k, v, *found[:2], *rest, *found[6:8], scale=0.2)
    assert described(*found, *grads) == described(*due, *due_grads)
    assert calls == {"forward": 1, "backward": 1}
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        o = F.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.2)
    assert_same([found[0], *grads], [o, *torch.autograd.grad(o, leaves, do)])


def layouts():
    x = torch.randn(2, 24, 3, 4, 16)
    return {
        "contiguous": tuple(torch.randn(2, 4, 24, 16) for _ in range(3)),
        "transposed": tuple(torch.randn(2, 24, 4, 16).transpose(1, 2) for _ in range(3)),
        "qkv in one": tuple(x[:, :, n].transpose(1, 2) for n in range(3)),
        "expanded": tuple(torch.randn(1, 4, 24, 16).expand(2, -1, -1, -1) for _ in range(3)),
    }


@pytest.mark.parametrize("layout", layouts())
def test_strides_are_those_of_the_fake(calls, layout):
    """Inductor asserts strides; an eager run does not check them."""
    q, k, v = layouts()[layout]
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        o, lse = FLASH(*fakes, is_causal=True)
        grads = FLASH_BACKWARD(torch.empty_like(o), *fakes, o, lse, 0.0, True)
        due = [(x.shape, x.stride(), x.dtype) for x in (o, lse, *grads)]
    rooftile.enable()
    o, lse = FLASH(q, k, v, is_causal=True)
    grads = FLASH_BACKWARD(torch.ones_like(o), q, k, v, o, lse, 0.0, True)
    assert calls == {"forward": 1, "backward": 1}
    assert [(x.shape, x.stride(), x.dtype) for x in (o, lse, *grads)] == due


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_graphs_call_it(calls):
    inputs = tensors()
    due = sdpa_and_gradients(*inputs, is_causal=True)
    rooftile.enable()

    @torch.compile(fullgraph=True)
    def doubled(q, k, v):
        return 2 * F.scaled_dot_product_attention(q, k, v, is_causal=True)

    o = doubled(*inputs)
    do = torch.linspace(-1, 1, o.numel()).reshape(o.shape)
    found = [o / 2, *(g / 2 for g in torch.autograd.grad(o, inputs, do))]
    assert calls == {"forward": 1, "backward": 1}
    assert_same(found, due)


def test_multihead_attention_runs_on_it(calls):
    layer = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    x = torch.randn(2, 10, 64, requires_grad=True)
    due = layer(x, x, x, need_weights=False)[0]
    due = [due, *torch.autograd.grad(due.sum(), [x, *layer.parameters()])]
    rooftile.enable()
    found = layer(x, x, x, need_weights=False)[0]
    found = [found, *torch.autograd.grad(found.sum(), [x, *layer.parameters()])]
    assert calls == {"forward": 1, "backward": 1}
    assert_same(found, due, atol=1e-4)


def test_the_math_context_goes_round_it(calls):
    rooftile.enable()
    q, k, v = tensors()
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, k, v)
    assert not calls
    F.scaled_dot_product_attention(q, k, v)
    assert calls["forward"] == 1


def test_enabling_and_disabling_in_any_order(calls):
    q, k, v = tensors()
    cudnn_was = torch.backends.cuda.cudnn_sdp_enabled()
    rooftile.disable()
    for cudnn in (True, False, True):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        rooftile.enable()
        rooftile.enable()
        assert current_flash_attention_impl() == "rooftile"
        assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
        F.scaled_dot_product_attention(q, k, v)
        assert calls.pop("forward") == 1
        rooftile.disable()
        rooftile.disable()
        F.scaled_dot_product_attention(q, k, v)
        assert current_flash_attention_impl() is None
        assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
        assert not calls
    torch.backends.cuda.enable_cudnn_sdp(cudnn_was)


def test_another_implementation_comes_back(calls):
    register_flash_attention_impl("another", register_fn=lambda: torch_sdpa._Handle(None))
    activate_flash_attention_impl("another")
    rooftile.enable()
    assert current_flash_attention_impl() == "rooftile"
    rooftile.disable()
    assert current_flash_attention_impl() == "another"
    restore_flash_attention_impl()


def test_who_runs_afterwards_wins(calls):
    """disable() takes away only what enable() put there."""
    register_flash_attention_impl("later", register_fn=lambda: torch_sdpa._Handle(None))
    rooftile.enable()
    activate_flash_attention_impl("later")
    rooftile.disable()
    assert current_flash_attention_impl() == "later"
    restore_flash_attention_impl()


@pytest.mark.parametrize("name", ["fast", "eager"])
def test_a_backend_that_sdpa_cannot_run_on(calls, name):
    with pytest.raises(InvalidInput, match=f"backend is '{name}'; has .*tiled.*None for the fastest"):
        rooftile.enable(backend=name)
    assert current_flash_attention_impl() is None


def test_a_pytorch_without_the_hook_says_so(calls, monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(Unsupported, match=r"use torch >= 2\.11"):
        rooftile.enable()


def packed(*lengths, Hk=2, D=16):
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    total = int(cu[-1])
    return torch.randn(total, 4, D), torch.randn(total, Hk, D), torch.randn(total, Hk, D), cu


@pytest.mark.parametrize(("causal", "left", "right"), [(False, None, None), (True, -1, -1), (True, 3, None), (False, 3, 2)])
def test_the_varlen_operators(monkeypatch, causal, left, right):
    """These are CUDA operators; their implementation is tested here on CPU tensors with the definition."""
    monkeypatch.setattr(route, "NO_GAIN", ())
    route.choose.cache_clear()
    q, k, v, cu = packed(5, 0, 30)
    mask = rooftile.Window(*(None if n in (None, -1) else n for n in (left, right)))
    mask = mask & rooftile.CAUSAL if causal else mask
    due, lse_due = rooftile.attention_packed_with_lse(q, k, v, cu, cu, mask, scale=0.2, backend="eager")
    windows = {"window_size_left": left, "window_size_right": right}
    operands = (q, k, v, cu, cu, 30, 30, 0.0, causal)
    o, lse, state, offset, debug = varlen.forward(*operands, False, scale=0.2, num_splits=None, **windows)
    torch.testing.assert_close(o, due)
    torch.testing.assert_close(lse, lse_due)
    assert (state.shape, state.dtype, offset.shape, debug.shape) == ((2,), torch.uint64, (), (0,))

    out = torch.empty_like(q)
    varlen.forward_inplace(out, *operands, False, scale=0.2, **windows)
    torch.testing.assert_close(out, due)

    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o = rooftile.attention_packed(q, k, v, cu, cu, mask, scale=0.2, backend="eager")
    do = torch.randn_like(o)
    grads_due = torch.autograd.grad(o, (q, k, v), do)
    grads = varlen.backward(do, q, k, v, o, lse, *operands[3:], state, offset, scale=0.2, **windows)
    assert_same(grads, grads_due)
    route.choose.cache_clear()


@pytest.mark.parametrize(
    "untranslated",
    [{"seqused_k": 1}, {"alibi_slopes": 1}, {"block_table": 1}, {"num_splits": 2}, {"something_newer": 1}],
    ids=lambda x: next(iter(x)),
)
def test_what_the_varlen_operators_leave_to_the_stock_kernel(untranslated):
    q, k, v, cu = packed(5, 30)
    assert varlen.forward(q, k, v, cu, cu, 30, 30, 0.0, True, False, **untranslated) is None
    assert varlen.forward(q, k, v, cu, cu, 30, 30, 0.1, True, False) is None
    assert varlen.forward(q, k, v, cu, None, 30, 30, 0.0, True, False) is None


def test_a_block_is_enabled_and_leaves_all_as_it_was(calls):
    q, k, v = tensors()
    assert not rooftile.is_enabled()
    with rooftile.enabled():
        assert rooftile.is_enabled()
        F.scaled_dot_product_attention(q, k, v)
        assert calls["forward"] == 1
        with rooftile.enabled(backend="tiled"):
            F.scaled_dot_product_attention(q, k, v)
            assert calls["forward"] == 1
        F.scaled_dot_product_attention(q, k, v)
        assert calls["forward"] == 2
        with pytest.raises(ZeroDivisionError), rooftile.enabled(backend="tiled"):
            1 / 0  # noqa: B018
        assert torch_sdpa.state() == (True, None)
    assert not rooftile.is_enabled()
    F.scaled_dot_product_attention(q, k, v)
    assert calls["forward"] == 2
    with pytest.raises(InvalidInput, match="backend is 'fast'"), rooftile.enabled(backend="fast"):
        pass
    assert not rooftile.is_enabled()


def test_status_counts_calls_by_backend_and_refusals_by_reason(calls):
    before = rooftile.status()
    q, k, v = tensors()
    rooftile.enable()
    for _ in range(3):
        F.scaled_dot_product_attention(q, k, v)
    F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(33, 33))
    F.scaled_dot_product_attention(*tensors(T=45, S=20), is_causal=True)
    x = torch.randn(1, 5, 2, 16)
    for _ in range(4):
        rooftile.attention(x, x, x, backend="tiled")
    after = rooftile.status()
    assert (before.enabled, after.enabled, after.backend) == (False, True, None)
    assert after.sdpa["formulas"] - before.sdpa.get("formulas", 0) == 3
    for reason in ("attn_mask", "is_causal with more queries than keys"):
        assert after.refused[reason] - before.refused.get(reason, 0) == 1
    assert after.calls["tiled"] - before.calls.get("tiled", 0) == 4
    shown = str(after)
    assert shown.startswith("enabled   yes, backend the fastest for each problem\ncalls     ")
    assert f"{after.refused['attn_mask']:,}  attn_mask" in shown
    assert str(rooftile.integrations.Status(False, None, {}, {"tiled": 2}, {})).splitlines() == [
        "enabled   no", "calls     none", "sdpa      2  tiled", "refused   none",
    ]  # fmt: skip
