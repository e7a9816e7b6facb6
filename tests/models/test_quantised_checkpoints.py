"""Checkpoints that others have quantised: the weights that they stand for, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import rooftile as rt
from rooftile.models import Decoder
from rooftile.models.checkpoints import weights
from rooftile.weights import QuantisedWeight
from tests.models.checkpoints import assert_same, logits_of_ours, logits_of_theirs, prompts
from tests.models.quantised import KINDS, PROJECTIONS, configure, merged_modules, plain, quantised, words


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_layout(kind: str, tmp_path: Path) -> None:
    model = quantised(kind, tmp_path)
    decoder = Decoder.from_folder(tmp_path)
    for ours, theirs in zip(decoder.layers, model.model.layers, strict=True):
        for name, parts in merged_modules(theirs).items():
            projection = ours.get_submodule(name)
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
    assert Decoder.from_folder(tmp_path / "one").layers[0].feed_forward.up.parts[0].shape == (256, 64)


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


def in_shards(folder: Path, count: int = 3) -> None:
    """Deals the tensors of a checkpoint's file to several files with an index, neighbours to different ones."""
    path = folder / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    tensors, places = load_file(path), {}
    path.unlink()
    for n in range(count):
        name = f"model-{n + 1:05}-of-{count:05}.safetensors"
        own = {key: tensors[key] for key in sorted(tensors)[n::count]}
        # Transformers gives each shard the header of all
        save_file(own, folder / name, metadata=header)
        places |= dict.fromkeys(own, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("gptq, act-order", ("qweight", "qzeros", "scales", "g_idx")),
        ("awq", ("qweight", "qzeros", "scales")),
        ("ct int4, zeros", ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")),
        ("ct nvfp4", ("weight_packed", "weight_scale", "weight_global_scale")),
        ("ct fp8, one scale", ("weight", "weight_scale", "input_scale")),
        ("fp8, tiles", ("weight", "weight_scale_inv")),
        ("modelopt", ("weight", "weight_scale", "input_scale")),
        ("torchao int4, zeros", ("_weight_qdata", "_weight_scale", "_weight_zero_point")),
    ],
)
def test_the_tensors_of_a_module_lie_in_several_shards(kind: str, names: tuple[str, ...], tmp_path: Path) -> None:
    quantised(kind, tmp_path)
    due = Decoder.from_folder(tmp_path)
    in_shards(tmp_path)
    shards = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len({shards[f"model.layers.1.mlp.up_proj.{name}"] for name in names}) == min(len(names), 3)
    found = Decoder.from_folder(tmp_path)
    for ours, whole in zip(found.layers, due.layers, strict=True):
        for name in PROJECTIONS:
            assert ours.get_submodule(name).weight is None
            assert torch.equal(ours.get_submodule(name).dequantised(), whole.get_submodule(name).dequantised())
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found.tensors(), due.tensors(), strict=True))
    # a shard that is missing is named
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(rt.InvalidInput, match=r"lacks model-00002-of-00003\.safetensors, which model\.safetensors\.index\.json"):
        Decoder.from_folder(tmp_path)


def test_a_mislabelled_folder_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantised("gptq, mislabelled", tmp_path)
    for times in (1, 2):
        Decoder.from_folder(tmp_path)
        lines = [line for line in caplog.messages if "GPTQ" in line]
        assert len(lines) == times
    assert f"{tmp_path}: quantization_config says GPTQ version 1, and layers.0.self_attn.q_proj.qzeros belong to" in lines[0]


def with_points_of_zero(folder: Path, write) -> Tensor:
    """Changes the zero points of k_proj, which `write` turns into words; returns its weight."""
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.self_attn.k_proj"
    points = torch.randint(1, 16, (2, 32), generator=torch.Generator().manual_seed(2))
    # two neighbours, one alone, and the last of a word
    points[0, [3, 4, 8 + 5, 16 + 7]] = 0
    tensors[f"{name}.qzeros"] = write(points)
    save_file(tensors, folder / "model.safetensors")
    codes = (tensors[f"{name}.qweight"][:, None] >> torch.arange(0, 32, 4)[:, None] & 15).flatten(0, 1)  # (K, N)
    groups = tensors[f"{name}.g_idx"].long()
    return ((codes - points[groups]).float() * tensors[f"{name}.scales"].float()[groups]).T


