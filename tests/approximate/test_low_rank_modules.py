"""The modules of linear attention, Performer and Linformer: their functions behind projections, and bad input."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import rooftile as rt
from rooftile import approximate as ap
from rooftile.nn import Attention, LinearAttention, Linformer, Performer

NAMES = [f"{n}.{w}" for n in ("q", "k", "v", "out") for w in ("weight", "bias")]
SHARED = [("none", [(2, 6, 40)] * 2), ("heads", [(1, 6, 40)] * 2), ("keys-values", [(1, 6, 40)])]


def as_function(layer: nn.Module, x: torch.Tensor, context: torch.Tensor | None, function) -> torch.Tensor:
    context = x if context is None else context
    q = layer.q(x).unflatten(-1, (4, 8))
    k, v = (projection(context).unflatten(-1, (2, 8)) for projection in (layer.k, layer.v))
    return layer.out(function(q, k, v).flatten(-2))


def test_linear_attention() -> None:
    layer = LinearAttention(24, 4, kv_heads=2, head_dim=8, mask=rt.CAUSAL, feature="relu")
    x = torch.randn(2, 30, 24)
    due = as_function(layer, x, None, lambda q, k, v: ap.linear(q, k, v, rt.CAUSAL, feature="relu"))
    torch.testing.assert_close(layer(x), due)
    assert "mask=causal, feature='relu'" in repr(layer)


def test_linear_attention_to_a_context() -> None:
    layer = LinearAttention(24, 4, kv_heads=2, head_dim=8, context_dim=10, normalise=False)
    x, context = torch.randn(2, 5, 24), torch.randn(2, 30, 10)
    due = as_function(layer, x, context, lambda q, k, v: ap.linear(q, k, v, normalise=False))
    torch.testing.assert_close(layer(x, context), due)


def test_performer() -> None:
    layer = Performer(24, 4, kv_heads=2, head_dim=8, mask=rt.CAUSAL, m=16, kind="hyperbolic", seed=5)
    x = torch.randn(2, 30, 24)
    features = ap.Features.draw(8, 16, kind="hyperbolic", seed=5)
    due = as_function(layer, x, None, lambda q, k, v: ap.performer(q, k, v, rt.CAUSAL, features=features))
    torch.testing.assert_close(layer(x), due)
    assert "m=16, kind='hyperbolic'" in repr(layer)


def test_the_projection_of_a_performer_is_saved_and_not_trained() -> None:
    layer, other = Performer(16, 2, m=8, seed=1), Performer(16, 2, m=8, seed=2)
    assert not torch.equal(layer.projection, other.projection)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer.projection, other.projection)
    assert "projection" not in dict(layer.named_parameters())
    layer.redraw(2)
    assert torch.equal(layer.projection, ap.Features.draw(8, 8, seed=2).projection)
    x = torch.randn(1, 5, 16)
    assert not torch.allclose(layer(x), other(x))


@pytest.mark.parametrize(("share", "shapes"), SHARED)
def test_linformer(share: str, shapes: list[tuple[int, ...]]) -> None:
    layer = Linformer(24, 4, kv_heads=2, head_dim=8, length=40, r=6, share=share)
    found = [tuple(x.shape) for x in (layer.e, layer.f) if x is not None]
    assert found == shapes
    x, padding = torch.randn(2, 30, 24), torch.arange(30).expand(2, 30) > 20
    due = as_function(layer, x, None, lambda q, k, v: ap.linformer(q, k, v, layer.e, layer.f, key_padding_mask=padding))
    torch.testing.assert_close(layer(x, key_padding_mask=padding), due)


def test_linformer_shares_a_projection_over_layers_and_takes_means() -> None:
    shared = nn.Parameter(torch.randn(1, 6, 40))
    layers = nn.Sequential(*(Linformer(16, 2, length=40, r=6, projection=shared) for _ in range(3)))
    assert sum(x is shared for x in layers.parameters()) == 1
    layers(torch.randn(1, 20, 16)).sum().backward()
    assert shared.grad.abs().sum() > 0
    means = Linformer(16, 2, length=12, r=3, kind="mean")
    assert {name for name, _ in means.named_parameters()} == set(NAMES)
    x = torch.randn(1, 12, 16)
    torch.testing.assert_close(means.e @ x[0], x.unflatten(1, (3, 4)).mean(2))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", [LinearAttention, Performer, Linformer])
def test_layers_train_as_one_graph(kind: type[nn.Module]) -> None:
    torch._dynamo.reset()
    layer = kind(16, 2, **({"length": 32, "r": 4} if kind is Linformer else {"mask": rt.CAUSAL}))
    x = torch.randn(2, 20, 16)
    layer(x).sum().backward()
    due = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x).sum().backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p.grad, due[name])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearAttention(16, 3), "dim is 16 and heads is 3; heads must divide dim"),
        (lambda: LinearAttention(16, 2, mask=rt.Window(3)), "linear attention has FULL and CAUSAL"),
        (lambda: LinearAttention(16, 2, feature="exp"), "feature is 'exp'; must be 'elu', 'relu' or 'identity'"),
        (lambda: LinearAttention(16, 2, dropout=0.1), "has no argument dropout"),
        (lambda: Performer(16, 2, mask=rt.Window(3)), "Performer has FULL and CAUSAL"),
        (lambda: Performer(16, 2, m=7, kind="hyperbolic"), "m is 7; must be even"),
        (lambda: Linformer(16, 2, length=0), "length is 0; must be an int of at least 1"),
        (lambda: Linformer(16, 2, length=10, r=3, kind="mean"), "length is 10 and r is 3; r must divide length"),
        (lambda: Linformer(16, 2, length=8, share="layers"), "share is 'layers'; must be 'none', 'heads' or 'keys-values'"),
        (lambda: Linformer(16, 2, length=8, r=4, projection=torch.zeros(1, 4, 8)), r"must be a parameter \(1, 4, 8\)"),
        (lambda: Linformer(16, 2, length=8, mask=rt.CAUSAL), "has no argument mask"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence(make, message: str) -> None:
    with pytest.raises(rt.InvalidInput, match=message):
        make()


def test_attention_has_the_names_of_its_parameters() -> None:
    names = list(Attention(16, 2, sinks=True).state_dict())
    assert names == ["sinks", *NAMES]


def test_importing_rooftile_imports_no_approximate_method() -> None:
    program = "import sys, rooftile; print('rooftile.approximate' in sys.modules, rooftile.nn.Performer(8, 2, m=4).m_features)"
    program = program.replace(".m_features", ".features.m")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "4"]
    with pytest.raises(AttributeError, match=r"module 'rooftile.nn' has no attribute 'RetNet'"):
        _ = rt.nn.RetNet
