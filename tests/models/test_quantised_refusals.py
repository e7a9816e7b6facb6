"""Quantised checkpoints that are refused: tensors that do not fit, and what is not read, with what to do instead."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import rooftile as rt
from rooftile.models import Decoder
from tests.models.quantised import KINDS, TOKEN, configure, plain, quantised


def change(name: str, make):
    """A change of one tensor of the first projection; None takes it away."""

    def apply(tensors):
        full = f"model.layers.0.self_attn.q_proj.{name}"
        found = make(tensors.pop(full))
        if found is not None:
            tensors[full] = found.contiguous()

    return apply


def filled(value: float):
    def make(x):
        x = x.clone()
        x.view(-1)[3] = value
        return x

    return make


@pytest.mark.parametrize(
    ("kind", "edit", "sentence"),
    [
        (
            "gptq",
            change("qzeros", lambda x: None),
            "lacks layers.0.self_attn.q_proj.qzeros, which its quantization_config asks for",
        ),
        ("gptq", change("qweight", lambda x: x[1:]), r"q_proj.qweight is \(7, 64\), due \(8, 64\)"),
        ("gptq", change("qweight", lambda x: x.long()), "q_proj.qweight is torch.int64, due torch.int32"),
        ("gptq", change("scales", filled(0.0)), "q_proj.scales holds 0.0; scales must be finite and above zero"),
        ("gptq", change("scales", filled(-1.0)), "q_proj.scales holds -1.0"),
        ("gptq", change("scales", filled(torch.nan)), "q_proj.scales holds nan"),
        ("gptq", change("g_idx", filled(2)), "q_proj.g_idx holds 2; must be from 0 to 1"),
        ("gptq", change("g_idx", filled(1)), "q_proj.g_idx has groups of several sizes; each must have 32 columns"),
        ("torchao int4", change("_weight_qdata", filled(8)), "q_proj._weight_qdata holds -8 to 8; must be from -8 to 7"),
        ("gptq, 8 bits", change("qzeros", filled(5)), "q_proj.qzeros has zero points for 8 bits"),
        ("awq", change("qzeros", lambda x: x[:, 1:]), r"q_proj.qzeros is \(2, 7\), due \(2, 8\)"),
        ("ct int4", change("weight_packed", lambda x: x[:, 1:]), r"q_proj.weight_packed is \(64, 7\), due \(64, 8\)"),
        ("ct int4", change("weight_shape", lambda x: x + 1), r"q_proj.weight_shape is \[65, 65\], due \[64, 64\]"),
        (
            "ct int4, zeros",
            change("weight_zero_point", lambda x: None),
            "lacks layers.0.self_attn.q_proj.weight_zero_point",
        ),
        ("ct fp8, rows", change("weight", filled(torch.nan)), "q_proj.weight holds NaN"),
        ("ct fp8, rows", change("weight_scale", lambda x: x[1:]), r"q_proj.weight_scale is \(63, 1\), due \(64, 1\)"),
        ("fp8, one scale", change("weight_scale", lambda x: None), "the checkpoint lacks layers.0.self_attn.q_proj.weight_scale"),
        ("fp8, one scale", change("input_scale", lambda x: None), "the checkpoint lacks layers.0.self_attn.q_proj.input_scale"),
        ("ct fp8, one scale", change("input_scale", lambda x: None), "lacks layers.0.self_attn.q_proj.input_scale"),
        ("ct mxfp4", change("weight_scale", filled(255)), "q_proj.weight_scale holds NaN"),
        ("ct nvfp4", change("weight_global_scale", lambda x: x * 0), "q_proj.weight_global_scale holds 0.0"),
        ("fp8, tiles", change("weight_scale_inv", lambda x: -x), "q_proj.weight_scale_inv holds -0"),
        (
            "fp8, tiles",
            change("weight", lambda x: x.float()),
            "q_proj.weight is torch.float32, due torch.float8_e4m3fn",
        ),
    ],
)
def test_wrong_tensors(kind: str, edit, sentence: str, tmp_path: Path) -> None:
    quantised(kind, tmp_path)
    path = tmp_path / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata=header)
    with pytest.raises(rt.InvalidInput, match=sentence):
        Decoder.from_folder(tmp_path)


def group(kind: str, **settings):
    config = KINDS[kind][0]
    first = config["config_groups"]["group_0"]
    return config | {"config_groups": {"group_0": first | settings}}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"_type": "Int4Tensor"}, "has Int4Tensor of torchao for layers.0.self_attn.q_proj; read are Float8Tensor, Int8Tensor"),
        ({"_data": {"target_dtype": {"_data": "int3"}}}, "has layers.0.self_attn.q_proj in int3; read are int4 and int8"),
        (
            {"_data": {"target_dtype": {"_data": "int4"}, "activation_quantization": "int8_asym_per_token"}},
            "has int8_asym_per_token for layers.0.self_attn.q_proj; IntxUnpackedToInt8Tensor is read with activations in 16 bits",
        ),
        (
            {"_tensor_data_names": ["qdata", "scale", "act_pre_scale"]},
            "has act_pre_scale for layers.0.self_attn.q_proj; read are qdata, scale, zero_point: save the model",
        ),
        (
            {"_type": "Int8Tensor", "_data": {"act_quant_kwargs": {"_data": {"mapping_type": {"_data": "ASYMMETRIC"}}}}},
            "has activations with zero points for layers.0.self_attn.q_proj; read are those without",
        ),
        ({"_type": "Float8Tensor", "_data": {"act_quant_kwargs": None}}, "has FP8 weights with activations in 16 bits"),
        (
            {"_data": {"block_size": [2, 32], "target_dtype": {"_data": "int4"}}},
            r"q_proj has a scale for blocks of \(2, 32\); read are rows, parts of rows and whole weights",
        ),
    ],
)  # fmt: skip
def test_headers_of_torchao_that_are_not_read(change: dict, sentence: str, tmp_path: Path) -> None:
    quantised("torchao int4", tmp_path)
    path = tmp_path / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    for name in [name for name in header if name.endswith("q_proj.weight")]:
        header[name] = json.dumps(json.loads(header[name]) | change)
    save_file(load_file(path), path, metadata=header)
    with pytest.raises(rt.InvalidInput, match=sentence):
        Decoder.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        *(
            ({"quant_method": name}, rf"are quantised \({name}\); read are compressed-tensors, gptq, .*, rooftile: {advice}")
            for name, advice in {
                "bitsandbytes": r"load it with Transformers, dequantise it there \(model\.dequantize\(\)\) and save it, then",
                "higgs": r"load it with Transformers, dequantise it there",
                "gguf": r"load it with Transformers, AutoModelForCausalLM\.from_pretrained\(folder, gguf_file=",
                "mxfp4": r"load it with Transformers and quantization_config=Mxfp4Config\(dequantize=True\)",
                "auto-round": 'export it from AutoRound with format="auto_gptq"',
                "marlin": "give the GPTQ checkpoint that it was made from, or the 16-bit checkpoint",
                **dict.fromkeys(
                    ("exl2", "exl3", "hqq", "aqlm", "quip", "quanto", "eetq", "vptq", "spqr", "bitnet", "quark", "fbgemm_fp8"),
                    'give the 16-bit checkpoint and weights="int4" or another format',
                ),
            }.items()
        ),
        ({"load_in_4bit": True}, r"are quantised \(bitsandbytes\)"),
        ({"quant_method": "torchao"}, "names torchao, and the header of model.safetensors says nothing of its tensors"),
        ({"bits": 4}, "are quantised \\(no method named\\)"),
        (KINDS["gptq"][0] | {"bits": 3}, "has GPTQ of 3 bits; read are 4 and 8"),
        (KINDS["gptq"][0] | {"dynamic": {"+:.*": {"bits": 8}}}, r"has the rule '\+:\.\*' with settings .*; read are rules that"),
        (KINDS["gptq"][0] | {"dynamic": {"-:.*(": {}}}, r"has '-:\.\*\(' in dynamic, which is no regular expression: missing \)"),
        (KINDS["gptq"][0] | {"dynamic": ["-:.*"]}, r"has dynamic \['-:\.\*'\]; must be \{pattern: settings\}"),
        (KINDS["ct int4"][0] | {"ignore": ["re:*.mlp"]}, r"has 're:\*\.mlp' in ignore, which is no regular expression"),
        (KINDS["ct int4"][0] | {"ignore": ["re:a{99999999999}"]}, "in ignore, which is no regular expression: the rep"),
        (KINDS["ct int4"][0] | {"ignore": "lm_head"}, "has ignore 'lm_head'; must be a list of names: correct it in config.json"),
        (group("ct int4", targets=["re:["]), r"has 're:\[' in targets, which is no regular expression: unterminated"),
        (group("ct int4", targets="Linear"), "has targets 'Linear'; must be a list of names"),
        (KINDS["awq"][0] | {"modules_to_not_convert": "lm_head"}, "has modules_to_not_convert 'lm_head'; must be a list of"),
        (KINDS["fp8, tiles"][0] | {"ignored_layers": [3]}, r"has ignored_layers \[3\]; must be a list of names"),
        (KINDS["modelopt"][0] | {"exclude_modules": {"a": 1}}, "has exclude_modules .*; must be a list of names"),
        (group("ct int8", input_activations=TOKEN | {"type": "int", "symmetric": False}), "activations with zero points"),
        (KINDS["ct int4"][0] | {"transform_config": {"config_groups": {"u": {}}}}, "has a transform_config: its activations are"),
        (KINDS["gptq"][0] | {"checkpoint_format": "marlin"}, "has the layout 'marlin'; read are gptq and gptq_v2: save it in one "
         "of these with GPTQModel, or give the 16-bit checkpoint"),
        (KINDS["gptq"][0] | {"group_size": 0}, "has group_size 0; must be a whole number of at least 1, or -1"),
        (KINDS["gptq"][0] | {"group_size": 48}, "q_proj has rows of K = 64 numbers and groups of 48; K must be a multiple"),
        (KINDS["awq"][0] | {"version": "gemv"}, "has the layout 'gemv' of AWQ"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "format": "gemv"}, "has the layout 'gemv' of AWQ"),
        (KINDS["awq"][0] | {"bits": 8}, "has AWQ of 8 bits; read are 4: give the 16-bit checkpoint"),
        (KINDS["fp8, tiles"][0] | {"weight_block_size": [64, 64]}, r"has weight_block_size \[64, 64\]; read are \[128, 128\]"),
        (KINDS["modelopt"][0] | {"quant_algo": "NVFP4"}, "has quant_algo 'NVFP4'; read is FP8"),
        *(
            (
                KINDS["ct int4"][0] | {"format": layout},
                f"has the layout '{layout}'; read are float-quantized, .*: write it in one of these with llm-compressor, or give",
            )
            for layout in ("marlin-24", "sparse-24-bitmask", "sparse-bitmask")
        ),
        (KINDS["ct int4"][0] | {"config_groups": {}}, "has no config_groups"),
        (KINDS["ct int4"][0] | {"sparsity_config": {"format": "sparse-24-bitmask"}},
         "has the sparse layout 'sparse-24-bitmask'; must be dense: write it so with llm-compressor, or give the"),
        (group("ct int4", targets=["re:.*experts.*"]), "has the target 're:.*experts.*', which matches no module"),
        (group("ct int4", weights={"num_bits": 3, "type": "int", "strategy": "channel"}), "of 3 bits"),
        (group("ct int8", input_activations={"dynamic": False}), "has INT8 with static activations"),
        (group("ct fp8, rows", input_activations=None), "has FP8 weights with activations in 16 bits"),
        (
            KINDS["ct int4"][0] | {"config_groups": {str(n): KINDS["ct int4"][0]["config_groups"]["group_0"] for n in range(2)}},
            "has 2 config groups that match layers.0.self_attn.q_proj; one may",
        ),
    ],
)  # fmt: skip
def test_wrong_configurations(config, sentence: str, tmp_path: Path) -> None:
    quantised("ct int4", tmp_path) if "config_groups" in config else quantised("gptq", tmp_path)
    configure(tmp_path, quantization_config=config)
    with pytest.raises(rt.InvalidInput, match=sentence):
        Decoder.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"quip_params": {"codebook": "E8P12"}}, "quip"), ({"quantization": {"group_size": 64, "bits": 4}}, "mlx")],
)
def test_those_that_name_no_method(settings: dict, name: str, tmp_path: Path) -> None:
    plain(tmp_path)
    configure(tmp_path, **settings)
    with pytest.raises(rt.InvalidInput, match=rf"are quantised \({name}\); .*: give the 16-bit checkpoint"):
        Decoder.from_folder(tmp_path)


def test_gguf(tmp_path: Path) -> None:
    plain(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model-Q4_K_M.gguf").touch()
    sentence = r"model-Q4_K_M\.gguf is GGUF; read are safetensors: load it with Transformers, .*gguf_file=\.\.\.\), and save it"
    with pytest.raises(rt.InvalidInput, match=sentence):
        Decoder.from_folder(tmp_path)
    (tmp_path / "config.json").unlink()
    for path in (tmp_path, tmp_path / "model-Q4_K_M.gguf"):
        with pytest.raises(rt.InvalidInput, match=sentence):
            Decoder.from_folder(path)


@pytest.mark.parametrize(
    ("kind", "name"), [("gptq", "model.pt"), ("gptq", "pytorch_model.bin"), ("awq", "awq_model_w4.pth"), ("ct int4", "x.ckpt")]
)
def test_pickles(kind: str, name: str, tmp_path: Path) -> None:
    """The sentence has a line that makes safetensors of it."""
    quantised(kind, tmp_path)
    due = Decoder.from_folder(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / name)
    (tmp_path / "model.safetensors").unlink()
    line = f'save_file(torch.load({name!r}, weights_only=True), "model.safetensors")'
    with pytest.raises(rt.InvalidInput, match=f"has {name}, a pickle, which can run any code; only safetensors") as error:
        Decoder.from_folder(tmp_path)
    assert line in str(error.value)
    with contextlib.chdir(tmp_path):
        eval(line, {"torch": torch, "save_file": save_file})
    assert torch.equal(Decoder.from_folder(tmp_path).layers[1].o.dequantised(), due.layers[1].o.dequantised())