@pytest.mark.parametrize("quantizer", ["gptqmodel:4.2.0", ["gptqmodel:1.4.1"]])
def test_zero_points_of_0_that_borrow_from_their_neighbours(quantizer, tmp_path: Path) -> None:
    """GPTQModel subtracts one from all points of a word at once."""
    quantised("gptq", tmp_path)
    due = with_points_of_zero(tmp_path, lambda points: words(points - 1))
    configure(tmp_path, quantization_config=KINDS["gptq"][0] | {"meta": {"quantizer": quantizer}})
    found = Decoder.from_folder(tmp_path).layers[0].qkv.dequantised()[64 : 64 + 32]
    assert torch.equal(found, due)


def test_zero_points_of_0_from_others(tmp_path: Path) -> None:
    quantised("gptq", tmp_path)
    sentence = r"k_proj\.qzeros has zero points of 0, which GPTQ version 1 has no code for and AutoGPTQ writes over others: quant"
    for write in (
        lambda points: words(points - 1),
        # AutoGPTQ: the ones of -1 cover the points above it
        lambda points: torch.stack([_covered(row) for row in points - 1]),
        lambda points: words((points - 1) % 16),
    ):
        with_points_of_zero(tmp_path, write)
        with pytest.raises(rt.InvalidInput, match=sentence):
            Decoder.from_folder(tmp_path)
    # version 2 has all points
    due = with_points_of_zero(tmp_path, words)
    configure(tmp_path, quantization_config=KINDS["gptq"][0] | {"checkpoint_format": "gptq_v2"})
    assert torch.equal(Decoder.from_folder(tmp_path).layers[0].qkv.dequantised()[64 : 64 + 32], due)


def test_a_zero_point_of_0_in_the_last_place_of_a_word(tmp_path: Path) -> None:
    """There is nothing to borrow from or to cover, so all tools write it alike."""
    quantised("gptq", tmp_path)
    for write in (lambda points: words(points - 1), lambda points: torch.stack([_covered(row) for row in points - 1])):

        def last_alone(points: Tensor, write=write) -> Tensor:
            points[0, [3, 4, 8 + 5]] = 9
            return write(points)

        due = with_points_of_zero(tmp_path, last_alone)
        assert torch.equal(Decoder.from_folder(tmp_path).layers[0].qkv.dequantised()[64 : 64 + 32], due)


def _covered(row: Tensor) -> Tensor:
    """Words of int32, whose codes are 32 bits wide and joined by OR."""
    found = []
    for at in range(0, len(row), 8):
        word = 0
        for n, code in enumerate(row[at : at + 8].tolist()):
            word |= (code % (1 << 32)) << (4 * n) & 0xFFFFFFFF
        found.append(word - (1 << 32) if word >= 1 << 31 else word)
    return torch.tensor(found, dtype=torch.int32)


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
    assert torch.equal(decoder.layers[0].feed_forward.down.weight, model.model.layers[0].mlp.down_proj.weight)
    assert isinstance(decoder.layers[1].feed_forward.down.parts[0], QuantisedWeight)


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


@pytest.mark.parametrize("kind", ["gptq", None])
def test_who_listens_hears_how_much_has_been_read(kind: str | None, tmp_path: Path) -> None:
    plain(tmp_path) if kind is None else quantised(kind, tmp_path)
    shares: list[float] = []
    with weights.reporting_progress(shares.append):
        Decoder.from_folder(tmp_path, weights="int4:32" if kind is None else "auto")
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert len(set(shares)) > 4


def test_a_format_of_scales_that_is_not_used_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantised("fp8, tiles", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    (tmp_path / "config.json").write_text(json.dumps(config))
    Decoder.from_folder(tmp_path)
    assert [line.getMessage() for line in caplog.records] == [
        f"{tmp_path}: scale_fmt 'ue8m0' is not used: scales of activations are not rounded to powers of two"
    ]
