"""`parallel.tiled`: a function of single tokens in tiles, beside the function itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rooftile.errors import InvalidInput, Unsupported
from rooftile.parallel import tiled


class SwiGLU(nn.Module):
    def __init__(self, D: int = 6, F: int = 10) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, F), nn.Linear(D, F, bias=False), nn.Linear(F, D)
        self.unused = nn.Linear(D, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class FewTokens(nn.Module):
    """An expert that only some tokens see, so that only some tiles have gradients to it."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[..., 0] > 1.5
        y = torch.zeros_like(x)
        if chosen.any():
            y[chosen] = self.expert(x[chosen])
        return y


def gradients(y: torch.Tensor, leaves: list[torch.Tensor], upstream: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(y, leaves, upstream, materialize_grads=True))


@pytest.mark.parametrize("tile", [1, 4, 13, 50])
@pytest.mark.parametrize("made", [SwiGLU, FewTokens])
@pytest.mark.parametrize(("shape", "dim"), [((2, 13, 6), 1), ((13, 6), 0), ((6, 13, 2), -2), ((2, 0, 6), 1)])
def test_agrees_with_the_function(made, shape: tuple[int, ...], dim: int, tile: int) -> None:
    torch.manual_seed(0)
    module = made().double()
    x = torch.randn(shape, dtype=torch.float64)
    if made is FewTokens and x.numel():
        x.flatten()[0] = 2.0
    # tokens that do not lie densely, and features elsewhere than last
    x = x.repeat_interleave(2, dim).narrow(dim, 0, shape[dim]).requires_grad_()

    def function(x: torch.Tensor) -> torch.Tensor:
        return module(x.movedim(0, -1)).movedim(-1, 0) if x.shape[0] == 6 and x.ndim == 3 else module(x)

    leaves = [x, *module.parameters()]
    due, found = function(x), tiled(function, x, tile=tile, dim=dim)
    assert found.requires_grad == due.requires_grad or not x.numel()
    if not due.requires_grad:
        return
    upstream = torch.randn_like(due)
    torch.testing.assert_close(found, due)
    for a, b in zip(gradients(found, leaves, upstream), gradients(due, leaves, upstream), strict=True):
        torch.testing.assert_close(a, b)


def test_only_wanted_gradients_and_none() -> None:
    module, x = SwiGLU(), torch.randn(1, 9, 6)
    with torch.no_grad():
        assert not tiled(module, x, tile=4).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(tiled(module, x, tile=4), module(x))
    # frozen inputs, then frozen parameters
    due = gradients(module(x), [module.up.weight], torch.ones(1, 9, 6))
    torch.testing.assert_close(gradients(tiled(module, x, tile=4), [module.up.weight], torch.ones(1, 9, 6)), due)
    module.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    due = gradients(module(leaf), [leaf], torch.ones(1, 9, 6))
    torch.testing.assert_close(gradients(tiled(module, leaf, tile=4), [leaf], torch.ones(1, 9, 6)), due)
    assert not tiled(module, x, tile=4).requires_grad


def test_sums_over_many_tiles_are_in_fp32() -> None:
    """Each tile's gradient comes in bf16; sums in bf16 lose eight times as much as all tokens at once."""
    torch.manual_seed(1)
    module, x, upstream = nn.Linear(8, 8).bfloat16(), torch.randn(1, 512, 8).bfloat16(), torch.randn(1, 512, 8).bfloat16()
    exact = nn.Linear(8, 8).double()
    exact.load_state_dict(module.state_dict())
    due = gradients(exact(x.double()), list(exact.parameters()), upstream.double())

    def errors(y: torch.Tensor) -> list[float]:
        found = gradients(y, list(module.parameters()), upstream)
        return [float((a.double() - b).abs().mean()) for a, b in zip(found, due, strict=True)]

    naive = errors(torch.cat([module(part) for part in x.split(4, 1)], 1))
    for at_once, many, rounded in zip(errors(module(x)), errors(tiled(module, x, tile=4)), naive, strict=True):
        assert many <= 4 * at_once
        assert many <= rounded / 4


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
def test_dropout_autocast_and_compiled_modules() -> None:
    module, x = nn.Sequential(SwiGLU(), nn.Dropout(0.5)), torch.randn(1, 12, 6, requires_grad=True)
    leaves = [x, *module[0].up.parameters()]
    torch.manual_seed(2)
    due = gradients(torch.cat([module(part) for part in x.split(4, 1)], 1), leaves, torch.ones(1, 12, 6))
    after = torch.rand(1)
    torch.manual_seed(2)
    y = tiled(module, x, tile=4)
    torch.rand(7)
    torch.testing.assert_close(gradients(y, leaves, torch.ones(1, 12, 6)), due)
    torch.manual_seed(2)
    tiled(module, x, tile=4)
    assert torch.equal(torch.rand(1), after)
    module = SwiGLU()
    leaves = [x, *module.up.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        # the casts of the weights are cached by now
        due = module(x)
        y = tiled(module, x, tile=5)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, due)
    ones = torch.ones(1, 12, 6, dtype=torch.bfloat16)
    for a, b in zip(gradients(y, leaves, ones), gradients(due, leaves, ones), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, atol=3e-2, rtol=3e-2)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", dynamic=True)
    y = tiled(compiled, x, tile=5)
    torch.testing.assert_close(gradients(y, leaves, torch.ones(1, 12, 6)), gradients(module(x), leaves, torch.ones(1, 12, 6)))
    whole = torch.compile(lambda x: tiled(module, x, tile=5) * 2, backend="aot_eager")
    torch.testing.assert_close(whole(x), module(x) * 2)


