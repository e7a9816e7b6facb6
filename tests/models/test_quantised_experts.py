"""Checkpoints whose experts are quantised: the numbers are their definition's, and tokens those of a model with these numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rooftile import InvalidInput
from rooftile.engine import LLM
from rooftile.models import Decoder
from rooftile.weights import QuantisedWeight
from tests.engine.asking import GREEDY, ROOM, TOKENS, prompts, tokens_of
from tests.models.checkpoints import made, saved
from tests.models.experts import QWEN
from tests.models.latent import V3
from tests.models.quantised import KINDS, configure, header_of

# K of up is a whole tile of 128, and that of down is none
SIZES = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 64, "head_dim": 32, "norm_topk_prob": True}
# their columns are sorted, or tiles lie across rows of no whole groups
PLAIN = {"ct int4, act-order", "gptq, act-order"}


def quantised(kind: str, folder: Path, config: Any, *, only: str = "", **settings: Any) -> transformers.PreTrainedModel:
    """Writes a checkpoint, and returns the model in 32 bits whose weights are those that it stands for."""
    (section, make, _), model = KINDS[kind], made(config)
    saved(model, folder)
    generator, state = torch.Generator().manual_seed(5), model.state_dict()
    tensors = load_file(folder / "model.safetensors")
    header = {name: json.dumps({"_type": "Tensor"}) for name in tensors}
    for name in [name for name in tensors if "_proj" in name and "layernorm" not in name and only in name]:
        shape, module = tensors.pop(name).shape, name.removesuffix(".weight")
        parts, numbers = make(*shape, generator)
        header[name] = json.dumps(header_of(kind, shape[1]))
        tensors |= {f"{module}.{suffix}": x.contiguous() for suffix, x in parts.items()}
        before, is_expert, rest = module.partition(".experts.")
        if is_expert:
            (e, part), h = rest.split("."), numbers.shape[0]
            whole = state[f"{before}.experts.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][int(e)]
            whole[h:].copy_(numbers) if part == "up_proj" else whole[:h].copy_(numbers)
        else:
            state[name].copy_(numbers)
    header["tensor_names"] = json.dumps(list(header))
    save_file(tensors, folder / "model.safetensors", metadata=header if kind.startswith("torchao") else None)
    configure(folder, quantization_config=section | settings)
    model.generation_config.eos_token_id = None
    return model


def greedy(model: transformers.PreTrainedModel, asked: list[list[int]]) -> list[list[list[int]]]:
    config = transformers.GenerationConfig(max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    found = []
    for prompt in asked:
        ids = torch.tensor([prompt])
        row = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        found.append([row[0, len(prompt) :].tolist()])
    return found


def numbers(weight: Any, shape: torch.Size) -> torch.Tensor:
    found = weight.dequantise(torch.float32) if isinstance(weight, QuantisedWeight) else weight
    return found.view(shape)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_have_the_numbers_that_their_files_stand_for(kind: str, tmp_path: Path) -> None:
    model = quantised(kind, tmp_path, transformers.Qwen3MoeConfig(**QWEN | SIZES | {"num_experts": 4}))
    decoder = Decoder.from_folder(tmp_path)
    for ours, peer in zip(decoder.layers, model.model.layers, strict=True):
        experts = peer.mlp.experts
        for weight, due in ((ours.feed_forward.up, experts.gate_up_proj), (ours.feed_forward.down, experts.down_proj)):
            torch.testing.assert_close(numbers(weight, due.shape), due, rtol=1e-6, atol=0)
    has_codes = isinstance(decoder.layers[0].feed_forward.up, QuantisedWeight)
    assert has_codes == (kind not in PLAIN)
    if "tiles" in kind:
        assert not isinstance(decoder.layers[0].feed_forward.down, QuantisedWeight)


@pytest.mark.parametrize("kind", [kind for kind, (_, _, in_16_bits) in KINDS.items() if in_16_bits])
def test_tokens_are_those_of_the_numbers(kind: str, tmp_path: Path) -> None:
    model = quantised(kind, tmp_path, transformers.Qwen3MoeConfig(**QWEN | SIZES | {"num_experts": 4}))
    asked = prompts(3)
    assert tokens_of(LLM(tmp_path, **ROOM), asked, GREEDY) == greedy(model, asked)


@pytest.mark.parametrize("kind", ["fp8, tiles", "ct fp8, rows"])
def test_tokens_of_experts_in_fp8(kind: str, tmp_path: Path) -> None:
    """Their activations stay in 16 bits, so tokens are those of the numbers, where attention is not in FP8."""
    settings = {"modules_to_not_convert": ["self_attn", "lm_head"]} if kind == "fp8, tiles" else {"ignore": ["re:.*self_attn.*"]}
    config = transformers.Qwen3MoeConfig(**QWEN | SIZES | {"num_experts": 4, "moe_intermediate_size": 128})
    if kind == "fp8, tiles":
        settings["modules_to_not_convert"] = [f"model.layers.{n}.self_attn" for n in range(3)] + ["lm_head"]
    model = quantised(kind, tmp_path, config, only=".experts.", **settings)
    asked = prompts(3)
    llm = LLM(tmp_path, **ROOM)
    assert llm.engine.runner.decoder.layers[0].feed_forward.down.format == "fp8"
    assert tokens_of(llm, asked, GREEDY) == greedy(model, asked)


OF_DEEPSEEK = V3 | {
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "v_head_dim": 32,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 2,
}


def test_deepseek_v3_in_its_own_fp8(tmp_path: Path) -> None:
    """Tiles of 128 x 128 with scales by the name of weight_scale_inv; the router is in 16 bits, and nothing says so."""
    config = transformers.DeepseekV3Config(**OF_DEEPSEEK)
    model = quantised("fp8, tiles", tmp_path, config, scale_fmt="ue8m0", fmt="e4m3")
    decoder = Decoder.from_folder(tmp_path)
    for ours, peer in zip(decoder.layers[1:], model.model.layers[1:], strict=True):
        experts, shared = peer.mlp.experts, peer.mlp.shared_experts
        assert (ours.feed_forward.up.format, ours.feed_forward.up.group) == ("fp8", 128)
        due = {
            "up": experts.gate_up_proj, "down": experts.down_proj, "shared_down": shared.down_proj.weight,
            "shared_up": torch.cat((shared.gate_proj.weight, shared.up_proj.weight)),
        }  # fmt: skip
        for name, x in due.items():
            torch.testing.assert_close(numbers(getattr(ours.feed_forward, name), x.shape), x, rtol=1e-6, atol=0)
        assert torch.equal(ours.feed_forward.centroids, peer.mlp.gate.weight)
    answers = tokens_of(LLM(tmp_path, **ROOM), prompts(3), GREEDY)
    assert all(len(answer) == TOKENS for (answer,) in answers)


@pytest.mark.parametrize(
    ("change", "due"),
    [
        (
            lambda x: x.pop("model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"),
            r"lacks layers\.1\.mlp\.experts\.2\.up_proj\.we",
        ),
        (
            lambda x: x.pop("model.layers.1.mlp.experts.2.up_proj.weight"),
            r"lacks layers\.1\.mlp\.experts\.2\.up_proj\.weight, wh",
        ),
        (
            lambda x: x.update({"model.layers.1.mlp.experts.2.up_proj.weight": torch.zeros(128, 256)}),
            r"experts\.2\.up_proj\.weight",
        ),
        (
            lambda x: x.update({"model.layers.1.mlp.experts.2.up_proj.weight_scale_inv": torch.zeros(3, 7)}),
            r"experts\.2\.up_proj\.weight_scale_inv",
        ),
        (
            lambda x: x.update({"model.layers.1.mlp.experts.4.up_proj.weight": torch.zeros(1)}),
            r"has model\.layers\.1\.mlp\.experts\.4",
        ),
        (lambda x: x.pop("model.layers.1.mlp.gate.weight"), r"lacks layers\.1\.mlp\.gate\.weight"),
    ],
)
def test_broken_files_are_one_sentence(change: Any, due: str, tmp_path: Path) -> None:
    quantised("fp8, tiles", tmp_path, transformers.DeepseekV3Config(**OF_DEEPSEEK))
    stored = load_file(tmp_path / "model.safetensors")
    change(stored)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=due) as refused:
        Decoder.from_folder(tmp_path)
    assert "\n" not in str(refused.value)
