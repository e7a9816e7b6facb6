"""Plans of modules: what is one item, what is left as it was, and under which modes it works."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import rooftile as rt
from rooftile.planning import Plan
from tests.planning.models import Blocks, inputs, llama, mlp, tokens

IDS = torch.arange(24).view(2, 12)


def names(plan: Plan) -> list[str]:
    return [layer.name for layer in plan.layers]


def test_projections_of_one_input_are_one_item() -> None:
    plan = rt.plan(llama(), tokens(), measure=False)
    assert names(plan)[:4] == ["layers.0.mixer.q, k, v", "layers.0.mixer.out", "layers.0.gate, up", "layers.0.down"]
    assert names(plan)[-1] == "head"
    assert [part.N for part in plan.layers[0].parts] == [64, 64, 64]
    assert plan.layers[0].fuse_with == "one product of its parts"
    assert plan.layers[1].fuse_with == ""


def test_an_item_has_one_format_for_all_its_parts() -> None:
    plan = rt.plan(llama(), tokens(), formats=["int4:32"], skip=["head"], measure=False)
    assert plan.weights == {
        f"layers.{n}.{name}": "int4:32"
        for n in range(2) for name in ("mixer.q", "mixer.k", "mixer.v", "mixer.out", "gate", "up", "down")
    }  # fmt: skip


def test_a_shared_module_counts_once_and_its_calls_twice() -> None:
    plan = rt.plan(Blocks(), IDS, measure=False)
    shared = [layer for layer in plan.layers if layer.name.endswith("again")]
    assert len(shared) == 2
    assert [[(load.rows, load.calls) for load in layer.loads] for layer in shared] == [[(24, 2.0)]] * 2
    assert not any("twice" in name for name in names(plan))
    assert shared[0].choice.nbytes == 64 * 64 * 4
    applied = rt.plan(Blocks(), IDS, formats=["int8"], measure=False).apply(Blocks())
    assert applied.blocks[0].again is applied.blocks[0].twice
    assert isinstance(applied.blocks[0].twice, rt.qat.QuantisedLinear)


def test_a_weight_that_another_module_has_keeps_its_dtype() -> None:
    plan = rt.plan(Blocks(), IDS, formats=["bf16", "int8"], measure=False)
    assert plan.layers[-1].name == "head"
    assert plan.layers[-1].why_not == {"int8": "it shares its weight with embedding"}
    assert plan.layers[-1].chosen == "fp32"


def test_operators_beside_the_layers_have_their_bounds() -> None:
    plan = rt.plan(Blocks(), IDS, measure=False)
    found = {other.operator: other for other in plan.others}
    assert {"_softmax", "silu", "native_layer_norm", "embedding", "bmm", "mul"} <= found.keys()
    assert not {"addmm", "mm"} & found.keys(), "products of layers are items"
    assert found["silu"].fuse_with == "mul"
    # silu's result is neither written nor read
    assert found["silu"].saved_bytes + next(o for o in plan.others if o.fuse_with == "silu").saved_bytes == 2 * 4 * 2 * 24 * 128
    assert all(other.bound in ("memory", "compute", "overhead", "") for other in plan.others)
    assert found["native_layer_norm"].flops == 8 * 2 * 24 * 64


def test_convolutions_appear_with_their_bound() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 128))
    plan = rt.plan(net, torch.randn(4, 3, 40, 40), measure=False)
    convolution = next(other for other in plan.others if "convolution" in other.operator)
    assert convolution.flops == 2 * 4 * 64 * 38 * 38 * 27
    assert convolution.bound == "compute"
    assert names(plan) == ["4"]


def state(model: nn.Module) -> dict[str, Any]:
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m)) for m in model.modules()]
    return {
        "state": {name: x.clone() for name, x in model.state_dict().items()},
        "same": [id(x) for x in (*model.parameters(), *model.buffers())],
        "versions": [x._version for x in model.parameters()],
        "gradients": [None if x.grad is None else x.grad.clone() for x in model.parameters()],
        "training": [m.training for m in model.modules()],
        "hooks": hooks, "types": [type(m) for m in model.modules()],
        "random": [torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()],
        "grad mode": torch.is_grad_enabled(),
    }  # fmt: skip


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("with_data", [True, False])
def test_nothing_is_changed(training: bool, with_data: bool) -> None:
    model = Blocks().train(training)
    model(IDS).sum().backward()
    model.drop.eval()
    before = state(model)
    rt.plan(model, IDS, data=IDS if with_data else None, max_loss=1.0)
    after = state(model)
    for key, value in before.items():
        if key != "versions":
            assert equal(value, after[key]), key


def test_nothing_is_changed_when_planning_fails() -> None:
    model = Blocks()
    before = state(model)
    with pytest.raises(rt.InvalidInput, match="the loss on data is nan"):
        rt.plan(model, IDS, data=lambda model: float("nan"))
    after = state(model)
    assert all(equal(value, after[key]) for key, value in before.items() if key != "versions")


def test_losses_are_those_of_evaluation() -> None:
    """Dropout would make them random, and batch norms would take the statistics of the data."""
    model = Blocks().train()
    plan = rt.plan(model, IDS, data=IDS, measure=False)
    with torch.no_grad():
        logits = model.eval()(IDS[:, :-1])
    assert plan.total.base_loss == pytest.approx(cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten()).item(), abs=1e-6)


def test_errors_of_the_whole_are_those_of_evaluation() -> None:
    """Two runs with dropout differ by more than rounding."""
    plan = rt.plan(Blocks().train(), IDS, formats=["bf16"], measure=False)
    assert plan.total.measured_loss == 0
    plan = rt.plan(Blocks().train(), IDS, formats=["int8"], measure=False)
    assert 0 < plan.total.measured_loss < 0.05


def test_under_autocast_layers_are_planned_in_its_dtype() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        plan = rt.plan(mlp(), inputs(), formats=["bf16", "int8"])
    assert [layer.options[0].format for layer in plan.layers] == ["bf16"] * 3
    assert plan.layers[0].options[0].nbytes == 2 * 128 * 256


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_under_modes_of_gradients(mode: Any) -> None:
    model = llama()
    due = rt.plan(model, tokens(), data=tokens(), max_loss=0.5, measure=False)
    with mode():
        assert rt.plan(model, tokens(), data=tokens(), max_loss=0.5, measure=False).layers == due.layers


def test_a_compiled_model_is_planned_as_the_module_inside() -> None:
    model = mlp()
    plan = rt.plan(torch.compile(model, backend="eager"), inputs(), formats=["int8"], measure=False)
    assert names(plan) == ["0", "2", "4"]
    wrapped = torch.compile(copy.deepcopy(model), backend="eager")
    plan.apply(wrapped)
    assert torch.equal(wrapped(inputs()), plan.apply(copy.deepcopy(model))(inputs()))


def test_inputs_with_any_strides_and_numbers_of_numpy() -> None:
    x = torch.randn(128, 16, generator=torch.Generator().manual_seed(1)).T[::2]
    plan = rt.plan(mlp(), x, max_loss=numpy.float32(0.5), measure=False)
    assert plan.layers[0].loads[0].rows == 8
    again = rt.plan(mlp(), x.contiguous(), max_loss=0.5, measure=False)
    # a copy of x is no operator of the model
    assert [layer.options for layer in plan.layers] == [layer.options for layer in again.layers]


def test_transformers_gpt2_has_its_own_linear_layer() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=50, n_positions=32)
    model = transformers.GPT2LMHeadModel(config).eval()
    plan = rt.plan(model, IDS, formats=["int8"], data=[{"input_ids": IDS, "labels": IDS}], measure=False)
    assert names(plan)[:2] == ["transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj"]
    first = plan.layers[0]
    assert (first.parts[0].N, first.parts[0].K, first.chosen) == (192, 64, "int8")
    assert plan.layers[-1].name == "lm_head"
    assert plan.layers[-1].chosen == "fp32"
    due = model(IDS, labels=IDS).loss.item()
    assert plan.total.base_loss == pytest.approx(due, abs=1e-6)
    lost = plan.apply(copy.deepcopy(model))(IDS, labels=IDS).loss.item() - due
    assert plan.total.measured_loss == pytest.approx(lost, abs=1e-6)
    prepared = plan.prepare(copy.deepcopy(model))
    assert prepared(IDS, labels=IDS).loss.item() - due == pytest.approx(lost, abs=1e-6)
    sparse = rt.plan(model, IDS, formats=["2:4"], max_loss=1e9, measure=False)
    with pytest.raises(rt.InvalidInput, match=r"h.0.attn.c_attn is Conv1D, .* as 2:4; .* skip=\['\*.c_attn', '\*.c_proj'"):
        sparse.prepare(model)


def test_an_encoder_and_decoder_whose_inputs_have_names() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    inputs = {"input_ids": IDS % 50, "decoder_input_ids": IDS % 50}
    plan = rt.plan(model, inputs, formats=["w8"], max_loss=9.0, measure=False)
    assert plan.notes[0] == "planned: 20,480 of 22,336 weights (91.7%); left out: 1,856 in embeddings (shared.weight and 2 more)"
    assert "decoder.block.0.layer.1.EncDecAttention.q" in plan.weights
    by_position = rt.plan(model, IDS % 50, None, IDS % 50, formats=["w8"], max_loss=9.0, measure=False)
    assert by_position.weights == plan.weights
    with torch.no_grad():
        due = plan.apply(copy.deepcopy(model))(**inputs).logits
        torch.testing.assert_close(plan.prepare(model)(**inputs).logits, due)


def test_layers_of_pytorchs_fast_path_are_seen() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    plan = rt.plan(nn.Sequential(layer), torch.randn(2, 5, 32), formats=["w8"], measure=False)
    assert names(plan) == ["0.linear1", "0.linear2"]
    assert "in projections of nn.MultiheadAttention" in plan.notes[0]
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_llama_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=50
    )
    model = transformers.LlamaForCausalLM(config)
    plan = rt.plan(model, IDS, formats=["bf16", "int4:32"], measure=False)
    due = ["self_attn.q_proj, k_proj, v_proj", "self_attn.o_proj", "mlp.gate_proj, up_proj", "mlp.down_proj"]
    assert names(plan)[:4] == [f"model.layers.0.{name}" for name in due]
    assert plan.layers[-1].why_not == {"int4:32": "skip has 'lm_head'"}
