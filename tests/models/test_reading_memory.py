"""Reading a checkpoint on a CPU takes the weights that it leaves, and at its peak at most one layer in 16 bits besides."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile

from rooftile.models import Decoder
from tests.models.quantised import KINDS, configure, plain, quantised

SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2, "vocab_size": 97}
LAYER_BYTES = 2 * (4 * 1024 * 1024 + 3 * 1024 * 2816)


class Taken(NamedTuple):
    """Bytes of tensors after reading, and at its peak."""

    left: int
    peak: int


def taken(read: Callable[[], Decoder], folder: Path, tmp_path: Path) -> Taken:
    """Returns what PyTorch's allocator gave away. Files do not count: they are mapped, and the system may take pages back."""
    files = {path.stat().st_size for path in folder.glob("*.safetensors")}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        decoder = read()
    found.export_chrome_trace(str(tmp_path / "trace.json"))
    events = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["name"] == "[memory]"]
    now, peak, mapped = 0, 0, set()
    for event in sorted(events, key=lambda event: event["ts"]):
        size, place = event["args"]["Bytes"], event["args"]["Addr"]
        if size in files:
            mapped.add(place)
        elif size < 0 and place in mapped:
            mapped.remove(place)
        else:
            now += size
            peak = max(peak, now)
    assert decoder.layers
    return Taken(now, peak)


@pytest.fixture(scope="module")
def in_16_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    plain(folder, num_key_value_heads=4, **SIZES).bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("weights", ["auto", "w8", "int4", "fp8", "fp8_tile", "int8", "mxfp8", "mxfp4", "nvfp4", "2:4"])
def test_a_checkpoint_that_is_quantised_while_it_is_read(weights: str, in_16_bits: Path, tmp_path: Path) -> None:
    left, peak = taken(lambda: Decoder.from_folder(in_16_bits, weights=weights), in_16_bits, tmp_path)
    assert peak <= left + LAYER_BYTES


@pytest.mark.parametrize(
    "kind",
    [
        "ct int4, act-order", "ct 8 bits, packed", "ct fp8, rows", "ct fp8, tiles", "ct int8", "ct nvfp4", "gptq, act-order",
        "gptq, 8 bits", "awq", "torchao int4, zeros",
    ],
)  # fmt: skip
def test_a_checkpoint_that_others_have_quantised(kind: str, tmp_path: Path) -> None:
    """The layer besides is one in codes, too."""
    quantised(kind, tmp_path, num_key_value_heads=4, **SIZES)
    left, peak = taken(lambda: Decoder.from_folder(tmp_path, dtype=torch.bfloat16), tmp_path, tmp_path)
    # embedding, head and norms are no layers
    plain_bytes = 2 * (2 * SIZES["vocab_size"] + 5) * SIZES["hidden_size"]
    assert peak <= left + (left - plain_bytes) / SIZES["num_hidden_layers"]
    (tmp_path / "model.safetensors").unlink()


def test_a_quantised_head(tmp_path: Path) -> None:
    """It is larger than a layer, and is dequantised some rows at a time."""
    rows = 1 << 15
    quantised("ct fp8, rows", tmp_path, vocab_size=rows, hidden_size=256, num_hidden_layers=1)
    configure(tmp_path, quantization_config=dict(KINDS["ct fp8, rows"][0]) | {"ignore": []})
    tensors = load_file(tmp_path / "model.safetensors")
    codes = tensors.pop("lm_head.weight").to(torch.float8_e4m3fn)
    scales = torch.rand(rows, 1) + 0.5
    save_file(tensors | {"lm_head.weight": codes, "lm_head.weight_scale": scales}, tmp_path / "model.safetensors")
    left, peak = taken(lambda: Decoder.from_folder(tmp_path, dtype=torch.bfloat16), tmp_path, tmp_path)
    # fp32 codes times scales, in fp32 and rounded, of an eighth of the rows
    assert peak <= left + (rows // 8) * 256 * (4 + 4 + 2) + (1 << 20)
    assert torch.equal(Decoder.from_folder(tmp_path, dtype=torch.bfloat16).head, (codes.float() * scales).bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_do_not_stay_in_the_file(kind: str, tmp_path: Path) -> None:
    """Files are mapped: who writes to one would change the model that was read from it."""
    model = quantised(kind, tmp_path)
    decoder = Decoder.from_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    for ours, layer in zip(decoder.layers, model.model.layers, strict=True):
        assert torch.equal(ours.o.dequantised(), layer.self_attn.o_proj.weight)
        assert torch.equal(ours.feed_forward.down.dequantised(), layer.mlp.down_proj.weight)
        due = torch.cat([getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv"])
        assert torch.equal(ours.qkv.dequantised(), due)
