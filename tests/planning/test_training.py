"""Plans of training steps: forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import rooftile as rt
from rooftile.planning.costs import Pass, training_passes_of
from rooftile.planning.formats import KEPT
from rooftile.planning.targets.modules import ModuleTarget
from rooftile.planning.timing import products_of, training_of
from tests.planning.models import Blocks, inputs, llama, mlp, tokens

# M, N, K in bf16, so many bytes of x, y and the weight
M, N, K = 8, 32, 64
FLOPS, X, Y, W = 2 * M * N * K, 2 * M * K, 2 * M * N, 2 * N * K
PRODUCT = Pass(FLOPS, X + Y + W, "bf16", (M, N), Y)
DX, DW = PRODUCT._replace(sizes=(M, K), written=X), PRODUCT._replace(sizes=(N, K), written=W)


def passes(word: str, *, on_gpu: bool = True, needs_dx: bool = True, has_bias: bool = False) -> list[Pass]:
    return training_passes_of(M, N, K, word, "bf16", 2, on_gpu=on_gpu, needs_dx=needs_dx, has_bias=has_bias)


def test_three_products_by_hand() -> None:
    assert passes(KEPT) == [PRODUCT, DX, DW]
    assert passes(KEPT, needs_dx=False) == [PRODUCT, DW]
    # a sum over rows reaches 0.7 of the rate of a copy
    assert passes(KEPT, has_bias=True) == [PRODUCT, DX, DW, Pass(0, round(Y / 0.7), "bf16")]


def test_kernels_of_prepared_layers_by_hand() -> None:
    codes = N * K // 2 + 2 * N * 2
    quantised, dequantised = Pass(0, W + codes, "bf16"), Pass(0, codes + W, "bf16")
    # the weight is unpacked for the forward, and again for dX
    assert passes("int4:32") == [quantised, dequantised, PRODUCT, dequantised, DX, DW]
    codes = N * K + 4 * N
    forward = [Pass(0, X + M * K, "bf16"), Pass(FLOPS, M * K + Y + codes, "fp8", (M, N), Y)]
    # rows are quantised again for dW: read, codes written and read, and written in 16 bits
    rows = Pass(0, 2 * X + 2 * M * K, "bf16")
    assert passes("fp8") == [
        Pass(0, W + codes, "bf16"), *forward, Pass(0, codes + W, "bf16"), rows, DX, DW
    ]  # fmt: skip


def test_layers_have_their_three_products() -> None:
    """The first layer's input has no gradient."""
    plan = rt.plan(mlp(), inputs(), formats=["bf16"], backward=True)
    forward = rt.plan(mlp(), inputs(), formats=["bf16"])
    assert [layer.flops / other.flops for layer, other in zip(plan.layers, forward.layers, strict=True)] == [2, 3, 3]
    operators = {other.operator for other in plan.others}
    assert {"gelu", "bwd gelu_backward"} <= operators
    assert not {"mm", "bwd mm", "addmm", "bwd addmm"} & operators


def test_gradients_of_what_is_timed_are_those_of_a_prepared_layer() -> None:
    model = mlp()
    target = ModuleTarget(model, (inputs(),), (), backward=True)
    item = target.items[1]
    x = torch.randn(5, 256)
    for word in (KEPT, "int8", "int4:32"):
        dx, dw, db = training_of(item, word)(x)
        (y,) = products_of(item, word)(x)
        layer = copy.deepcopy(model[2])
        if word != KEPT:
            layer = rt.qat.prepare(nn.Sequential(layer), word)
        given = x.clone().requires_grad_()
        made = layer(given)
        made.backward(made.detach())
        assert torch.equal(made.detach(), y.detach())
        own = layer if word == KEPT else layer[0]
        for found, due in ((dx, given.grad), (dw, own.weight.grad), (db, own.bias.grad)):
            assert torch.equal(found, due)


def test_a_step_in_formats_trains_all_parameters() -> None:
    model, x = mlp(), inputs()
    target = ModuleTarget(model, (x,), (), backward=True)
    model.zero_grad()
    with target.rounded(target.items[0], "int8"):
        target.run()
    prepared = rt.qat.prepare(mlp(), {"0": "int8"})
    prepared(x).sum().backward()
    for mine, due in zip(model.parameters(), prepared.parameters(), strict=True):
        assert torch.equal(mine.grad, due.grad)


def test_gradients_are_as_before() -> None:
    model, ids = Blocks(), torch.arange(24).view(2, 12)
    model(ids).sum().backward()
    before = [x.grad.clone() for x in model.parameters()]
    rt.plan(model, ids, backward=True, formats=["bf16", "int8"], data=ids)
    assert all(torch.equal(x.grad, due) for x, due in zip(model.parameters(), before, strict=True))
    fresh = llama()
    rt.plan(fresh, tokens(), backward=True, formats=["bf16"])
    assert all(x.grad is None for x in fresh.parameters())


def test_losses_are_those_without_a_backward() -> None:
    ids = tokens()
    one, other = (
        rt.plan(llama(), ids, data=ids, formats=["bf16", "int8"], measure=False, backward=backward) for backward in (True, False)
    )
    for a, b in zip(one.layers, other.layers, strict=True):
        assert [o.loss for o in a.options] == pytest.approx([o.loss for o in b.options], abs=1e-6)


def test_under_autocast_and_without_gradients() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        plan = rt.plan(mlp(), inputs(), formats=["bf16", "int8"], backward=True)
    assert plan.layers[0].options[0].format == "bf16"
    with torch.no_grad():
        assert rt.plan(mlp(), inputs(), formats=["bf16"], backward=True, measure=False).layers[1].flops == 3 * 524_288


def test_nothing_to_train_is_a_sentence() -> None:
    with pytest.raises(rt.InvalidInput, match="no output requires a gradient"):
        rt.plan(mlp().requires_grad_(False), inputs(), backward=True)
    with pytest.raises(rt.InvalidInput, match="backward is True and the model a checkpoint, which only serves"):
        rt.plan("folder", rows={"decode": 1}, backward=True)
