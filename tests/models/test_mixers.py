"""Layers with Native Sparse Attention: what config.json may say, which tensors they have, and that they are `nn.NativeSparse`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rooftile import nn
from rooftile.errors import InvalidInput
from rooftile.models import Decoder, ModelConfig, NativeSparseSizes
from rooftile.models.config import config_of
from tests.models.sparse import MIXERS, SIZES, attention_without_cache, checkpoint, settings


def test_config_json_says_what_mixes_the_tokens_of_each_layer() -> None:
    config = config_of(settings(), "here")
    assert config.mixers == ("native_sparse", "attention", "native_sparse")
    assert config.native_sparse == NativeSparseSizes(**SIZES)
    assert config.native_sparse.compression == "mlp"
    plain = {name: value for name, value in settings().items() if name not in ("layer_mixers", "native_sparse")}
    assert config_of(plain, "here").mixers == ("attention",) * 3
    assert config_of(plain | {"layer_mixers": ["attention"] * 3}, "here") == config_of(plain, "here")
    # sizes have the defaults of the function
    assert config_of(plain | {"layer_mixers": MIXERS}, "here").native_sparse == NativeSparseSizes()


@pytest.mark.parametrize("compression", ["mlp", "linear", "mean"])
def test_a_layer_is_the_module_of_that_name(compression: str, tmp_path: Path) -> None:
    """The checkpoint's tensors, put into `nn.NativeSparse`, give what the layer adds to the stream, before positions."""
    said = settings(compression=compression, **({"hidden": 20} if compression == "mlp" else {}))
    folder = checkpoint(tmp_path, said)
    decoder = Decoder.from_folder(folder, device="cpu")
    stored = {name.removeprefix("model.layers.2.self_attn."): x for name, x in load_file(folder / "model.safetensors").items()}
    hidden = said["native_sparse"].get("hidden")
    sizes = {name: value for name, value in said["native_sparse"].items() if name != "hidden"}
    module = nn.NativeSparse(40, 4, kv_heads=2, head_dim=8, bias=False, hidden=hidden, backend="eager", **sizes)
    with torch.no_grad():
        for name, weight in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("out", "o_proj"), ("gates", "g_proj")):
            getattr(module, name).weight.copy_(stored[f"{weight}.weight"])
        module.gates.bias.copy_(stored["g_proj.bias"])
        if module.places is not None:
            module.places.copy_(stored["compression.places"])
        for which in module.phi:
            linears = [part for part in module.phi[which] if isinstance(part, torch.nn.Linear)]
            for part, name in zip(linears, ("up", "down") if compression == "mlp" else ("down",), strict=True):
                part.weight.copy_(stored[f"compression.{which}_{name}.weight"])
                part.bias.copy_(stored[f"compression.{which}_{name}.bias"])
    x = torch.randn(50, 40, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found = decoder.layers[2].mix(2, x, None, attention_without_cache(decoder))
        torch.testing.assert_close(found, module(x[None])[0], atol=2e-5, rtol=2e-5)


def test_the_tensors_have_names_and_shapes() -> None:
    decoder = Decoder(config_of(settings(hidden=20), "here"), dtype=torch.float32, device="meta")
    shapes = {name.removeprefix("layers.0.self_attn."): tuple(x.shape) for name, x in decoder.tensors() if ".0.self" in name}
    assert shapes == {
        "q_proj.weight": (32, 40), "k_proj.weight": (3 * 16, 40), "v_proj.weight": (3 * 16, 40), "o_proj.weight": (40, 32),
        "g_proj.weight": (12, 40), "g_proj.bias": (12,), "compression.places": (2, 8, 8),
        "compression.k_up.weight": (20, 64), "compression.k_up.bias": (20,), "compression.k_down.weight": (8, 20),
        "compression.k_down.bias": (8,), "compression.v_up.weight": (20, 64), "compression.v_up.bias": (20,),
        "compression.v_down.weight": (8, 20), "compression.v_down.bias": (8,),
    }  # fmt: skip
    ordinary = [name for name, _ in decoder.tensors() if name.startswith("layers.1.self_attn")]
    assert ordinary == [f"layers.1.self_attn.{name}_proj.weight" for name in "qkvo"]


def test_a_checkpoint_of_other_sizes_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, settings())
    (folder / "config.json").write_text(json.dumps(settings(length=4)))
    with pytest.raises(InvalidInput, match=r"compression\.places \(2, 8, 8\), due \(2, 4, 8\)"):
        Decoder.from_folder(folder)
    exact = {name: value for name, value in settings().items() if name not in ("layer_mixers", "native_sparse")}
    (folder / "config.json").write_text(json.dumps(exact))
    with pytest.raises(InvalidInput, match=r"which its config\.json has no place for"):
        Decoder.from_folder(folder)
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.0.self_attn.g_proj.weight"]
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings()))
    with pytest.raises(InvalidInput, match=r"the checkpoint lacks layers\.0\.self_attn\.g_proj\.weight"):
        Decoder.from_folder(folder)


