"""`Plan`: applied, trained for, kept as JSON, shown."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import rooftile as rt
from rooftile.planning import Plan
from tests.planning.models import Blocks, inputs, llama, mlp, tokens


def planned(model: nn.Module | None = None, **options: object) -> Plan:
    options = {"formats": ["int4:32"], "measure": False, "skip": ["head"]} | options
    return rt.plan(llama() if model is None else model, tokens(), **options)


def mixed() -> Plan:
    """A plan of several formats, some layers of which stay."""
    plan = planned(formats=["bf16", "fp8", "int4:32"], data=tokens(), max_loss=1.0)
    values = json.loads(plan.to_json())
    for n, layer in enumerate(values["layers"][:-1]):
        layer["chosen"] = ("int4:32", "fp32", "fp8")[n % 3]
    return Plan.from_json(json.dumps(values))


def test_a_plan_that_is_kept_as_json_gives_the_same_model_elsewhere() -> None:
    plan, model = mixed(), llama()
    read = Plan.from_json(plan.to_json())
    assert read == plan
    assert read.to_json() == plan.to_json()
    here, there = plan.apply(copy.deepcopy(model)), read.apply(copy.deepcopy(model))
    assert here.state_dict().keys() == there.state_dict().keys()
    assert all(torch.equal(x, there.state_dict()[name]) for name, x in here.state_dict().items())
    assert torch.equal(here(tokens()), there(tokens()))
    assert {type(here.get_submodule(name)).__name__ for name in plan.weights} == {"QuantisedLinear"}
    assert type(here.layers[0].mixer.out) is nn.Linear, "it stays"


def test_an_applied_layer_multiplies_as_linear_does() -> None:
    model = mlp()
    plan = rt.plan(model, inputs(), formats=["int8"], measure=False)
    due = rt.linear(inputs(), rt.quantise_weight(model[0].weight.detach(), "int8"), model[0].bias)
    assert torch.equal(plan.apply(model)[0](inputs()), due)


@pytest.mark.parametrize("autocast", [False, True])
def test_2_4_layers_are_masked_and_timed_as_they_are_applied(autocast: bool) -> None:
    model = mlp()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plan = rt.plan(model, inputs(), formats=["2:4", "int8"], measure=True)
    (first, *_), weight = plan.layers, model[0].weight.detach()
    options, mask = {option.format: option for option in first.options}, rt.sparsity.two_four(weight)
    assert options["2:4"].measured_us > 0
    assert options["2:4"].nbytes == rt.sparsity.compress(weight.to(torch.bfloat16 if autocast else torch.float32), mask).nbytes
    assert options["2:4"].loss > 10 * options["int8"].loss
    plan = rt.plan(model, inputs(), formats=["2:4"], measure=False)
    assert set(plan.weights.values()) == {"2:4"}
    applied = plan.apply(copy.deepcopy(model))
    assert {type(applied.get_submodule(name)) for name in plan.weights} == {rt.qat.SparseLinear}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        due = nn.functional.linear(inputs(), weight * mask, model[0].bias)
        found = applied[0](inputs())
    assert found.dtype == due.dtype
    # in bf16 sums are rounded in another order
    torch.testing.assert_close(found, due, **{"rtol": 0.02, "atol": 1e-3} if autocast else {})
    assert "2:4" in str(plan)
    assert "2:4" in plan.to_html()


def test_prepare_trains_for_the_plan() -> None:
    plan = mixed()
    model, other = plan.prepare(llama()), rt.qat.prepare(llama(), plan)
    formats = {layer.name: layer.format for layer in rt.qat.status(model).layers}
    assert formats == plan.weights
    assert rt.qat.status(other).layers == rt.qat.status(model).layers
    assert torch.equal(model(tokens()), other(tokens()))
    # a prepared model that is converted equals one that the plan was applied to
    applied = plan.apply(llama())
    rt.qat.convert(model)
    assert torch.equal(model(tokens()), applied(tokens()))


def test_a_name_is_no_pattern() -> None:
    """Else "0" would mean "1.0" too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Sequential(nn.Linear(128, 128)))
    plan = rt.plan(model, inputs(), formats=["int8"], measure=False)
    values = json.loads(plan.to_json())
    values["layers"][1]["options"].append(values["layers"][1]["options"][0] | {"format": "fp32"})
    values["layers"][1]["chosen"] = "fp32"
    Plan.from_json(json.dumps(values)).prepare(model)
    assert [layer.name for layer in rt.qat.status(model).layers] == ["0"]


