"""The module, compared with torch's own and with the definition."""

from __future__ import annotations

import pytest
import torch

import rooftile
from rooftile import InvalidInput
from rooftile.exact import reference
from rooftile.nn import Attention


def by_definition(layer, x, context=None):
    """Returns the expected result of the layer, in fp64."""
    context = x if context is None else context
    q, k, v = (project(y) for project, y in ((layer.q, x), (layer.k, context), (layer.v, context)))
    q, k, v = (y.double().unflatten(-1, (-1, layer.head_dim)) for y in (q, k, v))
    sinks = None if layer.sinks is None else layer.sinks.double()
    o, _ = reference.attention(q, k, v, layer.mask, softcap=layer.softcap or 0.0, sinks=sinks)
    return layer.out(o.flatten(-2).to(x.dtype))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": rooftile.CAUSAL},
        {"kv_heads": 2, "bias": False},
        {"kv_heads": 1, "head_dim": 12, "mask": rooftile.CAUSAL & rooftile.Window(3)},
        {"sinks": True, "softcap": 3.0},
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_the_definition(options):
    layer = Attention(32, heads=4, **options)
    if layer.sinks is not None:
        torch.nn.init.normal_(layer.sinks)
    x = torch.randn(2, 10, 32, requires_grad=True)
    found, due = layer(x), by_definition(layer, x)
    assert found.shape == (2, 10, 32)
    torch.testing.assert_close(found, due)
    do = torch.randn_like(found)
    wanted = [x, *layer.parameters()]
    found, due = (torch.autograd.grad(o, wanted, do) for o in (found, due))
    torch.testing.assert_close(found, due, atol=1e-5, rtol=1e-4)


def test_context_of_another_length_and_width():
    layer = Attention(32, heads=4, context_dim=20)
    x, context = torch.randn(2, 10, 32), torch.randn(2, 7, 20)
    torch.testing.assert_close(layer(x, context), by_definition(layer, x, context))


def test_the_same_as_torchs_module():
    layer, due = Attention(32, heads=4), torch.nn.MultiheadAttention(32, 4, batch_first=True)
    weights, biases = due.in_proj_weight.chunk(3), due.in_proj_bias.chunk(3)
    with torch.no_grad():
        for linear, weight, bias in zip((layer.q, layer.k, layer.v), weights, biases, strict=True):
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)
        layer.out.load_state_dict(due.out_proj.state_dict())
    x = torch.randn(2, 10, 32)
    torch.testing.assert_close(layer(x), due(x, x, x, need_weights=False)[0])


def test_dropout_in_training_only():
    layer = Attention(32, heads=4, dropout=0.5)
    x = torch.randn(2, 10, 32)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    torch.testing.assert_close(layer(x), by_definition(layer, x))


def test_learned_sinks_are_parameters_and_take_weight_away():
    layer = Attention(32, heads=4, sinks=True, bias=False)
    assert dict(layer.named_parameters())["sinks"].shape == (4,)
    torch.nn.init.constant_(layer.sinks, 50.0)
    assert layer(torch.randn(2, 10, 32)).abs().max() < 1e-6


def test_dtype_device_and_state():
    layer = Attention(32, heads=4, sinks=True, dtype=torch.bfloat16, device="cpu")
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert layer(torch.randn(1, 3, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16
    other = Attention(32, heads=4, sinks=True, dtype=torch.bfloat16)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(1, 3, 32, dtype=torch.bfloat16)
    assert torch.equal(layer(x), other(x))


def test_it_says_what_it_is():
    layer = Attention(32, heads=4, kv_heads=2, mask=rooftile.CAUSAL, dropout=0.1, sinks=True)
    assert layer.extra_repr() == "heads=4, kv_heads=2, head_dim=8, mask=causal, dropout=0.1, sinks"


def test_a_named_backend_is_not_replaced():
    layer = Attention(32, heads=4, softcap=2.0, backend="sdpa")
    with pytest.raises(rooftile.Unsupported, match="backend 'sdpa' cannot run"):
        layer(torch.randn(1, 3, 32))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dim": 32, "heads": 4, "kv_heads": 3}, "heads is 4 and kv_heads is 3; kv_heads must divide heads"),
        ({"dim": 32, "heads": 0}, "heads is 0 and kv_heads is 0"),
        ({"dim": 30, "heads": 4}, "dim is 30 and heads is 4; heads must divide dim, or give head_dim"),
        ({"dim": 32, "heads": 4, "head_dim": 0}, "head_dim is 0; must be at least 1"),
        ({"dim": 32, "heads": 4, "mask": "causal"}, "mask is 'causal'; must be a rooftile mask"),
    ],
    ids=lambda x: "" if isinstance(x, str) else str(x),
)
def test_sizes_that_do_not_fit(sizes, message):
    with pytest.raises(InvalidInput, match=message):
        Attention(**sizes)