@pytest.mark.parametrize(
    ("changed", "due"),
    [
        ({"layer_mixers": None}, "has native_sparse and no layer_mixers, which must name the mixer of each layer"),
        ({"layer_mixers": ["attention"] * 3}, "has native_sparse and no layer with it in layer_mixers; name its layers there"),
        ({"layer_mixers": MIXERS[:2]}, "must be 'attention' or 'native_sparse' for each of 3 layers"),
        ({"layer_mixers": ["mamba"] * 3}, r"has layer_mixers \['mamba', 'mamba', 'mamba'\]; must be"),
        ({"layer_mixers": [[], {}, 1]}, "has layer_mixers"),
        ({"layer_mixers": "native_sparse"}, "has layer_mixers 'native_sparse'"),
        ({"native_sparse": SIZES | {"stride": 3}}, "has native_sparse of which length is 8; must be a multiple of stride, 3"),
        ({"native_sparse": SIZES | {"count": 1}}, "has native_sparse of which count is 1; first"),
        ({"native_sparse": SIZES | {"window": 0}}, "has native_sparse of which window is 0"),
        ({"native_sparse": SIZES | {"length": "8"}}, "has native_sparse of which length is"),
        ({"native_sparse": SIZES | {"compression": "max"}}, "has native_sparse of which compression is"),
        ({"native_sparse": SIZES | {"hidden": -1}}, "has native_sparse of which hidden is -1"),
        ({"native_sparse": SIZES | {"hidden": 1 << 40}}, "native_sparse maps 8 x 8 numbers to 1,099,511,627,776"),
        ({"native_sparse": SIZES | {"blocks": 4}}, r"has native_sparse\.blocks; has length, stride, block_size"),
        ({"native_sparse": [8]}, r"has native_sparse \[8\]; must be a JSON object"),
        ({"model_type": "gemma2"}, "layer 0 is native_sparse and the family gemma2 has a softcap; must have none"),
        ({"model_type": "mistral"}, "layer 0 is native_sparse and has a window of its own; must have None"),
        ({"model_type": "phi3"}, "layer 0 is native_sparse and the family phi3; must be one with a projection each, as llama"),
        ({"model_type": "olmo2"}, "layer 0 is native_sparse and the family olmo2 has norms over all heads; must have none"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(changed: dict[str, Any], due: str) -> None:
    with pytest.raises(InvalidInput, match=due) as refused:
        config_of(settings() | changed, "here")
    assert "\n" not in str(refused.value)


def test_a_configuration_made_by_hand_is_checked_too() -> None:
    made = {
        "family": "llama", "vocab_size": 9, "layers": 2, "hidden": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 8,
        "max_len": 16, "scale": 0.5, "windows": (None, None), "rotary": None,
    }  # fmt: skip
    assert ModelConfig(**made).mixers == ("attention", "attention")
    for mixers, due in ((("attention",), "for each of 2 layers"), (("native_sparse",) * 2, "its sizes are None")):
        with pytest.raises(InvalidInput, match=due):
            ModelConfig(**made, mixers=mixers)