def test_a_module_with_two_names_is_prepared_once() -> None:
    ids = torch.arange(24).view(2, 12)
    plan = rt.plan(Blocks(), ids, formats=["int8"], measure=False)
    model = plan.prepare(Blocks())
    assert model.blocks[0].again is model.blocks[0].twice
    rt.qat.convert(model)
    assert torch.equal(model.eval()(ids), plan.apply(Blocks()).eval()(ids))


@pytest.mark.parametrize("use", ["apply", "prepare"])
def test_a_plan_for_another_model_names_the_first_module_that_differs(use: str) -> None:
    plan = planned()
    model = llama()
    model.layers[1].gate = nn.Linear(64, 96, bias=False)
    with pytest.raises(rt.InvalidInput, match=r"the plan is for another model: layers.1.gate is Linear \(96, 64\), and must be"):
        getattr(plan, use)(model)
    with pytest.raises(rt.InvalidInput, match=r"the plan is for another model: layers.0.mixer.q is missing"):
        getattr(plan, use)(mlp())
    model.layers[1].gate = nn.Identity()
    with pytest.raises(rt.InvalidInput, match=r"layers.1.gate is Identity, and must be a linear layer \(128, 64\)"):
        getattr(plan, use)(model)
    with pytest.raises(rt.InvalidInput, match="model is str; must be a torch"):
        getattr(plan, use)("model")
    assert type(model.layers[0].gate) is nn.Linear, "nothing was changed"


def test_a_plan_is_applied_once() -> None:
    plan = planned()
    model = plan.apply(llama())
    with pytest.raises(rt.InvalidInput, match=r"layers.0.mixer.q is QuantisedLinear, and must be a linear layer"):
        plan.apply(model)


def test_a_plan_that_keeps_all_layers_changes_nothing() -> None:
    plan = planned(formats=["bf16"])
    assert plan.weights == "auto"
    assert torch.equal(plan.apply(llama())(tokens()), llama()(tokens()))
    with pytest.raises(rt.InvalidInput, match="keeps all layers as they are, so there is nothing to train for"):
        plan.prepare(llama())
    with pytest.raises(rt.InvalidInput, match="group is 32 and format a plan"):
        rt.qat.prepare(llama(), planned(), group=32)
    with pytest.raises(rt.InvalidInput, match=r"skip is \['\*.up'\] and format a plan, which has chosen .*; leave skip out"):
        rt.qat.prepare(llama(), planned(), skip=["*.up"])


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("no", "this is not JSON"),
        ("[]", "the form None; must be 'rooftile.plan/1'"),
        ('{"form": "rooftile.plan/1"}', "no whole plan"),
        ('{"form": "rooftile.plan/1", "layers": [{}], "others": [], "total": {}, "notes": []}', "no whole plan"),
    ],
)
def test_json_of_something_else_is_refused(written: str, words: str) -> None:
    with pytest.raises(rt.InvalidInput, match=words):
        Plan.from_json(written)


def test_the_table_has_every_column_and_both_losses() -> None:
    plan = planned(formats=["bf16", "int4:32"], data=tokens(), max_loss=1.0, measure=True)
    text = str(plan)
    columns = ("module", "operator", "M, N, K", "FLOPs", "bytes", "F/B", "ridge", "bound", "chosen", "fuse with")
    for word in (*columns, "predicted", "measured"):
        assert word in text
    assert "layers.*.mixer.q, k, v (2 times)" in text
    assert "99, 64+64+64, 64" in text
    assert f"of the whole {plan.total.measured_loss:.3g}" in text
    assert f"sum {plan.total.loss:.3g}" in text
    assert "one product of its parts" in text
    assert max(map(len, text.splitlines())) < 180


def test_the_totals_begin_with_what_was_chosen() -> None:
    assert "chosen: all 9 layers stay as they are" in str(planned(formats=["bf16"]))
    plan = mixed()
    counts = [sum(layer.chosen == word for layer in plan.layers) for word in ("int4:32", "fp8")]
    assert f"chosen: int4:32 for {counts[0]}, fp8 for {counts[1]} of 9 layers; 4 stay as they are" in str(plan)
    assert "chosen: int4:32 for 8 of 9 layers; 1 stays as it is" in str(planned())


def test_operators_are_named_as_layers_are() -> None:
    plan = planned()
    assert any(other.module.startswith("layers.") for other in plan.others)
    assert not any(other.module.startswith("TrainableDecoder.") for other in plan.others)


def test_a_page_has_the_layers_and_the_plan_itself() -> None:
    pytest.importorskip("jinja2")
    plan = mixed()
    page = plan.to_html()
    assert "<svg" in page
    assert "layers.0.mixer.q, k, v" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    kept = page.partition('<script type="application/json" id="plan">')[2].partition("</script>")[0]
    assert Plan.from_json(kept) == plan