def test_hidden_activations_exist_for_one_tile() -> None:
    from tests.memory import peak_bytes

    module, x = SwiGLU(D=16, F=512), torch.randn(1, 256, 16, requires_grad=True)
    usual = peak_bytes(lambda: module(x).sum().backward())
    found = peak_bytes(lambda: tiled(module, x, tile=16).sum().backward())
    # gradients of 100 kB of weights, and x's; usually four activations of 512 kB besides
    assert usual > 4 * 256 * 512 * 4
    assert found < usual / 4


def test_refusals_are_sentences() -> None:
    module, x = SwiGLU(), torch.randn(1, 9, 6)
    scale = torch.ones(6, requires_grad=True) * 2
    with pytest.raises(InvalidInput, match="tile is 0"):
        tiled(module, x, tile=0)
    with pytest.raises(InvalidInput, match="dim 3"):
        tiled(module, x, tile=4, dim=3)
    with pytest.raises(InvalidInput, match="must be a tensor with as many tokens along dim 1"):
        tiled(lambda x: x.sum(1), x, tile=4)
    with pytest.raises(Unsupported, match="reads the result of MulBackward0"):
        tiled(lambda x: x * scale, x, tile=4)
    with pytest.raises(Unsupported, match="under torch"):
        torch.func.grad(lambda x: tiled(module, x, tile=4).sum())(x)
    y = tiled(module, x, tile=4).sum()
    with pytest.raises(Unsupported, match="a second derivative"):
        torch.autograd.grad(y, module.up.weight, create_graph=True)


def test_hooks_of_parameters_see_the_gradient_once():
    mlp, x = SwiGLU(), torch.randn(2, 20, 6)
    seen = []
    for _ in range(2):
        mlp.up.weight.register_hook(lambda g: seen.append(g.clone()) or 2 * g)
    mlp(x).square().sum().backward()
    due, mlp.up.weight.grad = mlp.up.weight.grad, None
    tiled(mlp, x, tile=6).square().sum().backward()
    assert len(seen) == 4
    torch.testing.assert_close(mlp.up.weight.grad, due)
    assert len(mlp.up.weight._backward_hooks) == 2


def test_what_cannot_be_tiled_is_refused():
    mlp, x = SwiGLU(), torch.randn(2, 20, 6)
    for given, words in (
        (lambda: tiled("mlp", x, tile=6), "function is 'mlp'"),
        (lambda: tiled(mlp, x, tile=6, dim="1"), "dim '1'"),
        (lambda: tiled(mlp, x, tile=6, dim=1.0), r"dim 1\.0"),
        (lambda: tiled(mlp, torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged), tile=2), "must be a dense tensor"),
        # a last tile of one column would be stretched over the others' columns
        (lambda: tiled(lambda t: t[..., :1] if t.shape[1] < 6 else t, x, tile=6), r"returned \(2, 2, 1\) .*must be \(2, 2, 6\)"),
        (lambda: tiled(lambda t: t.double() if t.shape[1] < 6 else t, x, tile=6), "in torch.float64 for tokens from 18 on"),
    ):
        with pytest.raises(InvalidInput, match=words):
            given()
    with pytest.raises(Unsupported, match="changes its tile in place"):
        tiled(lambda t: mlp(t.mul_(2)), x.clone(), tile=6)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(Unsupported, match=r"under torch\.func"):
        tiled(mlp, x, tile=6)
    meta = SwiGLU().to("meta")
    assert tiled(meta, x.to("meta"), tile=6).shape == x.shape
