"""The gradients of a rounded layer against their definition in fp64, and training over several micro-batches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import rooftile as rt
from rooftile.errors import Unsupported
from rooftile.numerics import quantise_rows
from rooftile.weights import weight_format
from tests.qat.models import FORMATS, inputs, mlp

# the least and the largest number of each format, in its scales
RANGES = {
    "fp8": (-448, 448), "fp8_tile": (-448, 448), "int8": (-127, 127), "w8": (-128, 127), "int4": (-8, 7), "mxfp8": (-448, 448),
    "mxfp4": (-6, 6), "nvfp4": (-6, 6),
}  # fmt: skip
# the largest number of a group sets the scale so that it fits, and scales in fp32 are not rounded enough to change that
NEVER_BEYOND = ("fp8", "fp8_tile", "int8")


def layer(format: str, estimator: str = "straight", *, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(2)
    made = nn.Linear(128, 37, bias=bias).to(dtype)
    with torch.no_grad():
        # outliers (one of 460 times a power of two), a row of zeros, one of one number, and one whose nvfp4 scales are coarse
        made.weight[3, 7] = 9.0
        made.weight[9, 40] = 0.45
        made.weight[5] = 0.0
        made.weight[6] = 0.25
        made.weight[7] *= 6e-4
    return rt.qat.prepare(nn.Sequential(made), format, estimator=estimator)[0]


def scale_of_each(codes: rt.QuantisedWeight) -> torch.Tensor:
    """The scale of each weight (N, K), in fp64."""
    N, K = codes.shape
    if codes.format == "fp8_tile":
        return codes.scales.double().repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    scales = torch.exp2(codes.scales.double() - 127) if codes.format.startswith("mx") else codes.scales.double()
    return scales.repeat_interleave(codes.group, 1) * (1.0 if codes.outer is None else codes.outer.double())


def beyond(made) -> torch.Tensor:
    """Returns which weights lie more than half a code beyond the numbers of their format, in fp64."""
    codes = made.codes()
    least, most = RANGES[codes.format]
    steps = made.parameter.detach().double() / scale_of_each(codes)
    return (steps < least - 0.5) | (steps > most + 0.5)


def defined(made, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The result and the gradients of x, the weight and the bias, in fp64, from the codes."""
    codes = made.codes()
    w = codes.dequantise(torch.float64)
    activations = weight_format(codes.format).activations
    rows = x.double() if activations is None else quantise_rows(x, activations).dequantise(torch.float64)
    dw = dy.double().flatten(0, -2).T @ rows.flatten(0, -2)
    if made.qat.rounding.estimator == "clip":
        dw = dw.masked_fill(beyond(made), 0.0)
    y = rows @ w.T + (0 if made.bias is None else made.bias.double())
    return y, dy.double() @ w, dw, dy.double().sum((0, 1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_gradients_are_those_of_the_rounded_numbers(format: str, bias: bool) -> None:
    made, x = layer(format, bias=bias), inputs().requires_grad_()
    y = made(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    y.backward(dy)
    due = defined(made, x.detach(), dy)
    for found, exact in zip((y, x.grad, made.weight.grad), due, strict=False):
        assert (found.double() - exact).norm() <= 1e-6 * exact.norm()
    if bias:
        torch.testing.assert_close(made.bias.grad.double(), due[3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
def test_clip_leaves_out_what_lies_beyond_the_codes(format: str) -> None:
    made, straight, x = layer(format, "clip"), layer(format), inputs().requires_grad_()
    y = made(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    y.backward(dy)
    for found, exact in zip((y, x.grad, made.weight.grad), defined(made, x.detach(), dy), strict=False):
        assert (found.double() - exact).norm() <= 1e-6 * exact.norm()
    straight(x.detach()).backward(dy)
    outside = beyond(made)
    assert torch.equal(made.weight.grad, straight.weight.grad.masked_fill(outside, 0.0))
    # rounded scales leave the largest of some groups outside, and 32 numbers of a power of two as much as a quarter of the range
    assert outside.any() != (format in NEVER_BEYOND)
    assert outside.float().mean() < 0.05


@pytest.mark.parametrize("format", FORMATS)
def test_clip_of_an_embedding_leaves_out_the_same(format: str) -> None:
    linear = layer(format, "clip")
    made = nn.Embedding.from_pretrained(linear.parameter.detach().clone(), freeze=False)
    made = rt.qat.prepare(nn.Sequential(made), {"0": format}, estimator="clip")[0]
    tokens = torch.arange(37).repeat(2)
    dy = torch.randn((74, 128), generator=torch.Generator().manual_seed(3))
    made(tokens).backward(dy)
    assert torch.equal(made.weight.grad, dy.view(2, 37, 128).sum(0).masked_fill(beyond(linear), 0.0))


@pytest.mark.parametrize("format", ["int8", "int4:32"])
def test_only_wanted_gradients_are_computed(format: str) -> None:
    made, x = layer(format), inputs().requires_grad_()
    made.weight.requires_grad_(False)
    made(x).sum().backward()
    assert made.weight.grad is None
    assert x.grad is not None
    frozen = layer(format)
    frozen(inputs()).sum().backward()
    assert frozen.weight.grad is not None


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list with an entry for each weight whose codes were taken."""
    from rooftile.qat.rounding import codes

    found: list[int] = []
    original = codes.quantise_trained
    monkeypatch.setattr(codes, "quantise_trained", lambda *args, **kwargs: found.append(1) or original(*args, **kwargs))
    return found


def stepped(format: str) -> nn.Module:
    """A prepared model of three layers after one step of an optimiser."""
    model = rt.qat.prepare(mlp(), format)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-2)
    model(inputs()).square().mean().backward()
    optimiser.step()
    optimiser.zero_grad()
    return model


@pytest.mark.parametrize("format", ["fp8", "int4:32"])
def test_micro_batches_share_codes_and_equal_one_batch(taken: list[int], format: str) -> None:
    model = stepped(format)
    x = torch.cat([inputs(seed=n) for n in range(4)])
    taken.clear()
    model(x).square().mean().backward()
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for part in x.chunk(4):
        (model(part).square().mean() / 4).backward()
    # once for each layer, however many forwards
    assert len(taken) == 3
    for p, due in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(p.grad, due, rtol=1e-4, atol=1e-4 * due.abs().max().item())


def averaged(model: nn.Module) -> None:
    """Puts an average in place of the weights, as programs do that keep one."""
    for p in model.parameters():
        p.data.mul_(0.5)


@pytest.mark.parametrize(
    ("mode", "due"),
    [
        # three layers in each of two forwards, or none beside those of a forward before
        ("training", 0), ("checkpoint", 0), ("before a step", 6), ("evaluation", 6), ("no_grad", 6), ("inference", 6),
        ("distributed", 6),
    ],
)  # fmt: skip
def test_when_codes_are_shared(taken: list[int], monkeypatch: pytest.MonkeyPatch, mode: str, due: int) -> None:
    """Codes are those of the weight as it is now, also where neither steps nor a tensor's version tell that it has changed."""
    model = rt.qat.prepare(mlp(), "int4:32") if mode == "before a step" else stepped("int4:32")
    x = inputs()
    model(x)
    if mode == "evaluation":
        model.eval()
    elif mode == "distributed":
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    with modes.get(mode, torch.enable_grad)():
        taken.clear()
        for _ in range(2):
            if due:
                averaged(model)
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False) if mode == "checkpoint" else model(x)
            if y.requires_grad:
                y.sum().backward()
        assert len(taken) == due
        assert torch.equal(y, rt.qat.convert(copy.deepcopy(model))(x))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("stays", [True, False])
def test_training_goes_on_after_an_evaluation_of_an_average(grad: bool, stays: bool) -> None:
    model, x = stepped("int4:32"), inputs()
    model(x)
    averaged(model.eval())
    with torch.set_grad_enabled(grad):
        model(x)
    if not stays:
        for p in model.parameters():
            p.data.mul_(2.0)
    assert torch.equal(model.train()(x), rt.qat.convert(copy.deepcopy(model))(x))


def test_one_changed_weight_alone_has_new_codes(taken: list[int]) -> None:
    model, x = stepped("int4:32"), inputs()
    model(x)
    with torch.no_grad():
        model[2].weight.mul_(1.5)
    taken.clear()
    assert torch.equal(model(x), rt.qat.convert(copy.deepcopy(model))(x))
    # one in the forward, and three by convert
    assert len(taken) == 4


def test_changed_weights_have_new_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an optimiser, by hand, through .data, by a state dict: nothing trains with codes of before."""
    model, x = rt.qat.prepare(mlp(), "int4:32"), inputs()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-2)

    def check() -> None:
        fresh = rt.qat.convert(copy.deepcopy(model))
        assert torch.equal(model(x), fresh(x))
        assert torch.equal(model(x), fresh(x))

    check()
    model(x).square().mean().backward()
    # before any step of an optimiser, weights may be changed by hand
    for p in model.parameters():
        p.data -= 0.1 * p.grad
    check()
    optimiser.step()
    check()
    for p in model.parameters():
        p.data.clamp_(-0.02, 0.02)
    optimiser.step()
    check()
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    check()
    model.load_state_dict(mlp(seed=7).state_dict())
    check()
    # an average of weights, for an evaluation
    model(x)
    for p in model.parameters():
        p.data.mul_(0.5)
    with torch.no_grad():
        check()


def test_activation_checkpointing() -> None:
    model, x = rt.qat.prepare(mlp(), "int8"), inputs().requires_grad_()
    model(x).square().mean().backward()
    due = [x.grad, *(p.grad for p in model.parameters())]
    other, z = rt.qat.prepare(mlp(), "int8"), inputs().requires_grad_()
    torch.utils.checkpoint.checkpoint(other, z, use_reentrant=False).square().mean().backward()
    for found, one in zip([z.grad, *(p.grad for p in other.parameters())], due, strict=True):
        assert torch.equal(found, one)


@pytest.mark.parametrize("format", ["fp8", "int4:32"])
@pytest.mark.parametrize("estimator", ["straight", "clip"])
def test_compiled_layers(format: str, estimator: str) -> None:
    model = rt.qat.prepare(mlp(), format, estimator=estimator)
    x, z = inputs().requires_grad_(), inputs().requires_grad_()
    due = model(x)
    due.square().mean().backward()
    gradients = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    compiled = torch.compile(model, fullgraph=True)
    for _ in range(2):
        found = compiled(z)
        torch.testing.assert_close(found, due, rtol=1e-5, atol=1e-4)
    found.square().mean().backward()
    for mine, one in zip([z.grad, *(p.grad for p in model.parameters())], [x.grad, *gradients], strict=True):
        torch.testing.assert_close(mine, one, rtol=1e-3, atol=1e-3 * one.abs().max().item())


def test_torch_func() -> None:
    model, x = rt.qat.prepare(mlp(), "int4:32"), inputs()

    def loss(parameters, batch):
        return torch.func.functional_call(model, parameters, (batch,)).square().mean()

    parameters = dict(model.named_parameters())
    found = torch.func.grad(loss)(parameters, x)
    model(x).square().mean().backward()
    for name, p in parameters.items():
        torch.testing.assert_close(found[name], p.grad)
    per_row = torch.func.vmap(lambda row: model(row))(x)
    torch.testing.assert_close(per_row, model(x))
    with pytest.raises(Unsupported, match=r"torch\.vmap maps the weights of a prepared layer"):
        torch.func.vmap(loss, in_dims=(dict.fromkeys(parameters, 0), None))(
            {name: torch.stack([p, p]) for name, p in parameters.items()}, x
        )


def test_a_second_derivative_is_refused() -> None:
    model, x = rt.qat.prepare(mlp(), "int8"), inputs().requires_grad_()
    (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
