"""The modules of the methods that choose keys: their functions behind projections, training, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftile as rt
from rooftile import approximate as ap
from rooftile.nn import NativeSparse, Reformer, Routing, SparseTransformer

SMALL: dict[str, Any] = {"block_size": 8, "length": 8, "stride": 4, "count": 4, "window": 9}
LAYERS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "strided": (SparseTransformer, {"stride": 6}),
    "fixed": (SparseTransformer, {"stride": 6, "pattern": "fixed", "summary": 2, "sets": "split"}),
    "reformer": (Reformer, {"mask": rt.CAUSAL, "chunk": 8, "rounds": 2}),
    "reformer-strict": (Reformer, {"mask": rt.CAUSAL, "chunk": 8, "rounds": 2, "strict": True, "buckets": 4}),
    "routing": (Routing, {"mask": rt.CAUSAL, "clusters": 3}),
    "routing-strict": (Routing, {"mask": rt.CAUSAL, "clusters": 3, "strict": True}),
    "native": (NativeSparse, SMALL),
    "native-mean": (NativeSparse, SMALL | {"compression": "mean"}),
    "native-linear": (NativeSparse, SMALL | {"compression": "linear"}),
}


def made(name: str, **more: Any) -> nn.Module:
    kind, options = LAYERS[name]
    return kind(24, 4, kv_heads=2, head_dim=8, **options, **more)


def heads(x: Tensor, n: int) -> Tensor:
    return x.unflatten(-1, (n, 8))


@pytest.mark.parametrize("name", LAYERS)
def test_every_parameter_has_a_gradient_and_eager_agrees(name: str) -> None:
    layer, other = made(name), made(name, backend="eager")
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 40, 24)
    found, due = (m(x) for m in (layer, other))
    assert found.shape == x.shape
    torch.testing.assert_close(found, due)
    (found.square().sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_the_sparse_transformer_is_its_function() -> None:
    layer, x = made("fixed"), torch.randn(2, 40, 24)
    q, k, v = heads(layer.q(x), 4), heads(layer.k(x), 2), heads(layer.v(x), 2)
    o = ap.sparse_transformer(q, k, v, pattern="fixed", stride=6, summary=2, sets="split")
    torch.testing.assert_close(layer(x), layer.out(o.flatten(-2)))
    assert "pattern='fixed', stride=6, summary=2, sets='split'" in repr(layer)


def test_reformer_has_one_projection_for_queries_and_keys() -> None:
    layer, x = made("reformer"), torch.randn(2, 40, 24)
    assert {name.split(".")[0] for name, _ in layer.named_parameters()} == {"q", "v", "out"}
    o = ap.reformer(heads(layer.q(x), 4), heads(layer.v(x), 2), rt.CAUSAL, chunk=8, rounds=2)
    torch.testing.assert_close(layer(x), layer.out(o.flatten(-2)))


def test_routing_moves_its_centroids_in_training_alone() -> None:
    layer, x = made("routing"), torch.randn(2, 40, 24)
    before = layer.centroids.clone()
    layer.eval()(x)
    assert torch.equal(layer.centroids, before)
    assert layer.loss is None
    layer.train()(x)
    q, k = heads(layer.q(x), 4), heads(layer.k(x), 2)
    _, members = ap.routing(q, k, k, before, rt.CAUSAL)
    torch.testing.assert_close(layer.centroids, ap.update_centroids(before, q, k, members))
    torch.testing.assert_close(layer.loss, ap.commitment_loss(q, k, before))
    layer.loss.backward()
    assert layer.q.weight.grad.abs().sum() > 0
    assert "centroids" in layer.state_dict()
    assert "centroids" not in dict(layer.named_parameters())


def test_native_sparse_is_its_function() -> None:
    layer, x = made("native"), torch.randn(2, 40, 24)
    k, v = (project(x).unflatten(-1, (3, 2, 8)) for project in (layer.k, layer.v))
    sizes = {"length": 8, "stride": 4}
    pair = [
        ap.compress(y[:, :, 0], phi=layer.phi[n], places=layer.places[i], **sizes)
        for i, (n, y) in enumerate({"k": k, "v": v}.items())
    ]
    gates = layer.gates(x).unflatten(-1, (4, 3)).sigmoid()
    branches = ((y[:, :, n] for y in (k, v)) for n in (1, 2))
    o = ap.native_sparse(heads(layer.q(x), 4), tuple(pair), *(tuple(b) for b in branches), gates, **SMALL)
    torch.testing.assert_close(layer(x), layer.out(o.flatten(-2)))


def test_native_sparse_takes_packed_texts() -> None:
    layer = made("native")
    texts = [torch.randn(n, 24) for n in (20, 3, 33)]
    found = layer(torch.cat(texts), cu=torch.tensor([0, 20, 23, 56], dtype=torch.int32))
    torch.testing.assert_close(found, torch.cat([layer(x[None])[0] for x in texts]))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["strided", "reformer", "routing", "native"])
def test_layers_compile(name: str) -> None:
    torch._dynamo.reset()
    layer, x = made(name).eval(), torch.randn(2, 40, 24)
    with torch.no_grad():
        due = layer(x)
        torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(x), due)


@pytest.mark.parametrize(
    ("make", "due"),
    [
        (lambda: SparseTransformer(24, 1, sets="split"), "sets is 'split' and q has 1 head"),
        (lambda: SparseTransformer(24, 2, pattern="fixed", stride=4, summary=5), "summary is 5; stride is 4"),
        (lambda: SparseTransformer(24, 2, mask=rt.CAUSAL), "has no argument mask"),
        (lambda: Reformer(24, 2, buckets=3), "buckets is 3; must be even"),
        (lambda: Reformer(24, 2, strict=True), "strict is True and mask is full"),
        (lambda: Reformer(24, 2, mask=rt.Window(3)), "reformer has FULL and CAUSAL"),
        (lambda: Routing(24, 2, clusters=0), "clusters is 0; must be an int of at least 1"),
        (lambda: Routing(24, 2, strict=True, width=3), "width is 3 with strict"),
        (lambda: Routing(24, 2, decay=1.5), r"decay is 1\.5; must be a number above 0 and at most 1"),
        (lambda: NativeSparse(24, 2, length=30), "length is 30; must be a multiple of stride, 16"),
        (lambda: NativeSparse(24, 2, compression="max"), "compression is 'max'; must be 'mlp', 'linear' or 'mean'"),
        (lambda: NativeSparse(24, 2, dropout=0.1), "has no argument dropout"),
    ],
)
def test_bad_input_is_one_sentence(make, due: str) -> None:
    with pytest.raises(rt.InvalidInput, match=due):
        make()
