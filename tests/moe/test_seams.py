"""Experts beside the rest of PyTorch: autocast, transforms, compilers, modes, strides, meta tensors; and bad input."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap

import rooftile as rt
from rooftile import moe
from rooftile.runtime.operators import DEFINED
from tests.conformance.watching import watching

N, D, E, H, K = 13, 16, 6, 10, 2


def weights(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in ((N, D), (E, D), (E, 2 * H, D), (E, D, H), (2 * H, D), (D, H))]


def layer(u: Tensor, centroids: Tensor, up: Tensor, down: Tensor, shared_up: Tensor, shared_down: Tensor, **options) -> Tensor:
    routing = moe.route(u, centroids, active=K)
    return moe.experts(u, routing, up, down, shared_up=shared_up, shared_down=shared_down, **options)


@pytest.mark.parametrize("way", ["tiled", "eager"])
def test_autocast_computes_products_in_its_dtype_and_the_router_in_fp32(way: str) -> None:
    given = [x.requires_grad_() for x in weights()]
    with torch.autocast("cpu", torch.bfloat16):
        routing = moe.route(*given[:2], active=K)
        y = layer(*given, backend=way)
    assert y.dtype == torch.bfloat16
    due = moe.route(*given[:2], active=K)
    assert all(torch.equal(x, z) for x, z in zip(routing, due, strict=True))
    torch.testing.assert_close(y.float(), layer(*given), rtol=0.05, atol=1.0)
    y.float().sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in given)


def test_inference_mode_and_no_grad() -> None:
    given = weights()
    due = layer(*given)
    with torch.inference_mode():
        assert torch.equal(layer(*given), due)
    with torch.no_grad():
        assert torch.equal(layer(*(x.requires_grad_() for x in given)), due)


def test_grad_and_vmap_of_torch_func() -> None:
    given = weights(torch.float64)
    leaves = [x.clone().requires_grad_() for x in given]
    due = torch.autograd.grad(layer(*leaves).square().sum(), leaves)
    found = grad(lambda *x: layer(*x).square().sum(), argnums=tuple(range(6)))(*given)
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x, y)
    # over tokens, and over models
    torch.testing.assert_close(vmap(layer, in_dims=(0, None, None, None, None, None))(*given), layer(*given))
    two = [torch.stack((x, x.flip(0))) for x in given]
    due = torch.stack([layer(*(x[n] for x in two)) for n in (0, 1)])
    torch.testing.assert_close(vmap(layer)(*two), due)
    each = vmap(grad(lambda u, *rest: layer(u, *rest).square().sum()), in_dims=(0, None, None, None, None, None))(*given)
    torch.testing.assert_close(each, found[0])


def test_vmap_of_the_loss_and_of_a_layer() -> None:
    u, centroids = torch.randn(3, N, D), torch.randn(E, D)
    loss = vmap(lambda x: moe.balance_loss(moe.route(x, centroids, active=K)))(u)
    torch.testing.assert_close(loss.mean(), moe.balance_loss(moe.route(u, centroids, active=K)))
    mixed = rt.nn.DeepSeekMoE(D, E, K, 1, H)
    parameters = dict(mixed.named_parameters())
    found = grad(lambda p: functional_call(mixed, p, (u,)).sum())(parameters)
    mixed(u).sum().backward()
    for name, p in mixed.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode() -> None:
    given = weights(torch.float64)
    tangent = torch.randn_like(given[0])
    _, found = torch.func.jvp(lambda u: layer(u, *given[1:]), (given[0],), (tangent,))
    step = 1e-6
    due = (layer(given[0] + step * tangent, *given[1:]) - layer(given[0] - step * tangent, *given[1:])) / (2 * step)
    torch.testing.assert_close(found, due, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("dynamic", [None, True])
def test_one_graph_with_gradients(dynamic: bool | None) -> None:
    torch._dynamo.reset()
    given = [x.requires_grad_() for x in weights()]

    def program(*x: Tensor) -> Tensor:
        routing = moe.route(*x[:2], active=K, score="sigmoid", groups=2, active_groups=1, normalise=True, scale=2.5)
        y = moe.experts(x[0], routing, *x[2:4], shared_up=x[4], shared_down=x[5])
        return y.square().sum() + moe.balance_loss(routing, alpha=0.1)

    compiled = torch.compile(program, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for _ in range(2):
        found, due = compiled(*given), program(*given)
        torch.testing.assert_close(found, due)
        for x, y in zip(*(torch.autograd.grad(z, given) for z in (found, due)), strict=True):
            torch.testing.assert_close(x, y)
        # another number of tokens
        given[0] = torch.randn(N + 4, D, requires_grad=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_layer_is_one_graph() -> None:
    torch._dynamo.reset()
    mixed, x = rt.nn.DeepSeekMoE(D, E, K, 1, H), torch.randn(2, 5, D)
    compiled = torch.compile(mixed, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), mixed(x))


def test_a_mode_sees_one_operator_each_way() -> None:
    given = [x.requires_grad_() for x in weights()]
    with watching() as watch:
        layer(*given).sum().backward()
    assert [call.name for call in watch.calls] == ["experts", "experts_backward"]
    # what is kept: the tensors that came, and the products before the activation
    made = watch.calls[0].results[1:]
    assert [tuple(x.shape) for x in made] == [(N * K, 2 * H), (N, 2 * H)]
    *tensors, _, code = watch.calls[0].arguments
    for keep, due in ((True, made), (False, [x[:0] for x in made])):
        y, *kept = DEFINED["experts"](*tensors, keep, code)
        assert y.requires_grad
        assert all(torch.equal(x, z) for x, z in zip(kept, due, strict=True))
    with watching() as watch, torch.no_grad():
        layer(*given)
    assert [x.numel() for x in watch.calls[0].results[1:]] == [0, 0]


def kept_bytes(run: Callable[[], Tensor], weights: Iterable[Tensor]) -> int:
    """The bytes of all memory that a forward keeps for its backward, without the weights."""
    kept = {}
    own = {x.untyped_storage().data_ptr() for x in weights}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = run()
    assert y.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("shared", [0, 1])
def test_activations_kept_are_no_more_than_those_of_a_dense_network_of_the_active_width(shared: int) -> None:
    N, d, E, K, h = 200, 64, 8, 3, 32
    u = torch.randn(N, d, requires_grad=True)
    layer = rt.nn.DeepSeekMoE(d, E, K, shared, h)
    routing = moe.Routing(*(x.detach() for x in layer.route(u)[:2]))
    up, down = (torch.randn(shape, requires_grad=True) for shape in ((2 * (K + shared) * h, d), (d, (K + shared) * h)))

    def dense() -> Tensor:
        gate, value = torch.nn.functional.linear(u, up).chunk(2, -1)
        return torch.nn.functional.linear(torch.nn.functional.silu(gate) * value, down)

    ours, due = kept_bytes(lambda: layer(u, routing), layer.parameters()), kept_bytes(dense, (up, down))
    # the tokens, both halves before the activation, and an expert and a gate of each choice
    assert ours == 4 * N * (d + 2 * (K + shared) * h + 2 * K)
    assert ours < due


def test_strides_and_leading_axes() -> None:
    u, centroids, up, down, shared_up, shared_down = weights()
    due = layer(u, centroids, up, down, shared_up, shared_down)
    strided = torch.randn(D, N, 3)[..., 1].T.copy_(u)
    assert not strided.is_contiguous()
    found = layer(strided, centroids.T.contiguous().T, up.mT.contiguous().mT, down.mT.contiguous().mT, shared_up, shared_down)
    torch.testing.assert_close(found, due)
    routing = moe.route(u, centroids, active=K)
    wide = moe.Routing(routing.experts.T.contiguous().T.long(), routing.gates.double().T.contiguous().T)
    torch.testing.assert_close(moe.experts(u, wide, up, down, shared_up=shared_up, shared_down=shared_down), due)
    cube = torch.randn(2, 3, 5, D)
    found = layer(cube.transpose(0, 2), centroids, up, down, shared_up, shared_down)
    assert torch.equal(found, layer(cube, centroids, up, down, shared_up, shared_down).transpose(0, 2))


def test_meta_tensors() -> None:
    given = [x.to("meta").requires_grad_() for x in weights()]
    y = layer(*given)
    assert y.is_meta
    y.sum().backward()
    assert given[2].grad.shape == given[2].shape


def test_fake_tensors() -> None:
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(x).requires_grad_() for x in weights()]
        y = layer(*given)
        y.sum().backward()
    assert y.shape == (N, D)
    assert given[1].grad.shape == (E, D)


def test_gradients_under_checkpointing_are_the_same() -> None:
    given = [x.requires_grad_() for x in weights()]
    due = torch.autograd.grad(layer(*given).square().sum(), given)
    again = torch.utils.checkpoint.checkpoint(layer, *given, use_reentrant=False)
    for x, y in zip(torch.autograd.grad(again.square().sum(), given), due, strict=True):
        assert torch.equal(x, y)


U, C, UP, DOWN, SHARED_UP, SHARED_DOWN = weights()
R = moe.route(U, C, active=K)


def routed(experts: Tensor | None = None, gates: Tensor | None = None) -> moe.Routing:
    return moe.Routing(R.experts if experts is None else experts, R.gates if gates is None else gates)


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ((U, R, UP[:, :, :8], DOWN), {}, r"up is .* \(6, 20, 8\); must be \(E, 2 h, d\) = \(6, 20, 16\), for activation 'silu'"),
        ((U, R, UP, DOWN[:5]), {}, r"down is .* \(5, 16, 10\); must be \(E, d, h\) = \(6, 16, 10\)"),
        ((U, R, UP, DOWN), {"activation": "relu2"}, r"up is .*; must be \(E, h, d\) = \(6, 10, 16\), for activation 'relu2'"),
        ((U, R, UP[0], DOWN), {}, r"up is .*; must be a tensor \(E, 2 h, d\)"),
        ((U, R, UP, None), {}, r"down is None; must be a tensor \(E, d, h\)"),
        ((U, R, UP.bfloat16(), DOWN), {}, "up is torch.bfloat16 and u torch.float32; must be alike"),
        ((U, R, UP, DOWN), {"shared_up": SHARED_UP}, "shared_up came without shared_down; give both"),
        ((U, R, UP, DOWN), {"shared_down": SHARED_DOWN}, "shared_down came without shared_up; give both"),
        ((U, R, UP, DOWN), {"shared_gate": U[0]}, "shared_gate came without shared_up and shared_down; give all three"),
        ((U, R, UP, DOWN), {"up_bias": U}, r"up_bias is .*; must be \(E, 2 h\) = \(6, 20\)"),
        ((U, R, UP, DOWN), {"activation": "gelu"}, "activation is 'gelu'; must be 'silu', 'clamped' or 'relu2'"),
        ((U, R, UP, DOWN), {"backend": "cuda"}, "backend is 'cuda'; must be 'auto', 'triton', 'tiled' or 'eager'"),
        ((U, R, UP, DOWN), {"validate": 1}, "validate is 1; must be True or False"),
        ((U.long(), R, UP, DOWN), {}, "u is a torch.int64 tensor .*; must be a tensor .* of bfloat16"),
        ((U, R[0], UP, DOWN), {}, r"routing is .*; must be the Routing that route returns, or Routing\(experts, gates\)"),
        ((U[:5], R, UP, DOWN), {}, r"routing.experts is \(13, 2\); must be \(5, 'K'\), as u is \(5, 16\)"),
        ((U, routed(R.experts.float()), UP, DOWN), {}, "routing.experts is a torch.float32 tensor .*; must be an int32 tensor"),
        ((U, routed(gates=R.gates[:, :1]), UP, DOWN), {}, r"routing.gates is .*; must be a floating-point tensor \(13, 2\)"),
        ((U, routed(R.experts + 1), UP[:6], DOWN), {}, "routing.experts has values from . to .; must be from 0 to 5"),
        ((U, routed(R.experts - 9), UP, DOWN), {}, "routing.experts has values from -. to -.; must be from 0 to 5"),
        ((U, routed(gates=-R.gates), UP, DOWN), {"validate": True}, "routing.gates has a number below 0, an infinity or NaN"),
        ((U, routed(gates=R.gates / 0), UP, DOWN), {"validate": True}, "routing.gates has a number below 0, an infinity or NaN"),
        ((U, R, UP.to("meta"), DOWN), {}, "up is on meta; u is on cpu"),
        ((U, R, UP, DOWN), {"topk_ids": R[0]}, "experts has no argument topk_ids: write routing=, a rooftile.moe.Routing"),
        ((U, R, UP, DOWN), {"w13": UP}, "experts has no argument w13: write up="),
    ],
)
def test_a_mistake_gets_a_sentence(arguments: tuple, options: dict, sentence: str) -> None:
    with pytest.raises(rt.InvalidInput, match=sentence) as raised:
        moe.experts(*arguments, **options)
    assert "\n" not in str(raised.value)


def test_gates_below_zero_are_numbers_unless_validated() -> None:
    found = moe.experts(U, routed(gates=-R.gates), UP, DOWN)
    torch.testing.assert_close(found, -moe.experts(U, R, UP, DOWN, validate=True))


@pytest.mark.parametrize(
    ("dtype", "lack"), [(torch.float32, "tensors are on cpu"), (torch.float64, "u is torch.float64")], ids=str
)
def test_kernels_that_cannot_run_are_refused_by_name(dtype: torch.dtype, lack: str) -> None:
    with pytest.raises(rt.Unsupported, match=f"backend 'triton': {lack}; needs .*; name 'tiled' or none"):
        layer(*weights(dtype), backend="triton")
