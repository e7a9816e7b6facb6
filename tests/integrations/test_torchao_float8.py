"""Training in FP8 by torchao beside `rt.fuse` and `rt.enable`: a step has the losses and gradients that it has without them."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

import rooftile as rt

Step = tuple[torch.Tensor, dict[str, torch.Tensor]]


def llama() -> nn.Module:
    """Small, with sizes that are multiples of 16, as FP8 products need."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, pad_token_id=None))
    model.set_attn_implementation("sdpa")
    return model.train()


def convert(model: nn.Module, recipe: str) -> None:
    """Makes all layers but the head multiply in FP8, emulated."""
    float8 = pytest.importorskip("torchao.float8", reason="pip install torchao; it trains in FP8")
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "lm_head")
    assert sum(type(module).__name__ == "Float8Linear" for module in model.modules()) == 14


def step(model: nn.Module) -> Step:
    tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def distance(found: Step, due: Step) -> dict[str, float]:
    """Returns relative distances of the loss and of each gradient."""
    gradients = {name: ((found[1][name] - x).norm() / x.norm()).item() for name, x in due[1].items()}
    return {"loss": ((found[0] - due[0]).abs() / due[0]).item(), **gradients}


@pytest.mark.parametrize("converted", ["first", "last"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_step_in_fp8_is_the_one_without_rooftile(recipe: str, converted: str, calls) -> None:
    """FP8 hides most of what differs in fp32; where a code flips, it errs once more by what FP8 errs anyway."""
    plain, model = llama(), llama()
    without = copy.deepcopy(plain)
    convert(without, recipe)
    due = step(without)
    if converted == "first":
        convert(model, recipe)
    replaced = rt.fuse(model, verbose=False).replaced
    if converted == "last":
        convert(model, recipe)
    rt.enable()
    found = step(model)
    assert (replaced["RMS norms"], replaced["gates of two projections"]) == (5, 2)
    assert calls == {"forward": 2, "backward": 2}
    ours, by_fp8 = distance(found, due), distance(due, step(plain))
    assert ours.keys() == by_fp8.keys()
    for name, error in by_fp8.items():
        assert 1e-5 < error < 0.2, name
        assert ours[name] <= 0.1 * error, name
