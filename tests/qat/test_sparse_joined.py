"""2:4 weights with what else a prepared layer may have: learned scales, and activations in MXFP4."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

import rooftile as rt
from rooftile.errors import InvalidInput
from rooftile.numerics import quantise_blocks
from rooftile.qat.rounding.learned import with_scales
from rooftile.weights.two_four import Recipe, two_four
from tests.qat.models import inputs, mlp
from tests.qat.test_save import ROOM, VOCAB, decoder, greedy

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
# format, and options beside sparsity
JOINED = [("int4:32", {"estimator": "lsq"}), ("int8", {"estimator": "lsq"}), ("mxfp4", {"activations": "mxfp4"})]


def sparse(format: str, options: dict[str, str], **recipe: float) -> nn.Sequential:
    return rt.qat.prepare(mlp(), format, sparsity=Recipe(**{"decay": 0.5} | recipe), **options)


def step(model: nn.Module, optimiser: torch.optim.Optimizer, seed: int) -> Tensor:
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(seed))
    loss = model(x).square().mean()
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    return loss.detach()


def test_learned_scales_of_what_is_kept_by_their_formulas() -> None:
    layer, x = sparse("int4:32", {"estimator": "lsq"})[0], inputs()
    kept = layer.parameter.detach() * two_four(layer.parameter)
    codes = with_scales(kept, "int4", layer.weight_scale.detach())
    due = codes.dequantise(torch.float32)
    # what is left out has the code of zero
    assert not due[~two_four(layer.parameter)].any()
    y = layer(x)
    torch.testing.assert_close(y, functional.linear(x, due, layer.bias))
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    y.backward(dy)
    dw = dy.flatten(0, -2).T @ x.flatten(0, -2)
    n = kept.shape[1] // codes.scales.shape[1]
    steps = kept.unflatten(1, (-1, n)) / codes.scales.float().unsqueeze(-1)
    inside = (steps >= -8) & (steps <= 7)
    slopes = torch.where(inside, steps.round() - steps, steps.clamp(-8, 7))
    torch.testing.assert_close(layer.weight.grad, dw * inside.flatten(1))
    torch.testing.assert_close(layer.weight_scale.grad, (dw.unflatten(1, (-1, n)) * slopes).sum(-1) / (7 * n) ** 0.5)


def test_activations_and_weights_by_their_definitions() -> None:
    layer, x = sparse("mxfp4", {"activations": "mxfp4"})[0], inputs()
    kept = layer.parameter.detach() * two_four(layer.parameter)
    rows, w = quantise_blocks(x, "mxfp4").dequantise(), rt.quantise_weight(kept, "mxfp4").dequantise()
    torch.testing.assert_close(layer(x), functional.linear(rows, w, layer.bias))
    assert repr(layer).endswith("mxfp4 2:4, activations in mxfp4)")


@pytest.mark.parametrize(("format", "options"), JOINED)
def test_trained_resumed_and_converted(format: str, options: dict[str, str]) -> None:
    model = sparse(format, options, refresh=2)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for seed in range(3):
        step(model, optimiser, seed)
    assert all(one.steps == 3 and "2:4" in one.format for one in rt.qat.status(model).layers)
    resumed = sparse(format, options, refresh=2)
    resumed.load_state_dict(model.state_dict())
    rt.qat.load_state_dict(resumed, rt.qat.state_dict(model))
    others = torch.optim.SGD(resumed.parameters(), lr=0.05)
    for seed in range(3, 6):
        assert torch.equal(step(model, optimiser, seed), step(resumed, others, seed))
    with torch.no_grad():
        due = model(inputs())
        converted = rt.qat.convert(copy.deepcopy(model))
        assert torch.equal(converted(inputs()), due)
        zeros = converted[0].quantised.dequantise() == 0
        assert zeros[~model[0].mask].all()
    rt.qat.restore(model)
    assert dict(model.named_buffers()) == {}
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in mlp().named_parameters()]


@pytest.mark.parametrize(("format", "options"), JOINED)
def test_compiled_training_equals_eager_and_is_compiled_once(format: str, options: dict[str, str]) -> None:
    model, other = sparse(format, options), sparse(format, options)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(other, backend=counter, fullgraph=True)
    first, second = (torch.optim.SGD(one.parameters(), lr=0.05) for one in (model, other))
    for seed in range(4):
        torch.testing.assert_close(step(compiled, second, seed), step(model, first, seed))
    assert counter.frame_count == 1


def test_the_decay_and_learned_scales_wait_for_the_start() -> None:
    model = rt.qat.prepare(mlp(), "int4:32", estimator="lsq", start_step=2, sparsity=Recipe(decay=0.5))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    first = model[0].weight_scale.detach().clone()
    step(model, optimiser, 0)
    assert torch.equal(model[0].weight_scale, first)
    # no rounding and no decay yet
    plain = mlp()
    step(plain, torch.optim.SGD(plain.parameters(), lr=0.05), 0)
    assert torch.equal(model[0].weight, plain[0].weight)
    step(model, optimiser, 1)
    due = 2 * model[0].parameter.detach().unflatten(1, (-1, 32)).abs().mean(-1) / 7**0.5
    torch.testing.assert_close(model[0].weight_scale.detach(), due)
    step(model, optimiser, 2)
    assert not torch.equal(model[0].weight_scale.detach(), due)
    assert (model[0].weight_scale > 0).all()


def test_an_optimiser_of_before_is_refused_and_changes_nothing() -> None:
    model = mlp()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    rt.qat.prepare(model, "int4:32", estimator="lsq", sparsity=Recipe(decay=0.5))
    model(inputs()).square().mean().backward()
    before = [x.grad.clone() for x in model.parameters() if x.grad is not None]
    with pytest.raises(InvalidInput, match=r"the optimiser holds 0.weight and not its scales"):
        optimiser.step()
    # no decay was added
    assert all(map(torch.equal, before, [x.grad for x in model.parameters() if x.grad is not None]))


def test_the_engine_serves_codes_of_learned_scales_with_zeros_between(tmp_path: Path) -> None:
    model = rt.qat.prepare(decoder(), "int4:32", skip=("head",), sparsity=Recipe(), estimator="lsq")
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(VOCAB, (4, 20), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        logits = model(tokens[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()
    rt.qat.save(model.eval(), tmp_path)
    asked = rt.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (output,) = rt.LLM(tmp_path, **ROOM).generate([[3, 1, 4, 1, 5]], asked)
    assert list(output.outputs[0].token_ids) == greedy(model, [3, 1, 4, 1, 5], 12)


class Tied(nn.Module):
    """An embedding whose weight is that of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(32, 64), nn.Linear(64, 32, bias=False)
        self.out.weight = self.embed.weight

    def settings(self) -> dict[str, object]:
        """Nothing."""
        return {}

    def stored(self) -> list[tuple[str, Tensor]]:
        """One weight."""
        return [("embed.weight", self.embed.weight)]


def test_bad_input() -> None:
    recipe = Recipe()
    with pytest.raises(InvalidInput, match=r"^0 has the format None; lsq learns scales of int4, w8, int8: take another"):
        rt.qat.prepare(mlp(), None, sparsity=recipe, estimator="lsq")
    with pytest.raises(InvalidInput, match=r"^0 has the format None and its activations mxfp4; both must be in one format: give"):
        rt.qat.prepare(mlp(), None, sparsity=recipe, activations="mxfp4")
    plan = rt.plan(mlp(), inputs(), formats=["int8"], measure=False)
    with pytest.raises(InvalidInput, match=r"^sparsity is Recipe\(.*\), and the plan has no 2:4 layer; leave it out$"):
        rt.qat.prepare(mlp(), plan, sparsity=recipe)
    model = Tied()
    with pytest.raises(InvalidInput, match=r"^embed is int8 and out int8 2:4, and they share a weight; prepare both for one"):
        rt.qat.prepare(model, {"*": "int8"}, sparsity=recipe)
    assert [type(layer) for layer in model.children()] == [type(layer) for layer in Tied().children()]
