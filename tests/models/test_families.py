"""Logits of every family against those of Transformers: checkpoints that it writes, packed sequences against single ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from rooftile.models import Decoder, ModelConfig
from tests.models.checkpoints import (
    CONFIGS,
    DYNAMIC,
    LINEAR,
    LLAMA3,
    SMALL,
    THETA,
    YARN,
    assert_same,
    loaded,
    logits_of_ours,
    logits_of_theirs,
    longrope,
    made,
    prompts,
    saved,
    theirs,
)  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    decoder = Decoder.from_folder(saved(model, tmp_path))
    assert decoder.config.dtype == decoder.embedding.dtype == torch.float32
    assert_same(logits_of_ours(decoder, prompts()), logits_of_theirs(model, prompts()))


@pytest.mark.parametrize("name", ["llama", "llama, tied", "qwen3", "gemma2", "gpt2", "gpt2, untied, unscaled"])
def test_shards(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    saved(model, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(logits_of_ours(Decoder.from_folder(tmp_path), prompts()), logits_of_theirs(model, prompts()))


@pytest.mark.parametrize("name", ["llama, llama3", "mistral", "qwen2", "qwen3", "gemma2", "gpt2", "olmo2", "ministral3"])
def test_bfloat16_is_as_close_to_exact_as_transformers_in_bfloat16(name: str, tmp_path: Path) -> None:
    decoder = Decoder.from_folder(saved(theirs(name).to(torch.bfloat16), tmp_path))
    assert decoder.config.dtype == decoder.embedding.dtype == torch.bfloat16
    plain = logits_of_theirs(loaded(tmp_path, torch.bfloat16), prompts())
    exact = logits_of_theirs(loaded(tmp_path, torch.float32), prompts())
    ours = logits_of_ours(decoder, prompts())
    ulps = 8 * torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max() + ulps
    assert (ours - exact).abs().mean() <= 2 * (plain - exact).abs().mean()
    # in another dtype than the checkpoint's, on request
    wide = Decoder.from_folder(tmp_path, dtype=torch.float32)
    assert_same(logits_of_ours(wide, prompts()), exact)


@pytest.mark.parametrize(("max_len", "lengths"), [(40, (37, 1, 40, 13)), (None, (70, 41, 128))])
def test_longrope_goes_by_the_longest_sequence_that_is_read(
    max_len: int | None, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    """Up to the training length one set of factors, beyond it another for all positions, as Transformers has for one sequence."""
    model = made(longrope(40))
    decoder = Decoder.from_folder(saved(model, tmp_path), max_len=max_len)
    assert_same(logits_of_ours(decoder, prompts(lengths)), logits_of_theirs(model, prompts(lengths)))
    settings = json.loads((tmp_path / "config.json").read_text())
    for older in ("su", "yarn"):
        settings["rope_parameters"]["rope_type"] = older
        (tmp_path / "config.json").write_text(json.dumps(settings))
        assert ModelConfig.from_folder(tmp_path) == decoder.config


@pytest.mark.parametrize(("max_len", "lengths"), [(128, (37, 1, 128, 13)), (200, (200,)), (None, (512,))])
def test_dynamic_waves_go_by_the_longest_sequence_that_is_read(
    max_len: int | None, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    """Up to the training length they are plain; beyond it Transformers, too, has one base for all of the longest sequence."""
    model = made(transformers.LlamaConfig(**SMALL, rope_parameters=dict(DYNAMIC)))
    decoder = Decoder.from_folder(saved(model, tmp_path), max_len=max_len)
    assert_same(logits_of_ours(decoder, prompts(lengths)), logits_of_theirs(model, prompts(lengths)))


def test_a_llama_of_which_a_part_turns_is_a_phi_without_its_joint_weights(tmp_path: Path) -> None:
    """Transformers' Llama does not read partial_rotary_factor, so Phi-3 says what is due: it has the same layers."""
    model = made(transformers.Phi3Config(**SMALL, rope_parameters=dict(THETA) | {"partial_rotary_factor": 0.6}))
    stored, kv = {}, model.config.num_key_value_heads * 10
    for name, x in model.state_dict().items():
        if "qkv_proj" in name:
            parts = zip("qkv", x.split((40, kv, kv)), strict=True)
            stored |= {name.replace("qkv_proj", f"{part}_proj"): rows.contiguous() for part, rows in parts}
        elif "gate_up_proj" in name:
            parts = zip(("gate", "up"), x.chunk(2), strict=True)
            stored |= {name.replace("gate_up_proj", f"{part}_proj"): rows.contiguous() for part, rows in parts}
        else:
            stored[name] = x.contiguous()
    config = transformers.LlamaConfig(
        **SMALL, rms_norm_eps=model.config.rms_norm_eps, rope_parameters=dict(THETA) | {"partial_rotary_factor": 0.6}
    )
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "float32"
    config.save_pretrained(tmp_path)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    decoder = Decoder.from_folder(tmp_path)
    assert decoder.config.rotary.dim == 6
    assert_same(logits_of_ours(decoder, prompts()), logits_of_theirs(model, prompts()))


@pytest.mark.parametrize("rope", [None, LLAMA3, LINEAR, YARN], ids=["default", "llama3", "linear", "yarn"])
def test_older_checkpoints_say_their_rotary_positions_in_another_way(rope: dict | None, tmp_path: Path) -> None:
    saved(theirs("llama"), tmp_path)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    settings["rope_parameters"] = rope or {"rope_type": "default", "rope_theta": 1000.0}
    path.write_text(json.dumps(settings))
    newer = ModelConfig.from_folder(tmp_path)
    settings |= {"rope_theta": settings.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
    if rope is not None:
        older = {name: value for name, value in rope.items() if name not in ("rope_theta", "rope_type")}
        settings["rope_scaling"] = older | {"type": rope["rope_type"]}
    path.write_text(json.dumps(settings))
    assert ModelConfig.from_folder(tmp_path) == newer
    assert newer.rotary is not None
    assert (newer.rotary.theta, newer.rotary.scaling) == (1000.0, None if rope is None else rope["rope_type"])


def test_a_sequence_does_not_depend_on_where_it_lies(tmp_path: Path) -> None:
    decoder = Decoder.from_folder(saved(theirs("gemma2"), tmp_path))
    first, second = prompts((21, 34))
    together = logits_of_ours(decoder, [first, second])
    assert_same(together[21:], logits_of_ours(decoder, [second]))
