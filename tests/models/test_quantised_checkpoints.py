"""Checkpoints that others have quantised: the weights that they stand for, bit for bit, and a sentence for each that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import rooftile as rt
from rooftile.matmul import QuantisedWeight
from rooftile.models import Decoder
from tests.models.checkpoints import assert_same, logits_of_ours, logits_of_theirs, prompts
from tests.models.quantised import KINDS, TOKEN, configure, plain, quantised


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_layout(kind: str, tmp_path: Path) -> None:
    model = quantised(kind, tmp_path)
    decoder = Decoder.from_folder(tmp_path)
    for ours, theirs in zip(decoder.layers, model.model.layers, strict=True):
        attention, mlp = theirs.self_attn, theirs.mlp
        due = {
            "qkv": [attention.q_proj, attention.k_proj, attention.v_proj], "o": [attention.o_proj],
            "up": [mlp.gate_proj, mlp.up_proj], "down": [mlp.down_proj],
        }  # fmt: skip
        for name, parts in due.items():
            projection = getattr(ours, name)
            assert projection.weight is None
            assert all(isinstance(part, QuantisedWeight) for part in projection.parts)
            assert torch.equal(projection.dequantised(), torch.cat([part.weight for part in parts])), name
    # the embedding, the head and norms are as they were
    assert torch.equal(decoder.embedding, model.model.embed_tokens.weight)
    assert torch.equal(decoder.head, model.lm_head.weight)


@pytest.mark.parametrize("kind", [kind for kind, (_, _, exact) in KINDS.items() if exact])
def test_logits_are_those_of_the_dequantised_model(kind: str, tmp_path: Path) -> None:
    model = quantised(kind, tmp_path)
    asked = prompts((20, 3))
    assert_same(logits_of_ours(Decoder.from_folder(tmp_path), asked), logits_of_theirs(model, asked))


@pytest.mark.parametrize("kind", [kind for kind, (_, _, exact) in KINDS.items() if not exact])
def test_logits_are_near_those_of_the_dequantised_model(kind: str, tmp_path: Path) -> None:
    """Activations are rounded, too."""
    model = quantised(kind, tmp_path)
    asked = prompts((20, 3))
    found, due = logits_of_ours(Decoder.from_folder(tmp_path), asked), logits_of_theirs(model, asked)
    assert 0 < (found - due).abs().mean() <= 0.25 * due.abs().mean()


def test_projections_are_one_weight_where_their_parts_go_together(tmp_path: Path) -> None:
    pieces = {"ct int4": 1, "fp8, one scale": 1, "gptq, act-order": 3, "fp8, tiles": 3}
    for kind, due in pieces.items():
        folder = tmp_path / kind
        quantised(kind, folder)
        assert len(Decoder.from_folder(folder).layers[0].qkv.parts) == due, kind
    # here q has 128 rows: its tiles end where it ends
    quantised("fp8, tiles", tmp_path / "wide", head_dim=32, num_attention_heads=4, num_key_value_heads=4)
    assert len(Decoder.from_folder(tmp_path / "wide").layers[0].qkv.parts) == 1
    quantised("ct int4", tmp_path / "one", head_dim=32)
    assert Decoder.from_folder(tmp_path / "one").layers[0].up.parts[0].shape == (256, 64)


def test_one_scale_for_activations_becomes_the_largest(tmp_path: Path) -> None:
    quantised("fp8, one scale", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.input_scale"] = torch.tensor(0.5)
    save_file(tensors, tmp_path / "model.safetensors")
    (weight,) = Decoder.from_folder(tmp_path).layers[0].qkv.parts
    assert weight.input_scale.item() == 0.5


def test_a_tied_model(tmp_path: Path) -> None:
    model = quantised("ct int4", tmp_path, tie_word_embeddings=True)
    asked = prompts((7,))
    assert_same(logits_of_ours(Decoder.from_folder(tmp_path), asked), logits_of_theirs(model, asked))


def test_a_mislabelled_folder_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantised("gptq, mislabelled", tmp_path)
    Decoder.from_folder(tmp_path)
    assert "says GPTQ version 1, and layers.0.self_attn.q_proj.qzeros are those of version 2" in caplog.text


@pytest.mark.parametrize(("kind", "name"), [("gptq, act-order", "g_idx"), ("ct int4, act-order", "weight_g_idx")])
def test_columns_in_another_order_need_their_groups(kind: str, name: str, tmp_path: Path) -> None:
    """Without them the weights would be read in a wrong order, and without an error."""
    quantised(kind, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.1.self_attn.o_proj.{name}"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(rt.InvalidInput, match=rf"the checkpoint lacks layers\.1\.self_attn\.o_proj\.{name}, which its"):
        Decoder.from_folder(tmp_path)


def test_a_negative_scale_of_nvfp4_is_refused(tmp_path: Path) -> None:
    quantised("ct nvfp4", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    scales = tensors["model.layers.0.mlp.up_proj.weight_scale"].float()
    scales[3, 1] = -1
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = scales.to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(rt.InvalidInput, match=r"up_proj\.weight_scale holds a negative scale; scales must be 0 or more"):
        Decoder.from_folder(tmp_path)


def test_a_scheme_for_the_cache_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantised("ct int4", tmp_path)
    Decoder.from_folder(tmp_path)
    assert "kv_cache_scheme" not in caplog.text
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    configure(tmp_path, quantization_config=dict(KINDS["ct int4"][0]) | {"kv_cache_scheme": scheme})
    Decoder.from_folder(tmp_path)
    assert 'its kv_cache_scheme is not used: the cache has the dtype that kv_dtype says; "fp8" finds' in caplog.text


def test_modules_that_stay(tmp_path: Path) -> None:
    quantised("ct int4", tmp_path)
    model = plain(tmp_path / "plain")
    tensors, whole = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "plain" / "model.safetensors")
    for n in range(2):
        for name in ("k_proj", "o_proj"):
            module = f"model.layers.{n}.self_attn.{name}"
            for suffix in ("weight_packed", "weight_scale", "weight_shape"):
                del tensors[f"{module}.{suffix}"]
            tensors[f"{module}.weight"] = whole[f"{module}.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    config = dict(KINDS["ct int4"][0])
    configure(tmp_path, quantization_config=config | {"ignore": ["lm_head", r"re:.*\.k_proj", "model.layers.0.self_attn.o_proj",
                                                                "model.layers.1.self_attn.o_proj"]})  # fmt: skip
    decoder = Decoder.from_folder(tmp_path)
    q, k, v = decoder.layers[0].qkv.parts
    assert isinstance(q, QuantisedWeight)
    assert torch.equal(k, model.model.layers[0].self_attn.k_proj.weight)
    assert isinstance(v, QuantisedWeight)
    assert torch.equal(decoder.layers[1].o.weight, model.model.layers[1].self_attn.o_proj.weight)


def test_modules_that_gptq_leaves_out(tmp_path: Path) -> None:
    quantised("gptq", tmp_path)
    model = plain(tmp_path / "plain")
    tensors = load_file(tmp_path / "model.safetensors")
    for suffix in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"model.layers.0.mlp.down_proj.{suffix}"]
    tensors["model.layers.0.mlp.down_proj.weight"] = model.model.layers[0].mlp.down_proj.weight.detach()
    save_file(tensors, tmp_path / "model.safetensors")
    configure(tmp_path, quantization_config=KINDS["gptq"][0] | {"dynamic": {r"-:.*\.0\.mlp\.down_proj": {}}})
    decoder = Decoder.from_folder(tmp_path)
    assert torch.equal(decoder.layers[0].down.weight, model.model.layers[0].mlp.down_proj.weight)
    assert isinstance(decoder.layers[1].down.parts[0], QuantisedWeight)


def test_biases_that_are_zeros_need_no_place(tmp_path: Path) -> None:
    """AutoGPTQ wrote them for models without biases; others would be lost, so they are refused."""
    quantised("gptq", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for value in (0.0, 1.0):
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.full((64,), value)
        save_file(tensors, tmp_path / "model.safetensors")
        if value:
            with pytest.raises(rt.InvalidInput, match=r"has model\.layers\.0\.self_attn\.q_proj\.bias, which"):
                Decoder.from_folder(tmp_path)
        else:
            Decoder.from_folder(tmp_path)


def test_a_file_of_modelopt_says_what_config_json_does_not(tmp_path: Path) -> None:
    quantised("modelopt", tmp_path)
    due = Decoder.from_folder(tmp_path)
    configure(tmp_path, quantization_config=None)
    path, own = tmp_path / "hf_quant_config.json", {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": own}))
    found = Decoder.from_folder(tmp_path)
    assert torch.equal(found.layers[0].qkv.parts[0].codes.float(), due.layers[0].qkv.parts[0].codes.float())
    with pytest.raises(rt.InvalidInput, match=r"is quantised already \(modelopt\)"):
        Decoder.from_folder(tmp_path, weights="int4")
    path.write_text(json.dumps({"quantization": own | {"quant_algo": "NVFP4"}}))
    with pytest.raises(rt.InvalidInput, match="has quant_algo 'NVFP4'; read is FP8"):
        Decoder.from_folder(tmp_path)


def test_scales_of_a_cache_are_left(tmp_path: Path) -> None:
    quantised("ct int4", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.1)
    save_file(tensors, tmp_path / "model.safetensors")
    Decoder.from_folder(tmp_path)


def test_a_quantised_head_is_dequantised(tmp_path: Path) -> None:
    quantised("ct fp8, rows", tmp_path)
    config = dict(KINDS["ct fp8, rows"][0]) | {"ignore": []}
    configure(tmp_path, quantization_config=config)
    tensors = load_file(tmp_path / "model.safetensors")
    codes = tensors.pop("lm_head.weight").to(torch.float8_e4m3fn)
    tensors |= {"lm_head.weight": codes, "lm_head.weight_scale": torch.full((codes.shape[0], 1), 0.5)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(Decoder.from_folder(tmp_path).head, codes.float() * 0.5)


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
    tensors = load_file(tmp_path / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
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
        ({"quant_method": "bitsandbytes"}, r"are quantised \(bitsandbytes\); read are compressed-tensors, gptq, .*dequantize"),
        ({"quant_method": "exl2"}, r"are quantised \(exl2\); .*: give the 16-bit checkpoint and weights="),
        ({"quant_method": "torchao"}, "names torchao, and the header of model.safetensors says nothing of its tensors"),
        ({"bits": 4}, "are quantised \\(no method named\\)"),
        (KINDS["gptq"][0] | {"bits": 3}, "has GPTQ of 3 bits; read are 4 and 8"),
        (KINDS["gptq"][0] | {"dynamic": {"+:.*": {"bits": 8}}}, r"has the rule '\+:\.\*' with settings .*; read are rules that"),
        (group("ct int8", input_activations=TOKEN | {"type": "int", "symmetric": False}), "activations with zero points"),
        (KINDS["ct int4"][0] | {"transform_config": {"config_groups": {"u": {}}}}, "has a transform_config: its activations are"),
        (KINDS["gptq"][0] | {"checkpoint_format": "marlin"}, "has the layout 'marlin'; read are gptq and gptq_v2"),
        (KINDS["gptq"][0] | {"group_size": 0}, "has group_size 0; must be a whole number of at least 1, or -1"),
        (KINDS["gptq"][0] | {"group_size": 48}, "q_proj has rows of K = 64 numbers and groups of 48; K must be a multiple"),
        (KINDS["awq"][0] | {"version": "gemv"}, "has the layout 'gemv' of AWQ"),
        (KINDS["fp8, tiles"][0] | {"weight_block_size": [64, 64]}, r"has weight_block_size \[64, 64\]; read are \[128, 128\]"),
        (KINDS["modelopt"][0] | {"quant_algo": "NVFP4"}, "has quant_algo 'NVFP4'; read is FP8"),
        (KINDS["ct int4"][0] | {"format": "marlin-24"}, "has the layout 'marlin-24'; read are float-quantized"),
        (KINDS["ct int4"][0] | {"config_groups": {}}, "has no config_groups"),
        (KINDS["ct int4"][0] | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "has the sparse layout 'sparse-24-bitmask'"),
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
