"""2:4 in plans: of checkpoints, with the masks that the engine serves, and of modules, which are then trained for it."""

from __future__ import annotations

import copy
import json
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import rooftile as rt
from rooftile.models import Decoder
from rooftile.planning import Plan
from rooftile.weights.two_four import Recipe, TwoFour, two_four
from tests.models.quantised import PROJECTIONS
from tests.planning.models import Blocks, inputs, llama, mlp, tokens

# texts and steps of all plans of the checkpoint
OPTIONS = {"rows": {"decode": 4, "prompt": 32}, "context": 16, "measure": False, "device": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    llama().save(path)
    return path


def loss_of(model: nn.Module, data: Tensor) -> float:
    with torch.no_grad():
        return cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten()).item()


def test_a_checkpoint_by_hand(folder: Path) -> None:
    """The third layer: gate and up, N = 256, K = 64, of which a decode step of 4 rows is half of the steps.

    A CPU spreads the weight first: it reads 256 (32 4 + 8) bytes and writes 4 256 64, in 10.03 µs and a launch. Then it
    multiplies, with 4 rows 131,072 FLOPs in 1.3 µs and 4 (4 64 + 4 256 + 256 64) bytes in 7.07 µs, and a launch; with 32 rows
    1,048,576 FLOPs in 10.49 µs, and 4 (32 64 + 32 256 + 256 64) = 106,496 bytes in 10.65 µs.
    """
    data = tokens()
    plan = rt.plan(folder, data=data, formats=["bf16", "2:4"], **OPTIONS)
    layer = plan.layers[2]
    assert layer.name == "layers.0.mlp.gate_proj, up_proj"
    kept, sparse = layer.options
    spread = (256 * (32 * 4 + 8) + 4 * 256 * 64) / 1e4 + 5
    due = 0.5 * (spread + 7.0656 + 5) + 0.5 * (spread + 10.6496 + 5)
    assert (sparse.format, sparse.nbytes) == ("2:4", 256 * 64 * 4 * 17 // 32)
    assert sparse.predicted_us == pytest.approx(due)
    assert kept.predicted_us == pytest.approx(0.5 * (7.0656 + 5) + 0.5 * (10.6496 + 5))
    # the loss with this layer alone masked
    model = llama()
    for linear in (model.layers[0].gate, model.layers[0].up):
        linear.weight.data.mul_(two_four(linear.weight.detach()))
    assert sparse.loss == pytest.approx(max(loss_of(model, data) - loss_of(llama(), data), 0), abs=2e-5)
    assert layer.chosen == "fp32", "on a CPU it is slower"
    assert plan.layers[-1].why_not == {"2:4": "LLM keeps the output head as it is"}


def test_the_choice_is_the_best_of_all(folder: Path) -> None:
    """A CPU multiplies a decoder in 16 bits by definitions: that of 2:4 stays in 16 bits, and that of INT4 has 32."""
    model = Decoder.from_folder(folder, dtype=torch.bfloat16)
    free = rt.plan(model, formats=["bf16", "2:4", "int4:32"], **OPTIONS)
    layers = [layer for layer in free.layers if len(layer.options) > 1]
    most = sum(max(option.loss for option in layer.options) for layer in layers)
    plan = rt.plan(model, formats=["2:4", "int4:32"], max_loss=most * 0.6, **OPTIONS)
    layers = [layer for layer in plan.layers if len(layer.options) > 1]
    assert {layer.chosen for layer in layers} == {"2:4", "int4:32"}
    choices = [
        (sum(option.us for option in each), sum(option.loss for option in each))
        for each in product(*(layer.options for layer in layers))
    ]
    # losses are rounded up by a step each, at most
    allowed = most * 0.6
    best = min(us for us, loss in choices if loss <= allowed)
    almost = min(us for us, loss in choices if loss <= allowed * (1 - len(layers) / 1000))
    assert best <= sum(layer.choice.us for layer in layers) <= almost
    assert sum(layer.choice.loss for layer in layers) <= allowed


def mixed(plan: Plan, words: tuple[str, ...]) -> Plan:
    """The plan with other choices, in turns."""
    values = json.loads(plan.to_json())
    open_ones = [layer for layer in values["layers"] if len(layer["options"]) > 1]
    for n, layer in enumerate(open_ones):
        layer["chosen"] = words[n % len(words)]
    return Plan.from_json(json.dumps(values))


def test_the_weights_of_a_plan_are_those_that_llm_reads(folder: Path) -> None:
    plan = mixed(rt.plan(folder, formats=["bf16", "2:4", "int4:32"], **OPTIONS), ("2:4", "int4:32", "fp32"))
    assert plan.weights["layers.0.self_attn.q_proj"] == "2:4"
    applied, read = plan.apply(Decoder.from_folder(folder)), Decoder.from_folder(folder, weights=plan.weights)
    for layer, other in zip(applied.layers, read.layers, strict=True):
        for name in PROJECTIONS:
            assert torch.equal(layer.get_submodule(name).dequantised(), other.get_submodule(name).dequantised())
    (part,) = read.layers[0].qkv.parts
    assert isinstance(part, TwoFour)
    llm = rt.LLM(folder, weights=plan.weights, device="cpu", num_blocks=20)
    (found,) = llm.generate([[1, 2, 3]], rt.SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(found.outputs[0].token_ids) == 3


def test_a_decoder_is_as_before_and_is_timed(folder: Path) -> None:
    decoder = Decoder.from_folder(folder)
    before = [(id(x), x.clone()) for x in decoder.parameters()]
    plan = rt.plan(decoder, rows={"decode": 4}, context=16, data=tokens(), formats=["2:4"])
    assert all(id(x) == one and torch.equal(x, y) for x, (one, y) in zip(decoder.parameters(), before, strict=True))
    for layer in plan.layers[:-1]:
        assert layer.choice.measured_us == pytest.approx(layer.choice.predicted_us)
    assert plan.total.single_us.keys() == {"2:4"}


PLANNED = ("2:4", "int4:32", "fp32")


def planned() -> Plan:
    return mixed(rt.plan(llama(), tokens(), formats=["bf16", "2:4", "int4:32"], skip=["head"], measure=False), PLANNED)


def test_prepare_gives_2_4_layers_a_recipe_and_others_their_format() -> None:
    plan = planned()
    model, other = plan.prepare(llama()), rt.qat.prepare(llama(), plan)
    formats = {layer.name: layer.format.partition(",")[0] for layer in rt.qat.status(model).layers}
    assert formats == plan.weights
    assert torch.equal(model(tokens()), other(tokens()))
    sparse = model.get_submodule("layers.0.mixer.q")
    assert sparse.qat.masking.recipe == Recipe()
    # a prepared model that is converted equals one that the plan was applied to
    applied = plan.apply(llama())
    rt.qat.convert(other)
    assert torch.equal(other(tokens()), applied(tokens()))
    assert type(other.get_submodule("layers.0.mixer.q")) is rt.qat.SparseLinear


def test_the_recipe_may_be_given_and_is_trained_with() -> None:
    model = planned().prepare(llama(), sparsity=Recipe(transposable=True, decay=0.25))
    layer = model.get_submodule("layers.0.mixer.q")
    assert torch.equal(layer.kept_weight() != 0, two_four(layer.weight.detach(), transposable=True))
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    (0.0 * model(tokens()).sum()).backward()
    optimizer.step()
    left_out = ~two_four(before, transposable=True)
    # without a gradient the decay alone is left
    torch.testing.assert_close(layer.weight.detach(), before - 0.25 * left_out * before)
    assert {one.steps for one in rt.qat.status(model).layers} == {1}


def test_what_cannot_be_trained_leaves_the_model_as_it_was() -> None:
    plan, model = planned(), llama()
    frozen = [name for name, word in plan.weights.items() if word == "2:4"][-1]
    model.get_submodule(frozen).weight.requires_grad_(False)
    with pytest.raises(rt.InvalidInput, match=f"^{frozen}.weight is frozen, and 2:4 trains all of a weight; unfreeze it"):
        plan.prepare(model)
    assert type(model.get_submodule("layers.0.mixer.q")) is nn.Linear
    model.get_submodule(frozen).weight.requires_grad_(True)
    plan.prepare(model)
    with pytest.raises(rt.InvalidInput, match=r"^layers.0.mixer.q is prepared already; restore the model first$"):
        plan.prepare(model)
    only = rt.plan(mlp(), inputs(), formats=["int8"], measure=False)
    with pytest.raises(rt.InvalidInput, match=r"sparsity is Recipe\(.*\), and the plan has no 2:4 layer; leave it out"):
        only.prepare(mlp(), sparsity=Recipe())
    plain = rt.plan(nn.Sequential(nn.Linear(64, 30)), torch.randn(2, 64), formats=["2:4"], measure=False)
    with pytest.raises(rt.InvalidInput, match=r"^0.weight \(30, 64\) cannot be 2:4; both sizes must be multiples of 4"):
        plain.prepare(nn.Sequential(nn.Linear(64, 30)), sparsity=Recipe(transposable=True))


def test_a_module_with_two_names_and_a_plan_of_2_4_alone() -> None:
    ids = torch.arange(24).view(2, 12)
    plan = rt.plan(Blocks(), ids, formats=["2:4"], measure=False)
    model = plan.prepare(Blocks())
    assert model.blocks[0].again is model.blocks[0].twice
    rt.qat.convert(model)
    assert torch.equal(model.eval()(ids), plan.apply(Blocks()).eval()(ids))
    assert torch.equal(copy.deepcopy(model).eval()(ids), model.eval()(ids))
