"""config.json is read as in Transformers; unsupported models are refused in one sentence."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rooftile import InvalidInput
from rooftile.models import ModelConfig
from rooftile.models.config import config_of
from rooftile.models.families import ARCHITECTURES, FAMILIES
from rooftile.models.rotary import Rotary
from tests.models import experts, latent, recurrent
from tests.models.checkpoints import CONFIGS, LAYER_TYPES, LINEAR, LLAMA3, LONGROPE, YARN

# as checkpoints of years ago say it: little more than sizes
OLD: dict[str, Any] = {
    "vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 12,
    "max_position_embeddings": 16,
}  # fmt: skip
OLD_GPT2: dict[str, Any] = {"vocab_size": 10, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}


def described(family: str, **more: Any) -> ModelConfig:
    return config_of((OLD_GPT2 if family == "gpt2" else OLD) | {"model_type": family} | more, "here")


def written(folder: Path, **settings: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_every_family_has_an_architecture_and_a_tiny_model_here() -> None:
    named = {name.split(",")[0] for name in CONFIGS | recurrent.CONFIGS | experts.CONFIGS | latent.CONFIGS}
    # Transformers has no classes for these
    assert set(ARCHITECTURES.values()) == set(FAMILIES) == named | {"deepseek", "mimo", "rooftile"}


def test_what_is_not_said_is_what_transformers_takes() -> None:
    llama = described("llama")
    assert (llama.kv_heads, llama.head_dim, llama.scale, llama.tie) == (2, 4, 0.5, False)
    assert (llama.bos_ids, llama.eos_ids, llama.dtype) == ((1,), (2,), torch.float32)
    assert (llama.rotary, llama.windows, llama.max_len) == (Rotary(dim=4, theta=10_000.0), (None,) * 3, 16)
    assert described("mistral").windows == (4096,) * 3
    assert described("qwen2").windows == (None,) * 3
    assert described("qwen2").eos_ids == ()
    assert described("qwen3").head_dim == 128
    gemma = described("gemma2")
    assert (gemma.head_dim, gemma.scale, gemma.softcap, gemma.logit_softcap) == (256, 1 / 16, 50.0, 30.0)
    assert (gemma.windows, gemma.tie, gemma.bos_ids, gemma.eos_ids) == ((4096, None, 4096), True, (2,), (1,))
    assert (gemma.activation, gemma.embedding_scale) == ("gelu_pytorch_tanh", 8**0.5)
    gpt2 = described("gpt2")
    assert (gpt2.ffn, gpt2.tie, gpt2.norm, gpt2.norm_eps, gpt2.rotary) == (32, True, "layer", 1e-5, None)
    assert (gpt2.activation, gpt2.eos_ids) == ("gelu_new", (50256,))


@pytest.mark.parametrize(
    ("family", "theirs"),
    [
        ("gemma3_text", transformers.Gemma3TextConfig), ("granite", transformers.GraniteConfig),
        ("ministral", transformers.MinistralConfig), ("olmo2", transformers.Olmo2Config), ("olmo3", transformers.Olmo3Config),
        ("phi3", transformers.Phi3Config), ("smollm3", transformers.SmolLM3Config),
    ],
)  # fmt: skip
def test_defaults_are_those_of_transformers(family: str, theirs: type) -> None:
    sizes = OLD | {"num_key_value_heads": 1, "num_hidden_layers": 9}
    # they write null where a head's size follows from others
    whole = {name: value for name, value in theirs(**sizes).to_dict().items() if name != "head_dim" or value is not None}
    assert config_of(sizes | {"model_type": family}, "here") == config_of(whole, "here")


def test_positions_of_older_checkpoints_for_each_type_of_layer() -> None:
    older = described("gemma3_text", rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling=LINEAR | {"rope_theta": None})
    assert older.rotary == Rotary(dim=256, theta=5e5, scaling="linear", factor=4.0, original_len=16)
    assert older.local_rotary == Rotary(dim=256, theta=2e4)


def test_null_turns_off_what_has_a_default() -> None:
    assert described("mistral", sliding_window=None).windows == (None,) * 3
    assert described("gemma2", attn_logit_softcapping=None).softcap is None
    assert described("gemma2", final_logit_softcapping=None).logit_softcap is None
    assert described("llama", bos_token_id=None, eos_token_id=None).eos_ids == ()
    assert described("llama", head_dim=None, num_key_value_heads=None).head_dim == 4


def test_windows() -> None:
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
    assert described("qwen2", **windows).windows == (None, None, 5)
    assert described("qwen2", **windows | {"use_sliding_window": False}).windows == (None,) * 3
    assert described("qwen3", **windows, layer_types=LAYER_TYPES).windows == (5, None, 5)
    # a window that the family does not have is none
    assert described("llama", sliding_window=5).windows == (None,) * 3


@pytest.mark.parametrize(("key", "said"), [("dtype", "bfloat16"), ("torch_dtype", "bfloat16"), ("torch_dtype", "torch.bfloat16")])
def test_dtype(key: str, said: str) -> None:
    assert described("llama", **{key: said}).dtype == torch.bfloat16


def test_ends_of_text_of_both_files_count(tmp_path: Path) -> None:
    written(tmp_path, **OLD, model_type="llama", eos_token_id=5, bos_token_id=4)
    assert ModelConfig.from_folder(tmp_path).eos_ids == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5, 8], "bos_token_id": None}))
    config = ModelConfig.from_folder(str(tmp_path))
    assert (config.bos_ids, config.eos_ids) == ((4,), (5, 7, 8))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 6, "bos_token_id": 3}))
    config = ModelConfig.from_folder(str(tmp_path))
    assert (config.bos_ids, config.eos_ids) == ((3,), (5, 6))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert ModelConfig.from_folder(tmp_path).eos_ids == (5,)


def test_no_folder_no_file_no_json(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"nowhere is not a folder; give one with config.json"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match=r"has no config.json; give the folder of a Hugging Face checkpoint"):
        ModelConfig.from_folder(tmp_path)
    for broken, sentence in (
        (b'{"hidden_size": ', "config.json is not JSON: .*line 1 column 17.*; download it again"),
        (b"\xff\xfe\xfa", "config.json is not UTF-8 text .*; download it again"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "config.json nests its objects and lists too deep to be read; d"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "config.json is not JSON: .*limit.*; download it again"),
        (b"[1]", "config.json holds list; must be a JSON object"),
    ):
        (tmp_path / "config.json").write_bytes(broken)
        with pytest.raises(InvalidInput, match=sentence):
            ModelConfig.from_folder(tmp_path)
    written(tmp_path, **OLD, model_type="llama")
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(InvalidInput, match=r"generation_config.json is not JSON"):
        ModelConfig.from_folder(tmp_path)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The administrator may read every file, so the permission is taken from `open`."""
    written(tmp_path, **OLD, model_type="llama")
    opened = Path.open

    def denied(self: Path, *given: Any) -> Any:
        if self.name == "config.json":
            raise PermissionError(13, "Permission denied")
        return opened(self, *given)

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(InvalidInput, match=r"config.json cannot be read: Permission denied; let this user read it"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("family", "more", "sentence"),
    [
        ("llama", {"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM; supported are the families llama, m"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "has architecture LlamaForSeq"),
        ("llama", {"architectures": "Falcon"}, "has architecture Falcon; supported are"),
        ("gpt2", {"model_type": "gpt3"}, "has model_type gpt3; supported are the families llama, mistral"),
        ("gpt2", {"model_type": None}, "has model_type None; supported are"),
        ("llama", {"quantization_config": {"quant_method": "exl3"}}, r"are quantised \(exl3\); read are .*: give the 16-bit"),
        ("llama", {"quantization_config": "awq"}, "has quantization_config 'awq'; must be a JSON object"),
        ("llama", {"hidden_size": None}, "config.json of here has no hidden_size; it must be there, a number"),
        ("llama", {"hidden_size": "8"}, "has hidden_size '8'; must be a number"),
        ("llama", {"hidden_size": 10**400}, "has hidden_size '1000000000000000000000000000000000000000'; must be a number"),
        ("llama", {"hidden_size": 8.5}, "has hidden_size 8.5; must be a whole number of at least 1"),
        ("llama", {"num_hidden_layers": 0}, "has num_hidden_layers 0; must be a whole number"),
        ("llama", {"num_key_value_heads": 3}, "heads is 2 and kv_heads 3; the second must divide the first"),
        ("llama", {"head_dim": 5}, "head_dim is 5 and rotary.dim 5; the second must be even, and from 2 to the"),
        ("llama", {"hidden_act": "swish"}, "has hidden_act 'swish'; must be one of gelu, gelu_new"),
        ("llama", {"hidden_act": ["silu"]}, r"has hidden_act \['silu'\]; must be one of"),
        ("llama", {"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'; must be one of fp32 \\(float32, float\\)"),
        ("llama", {"eos_token_id": "2"}, "has eos_token_id '2'; must be a token's id, or a list of them"),
        ("llama", {"rope_scaling": {"type": "ntk", "factor": 2}}, "has rope_type 'ntk'; supported are default, linear, dynamic"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic"}}, "has no factor"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": -1}}, "has factor -1; must be"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "has short_factor None; must be a list of numbers"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "has no factor"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "has no low_freq_factor"),
        ("llama", {"rope_scaling": "linear"}, "has rope_scaling 'linear'; must be a JSON object"),
        ("llama", {"rope_scaling": YARN | {"factor": "4"}}, "has factor '4'; must be a number"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "has rope_parameters for each type of layer; "),
        ("qwen2", {"partial_rotary_factor": 0.5}, "has a partial_rotary_factor; supported is one with Llama and Phi, whose"),
        ("llama", {"partial_rotary_factor": 1.5}, "head_dim is 4 and rotary.dim 6; the second must be even, and from 2 to"),
        ("mistral", {"layer_types": LAYER_TYPES}, "has layer_types, which Mistral's attention does not read; supported is"),
        ("mistral", {"sliding_window": 0}, "has sliding_window 0; must be above 0"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "has layer_types of 'chunked_attention'; supported are 'full_att"),
        ("qwen2", {"layer_types": LAYER_TYPES[:2]}, "has layer_types .*; must be a list, one for each of 3 layers"),
        ("gemma2", {"layer_types": 5}, "has layer_types 5; must be a list, one for each of 3 layers"),
        ("llama", {"num_hidden_layers": 10**9}, "has num_hidden_layers 1,000,000,000; may be at most 1,000"),
        ("gpt2", {"n_layer": 10**9}, "has n_layer 1,000,000,000; may be at most 1,000"),
        ("llama", {"max_position_embeddings": 10**12}, "max_len is 1,000,000,000,000 positions; may be at most 16,777,216"),
        ("llama", {"rope_scaling": YARN | {"factor": 1e9}}, "max_len is 32,000,000,000 positions; may be at most"),
        ("llama", {"vocab_size": 10**30}, "a matrix would be 1,000,000.* x 8 numbers; may have at most 1,099,511,627,776"),
        ("llama", {"num_attention_heads": 10**9, "num_key_value_heads": 1, "head_dim": 4000}, "a matrix would be 4,000,0"),
        ("llama", {"head_dim": 10**9}, "head_dim is 1,000,000,000; may be at most 65,536"),
        ("llama", {"rms_norm_eps": -1}, "norm_eps is -1; must be at least 0"),
        ("llama", {"rope_theta": 0}, "has rope_theta 0; must be above 0"),
        ("llama", {"rope_theta": 0.5}, "rotary.theta is 0.5; must be a finite number above 1"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": -2}}, "has factor -2; must be above 0"),
        ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 0}}, "has low_freq_factor 0; must be above 0"),
        ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "rotary.low_freq_factor is 4.0 and high_"),
        ("llama", {"rope_scaling": YARN | {"beta_fast": -1}}, "rotary.beta_slow is 1.0 and beta_fast -1; the"),
        ("llama", {"rope_scaling": YARN | {"mscale": -30, "mscale_all_dim": 1}}, "rotary.attention_factor is -"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "has query_pre_attn_scalar 0; must be above 0"),
        ("gemma2", {"attn_logit_softcapping": 0}, "has attn_logit_softcapping 0; must be above 0"),
        ("gemma2", {"final_logit_softcapping": -2.0}, "has final_logit_softcapping -2.0; must be above 0"),
        ("gemma2", {"use_bidirectional_attention": True}, "has use_bidirectional_attention; supported is causal attention"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "has scale_attn_by_inverse_layer_idx; supported is GPT-2 without it"),
        ("gpt2", {"add_cross_attention": True}, "has add_cross_attention; supported is GPT-2 without it"),
        ("gemma3_text", {"rope_parameters": YARN}, "has one rope_parameters for all layers; must have them for each"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "has attn_logit_softcapping, which Gemma 3's attention does not apply"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "has no_rope_layers .1, 2, 0.; must be 0 or 1 for each of 3 layers"),
        ("phi3", {"rope_scaling": LONGROPE | {"partial_rotary_factor": 1, "long_factor": [1.0]}},
         r"rotary.long_factors are \(1.0,\); must be 2 finite numb"),
        ("phi3", {"rope_scaling": LONGROPE | {"short_factor": 1.0}}, "has short_factor 1.0; must be a list of numbers"),
        ("phi3", {"rope_scaling": LONGROPE | {"short_factor": [1.0, "a"]}}, r"has short_factor\[1\] 'a'; must be a number"),
        ("phi3", {"rope_scaling": LONGROPE | {"short_factor": [1.0, 0]}}, r"has short_factor\[1\] 0; must be above 0"),
        ("phi3", {"partial_rotary_factor": 0.75}, "head_dim is 4 and rotary.dim 3; the second must be even"),
        ("phi3", {"partial_rotary_factor": 1.5}, "head_dim is 4 and rotary.dim 6; the second must be even, and from 2 to"),
        ("phi3", {"partial_rotary_factor": 0.1}, "head_dim is 4 and rotary.dim 0; the second must be even, and from 2 to the"),
        ("ministral3", {"rope_parameters": YARN}, "has no llama_4_scaling_beta; it must be there, a number"),
        ("granite", {"logits_scaling": 0}, "has logits_scaling 0; must be above 0"),
        ("gpt2", {"n_head": 3}, "has n_embd 8 and n_head 3; the second must divide the first"),
    ],
    ids=lambda what: str(what)[:40],
)  # fmt: skip
def test_refusals(family: str, more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence) as error:
        described(family, **more)
    # the longest names all families
    assert len(str(error.value)) < 520
    assert not re.search(r"[\n.]$", str(error.value))


def test_a_config_checks_what_is_changed_in_it() -> None:
    with pytest.raises(InvalidInput, match="layers is 0; must be at least 1"):
        dataclasses.replace(described("llama"), layers=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        described("llama").layers = 2  # type: ignore[misc]
