"""Writes tests/models/layouts/LIBRARY.safetensors: layers that other libraries quantised, stored and dequantised.

Each library has an environment of its own, since they ask for different versions of Transformers (4.47.1 for autoawq and
auto-gptq, 5.17.0 for the others), and the versions of `VERSIONS`:

    pip install autoawq==0.2.7.post3 transformers==4.47.1; python scripts/write_layout_vectors.py autoawq

A file has, per layer, the tensors under the library's own names; `dequantised`, which the library computes from them; for codes
in words `numbers`, which it computes with scales of 1; and in its header the `quantization_config` that the library would write.
The tests read these files as checkpoints are read, and hold the files against the libraries where those are installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

VERSIONS = {
    "autoawq": "0.2.7.post3", "auto-gptq": "0.7.1", "gptqmodel": "7.7.0", "nvidia-modelopt": "0.47.0", "torchao": "0.18.0",
    "transformers": "5.17.0",
}  # fmt: skip
FOLDER = Path(__file__).parents[1] / "tests/models/layouts"
GROUP = 32


class Made(NamedTuple):
    """A library's layers: tensors by `LAYER.NAME`, the layers' configurations, and its own header of a file."""

    tensors: dict[str, Tensor]
    sections: dict[str, dict[str, Any]]
    header: dict[str, str]


def weight() -> Tensor:
    """Returns (32, 128) numbers: rows of different sizes, groups of zeros and of one sign, an outlier, ties."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(32, 128, generator=generator) * torch.exp2(torch.arange(-16, 16) / 4)[:, None]
    w[3, :64] = 0
    w[4] = w[4].abs()
    w[5] = -w[5].abs()
    w[6, 7] = 1e3
    w[7] = torch.arange(128) / 16 - 4
    return w


def both_signs(w: Tensor) -> Tensor:
    """Returns a weight whose groups all have numbers on both sides of zero, and none that outweighs the others."""
    w = w.abs()
    w[6] = w[8]
    w[:, ::2] *= -1
    return w


def large() -> Tensor:
    """Returns (256, 256) numbers in bf16, whose four tiles differ in size."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.exp2(torch.arange(256) / 32), torch.exp2(-torch.arange(256) / 64)
    return (torch.randn(256, 256, generator=generator) * rows[:, None] * columns).bfloat16()


def thinned(w: Tensor) -> Tensor:
    """Returns every sixteenth row of a large weight, and a small one whole."""
    return w[::16] if w.shape[0] > 32 else w


def linear(w: Tensor) -> nn.Linear:
    """Returns a layer with this weight and no bias."""
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
    layer.weight.data = w.clone()
    return layer


def by_autoawq() -> Made:
    """Returns a layer of AWQ in the gemm layout, with groups of 32 and of whole rows."""
    from awq.models._config import AwqConfig
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.packing_utils import dequantize_gemm

    tensors, sections = {}, {}
    for name, group in (("groups", GROUP), ("rows", 128)):
        layer = linear(weight().half())
        settings = SimpleNamespace(group_size=group, w_bit=4, zero_point=True)
        layer.weight.data, scales, zeros = AwqQuantizer.pseudo_quantize_tensor(settings, layer.weight.data)
        made = WQLinear_GEMM.from_linear(layer, 4, group, False, scales.T.contiguous(), zeros.T.contiguous())
        found = dict(made.state_dict())
        words = found["qweight"], found["qzeros"]
        found["dequantised"] = dequantize_gemm(*words, found["scales"], 4, group).T
        found["numbers"] = dequantize_gemm(*words, torch.ones_like(found["scales"]), 4, group).T.to(torch.int8)
        tensors |= {f"{name}.{key}": x for key, x in found.items()}
        sections[name] = AwqConfig(q_group_size=group).to_transformers_dict()
    return Made(tensors, sections, {})


def by_auto_gptq() -> Made:
    """Returns layers of AutoGPTQ, which writes version 1; its packing loses zero points of 0, so no group needs them."""
    from auto_gptq import BaseQuantizeConfig
    from auto_gptq.nn_modules.qlinear.qlinear_cuda_old import QuantLinear
    from auto_gptq.quantization.quantizer import Quantizer

    tensors, sections = {}, {}
    for name, bits, symmetric in (("zeros", 4, False), ("symmetric", 4, True), ("8 bits", 8, True)):
        w = both_signs(weight())
        quantiser = Quantizer()
        quantiser.configure(bits, perchannel=True, sym=symmetric)
        scales, zeros = [], []
        for columns in w.split(GROUP, dim=1):
            quantiser.find_params(columns, weight=True)
            scales.append(quantiser.scale)
            zeros.append(quantiser.zero)
        made = QuantLinear(bits, GROUP, 128, 32, bias=False)
        made.pack(linear(w.half()), torch.cat(scales, 1), torch.cat(zeros, 1), None)
        found = dict(made.state_dict())
        # it dequantises inside its product
        identity = torch.eye(128, dtype=torch.half)
        found["dequantised"] = made(identity).T
        made.scales = torch.ones_like(made.scales)
        found["numbers"] = made(identity).T.to(torch.int16 if bits == 8 else torch.int8)
        tensors |= {f"{name}.{key}": x for key, x in found.items()}
        config = BaseQuantizeConfig(bits=bits, group_size=GROUP, sym=symmetric, desc_act=False)
        sections[name] = json.loads(json.dumps(config.to_dict()))
    return Made(tensors, sections, {})


def by_gptqmodel() -> Made:
    """Returns layers that GPTQ itself quantised, in both versions, with and without act-order."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT, QuantizeConfig
    from gptqmodel.quantization.gptq import GPTQ
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    tensors, sections = {}, {}
    for name, bits, symmetric, ordered, version in (
        ("version 1", 4, False, False, FORMAT.GPTQ), ("version 2", 4, False, False, FORMAT.GPTQ_V2),
        ("version 1, symmetric", 4, True, False, FORMAT.GPTQ), ("version 1, act-order", 4, False, True, FORMAT.GPTQ),
        ("version 2, act-order", 4, True, True, FORMAT.GPTQ_V2), ("version 1, 8 bits", 8, True, False, FORMAT.GPTQ),
    ):  # fmt: skip
        config = QuantizeConfig(
            bits=bits, group_size=GROUP, sym=symmetric, desc_act=ordered, act_group_aware=False, format=version
        )
        layer = linear(weight())
        method = GPTQ(layer, config)
        method.quantizer.configure(perchannel=True)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(4, 64, 128, generator=generator) * torch.exp2(torch.randn(128, generator=generator))
        method.add_batch(x, layer(x))
        layer.weight.data, scales, zeros, g_idx, *_ = method.quantize()
        made = TorchLinear(bits, GROUP, symmetric, ordered, 128, 32)
        made.pack(layer, scales, zeros, g_idx.int())
        # it would compile what dequantises
        made.optimized = True
        made.eval().post_init()
        found = {"dequantised": made.dequantize_weight().T}
        scales, made.scales = made.scales, torch.ones_like(made.scales)
        found["numbers"] = made.dequantize_weight().T.to(torch.int16 if bits == 8 else torch.int8)
        made.scales = scales
        if version == FORMAT.GPTQ:
            convert_gptq_v2_to_v1_format_module(made, config)
        tensors |= {f"{name}.{key}": x.clone() for key, x in {**made.state_dict(), **found}.items()}
        section = config.to_dict()
        # paths of the machine that wrote it
        # a saved model names its writer so, which says what zero points of 0 became; the rest are settings of the run
        section["meta"] = {"quantizer": [f"gptqmodel:{VERSIONS['gptqmodel']}"]}
        sections[name] = json.loads(json.dumps(section))
    return Made(tensors, sections, {})


def by_modelopt() -> Made:
    """Returns the projections of a small Llama that ModelOpt calibrated and exported."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 97}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])).bfloat16()
    names = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
    for n, name in enumerate(names):
        layer = model.get_submodule(f"model.layers.0.{name}")
        layer.weight.data *= 2.0**n * torch.exp2(torch.arange(layer.in_features) / 8)
    tokens = torch.randint(97, (2, 16))
    mtq.quantize(model, mtq.FP8_DEFAULT_CFG, lambda model: model(tokens))
    tensors, sections = {}, {}
    with TemporaryDirectory() as folder:
        export_hf_checkpoint(model, export_dir=folder)
        stored = load_file(Path(folder) / "model.safetensors")
        section = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
    for name in names:
        found = {key: stored[f"model.layers.0.{name}.{key}"] for key in ("weight", "weight_scale", "input_scale")}
        codes = FP8QTensor(found["weight"].shape, torch.bfloat16, found["weight"])
        found["dequantised"] = codes.dequantize(torch.float32, scale=found["weight_scale"])
        tensors |= {f"{name}.{key}": x for key, x in found.items()}
        sections[name] = section
    return Made(tensors, sections, {})


def by_torchao() -> Made:
    """Returns layers of torchao, and the header that says what the tensors of its file are."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        MappingType,
        PerAxis,
        PerBlock,
        PerGroup,
        PerRow,
        PerTensor,
        quantize_,
    )
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import (
        Float8Tensor,
        QuantizeTensorToFloat8Kwargs,
    )

    configs = {
        "int8, dynamic": Int8DynamicActivationInt8WeightConfig(version=2),
        "int8, one scale": Int8DynamicActivationInt8WeightConfig(version=2, granularity=PerTensor()),
        "int8, weights alone": Int8WeightOnlyConfig(version=2),
        "int8, weights alone, groups": Int8WeightOnlyConfig(version=2, granularity=PerGroup(GROUP)),
        "intx of 4 bits": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP)),
        "intx of 4 bits, rows": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerAxis(0)),
        "intx of 4 bits, zeros": IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=PerGroup(GROUP), mapping_type=MappingType.ASYMMETRIC
        ),
        "intx of 8 bits": IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerGroup(GROUP)),
    }
    made = {}
    for name, config in configs.items():
        layer = linear(weight().bfloat16())
        quantize_(layer, config)
        made[name] = layer.weight.data
    # its FP8 configurations ask for a GPU, and the tensors that they make do not
    for name, own, activations in (
        ("fp8, rows", PerRow(), PerRow()), ("fp8, one scale", PerTensor(), PerTensor()),
        ("fp8, tiles", PerBlock([128, 128]), PerBlock([1, 128])),
    ):  # fmt: skip
        w = large()[:, :128] if name == "fp8, tiles" else weight().bfloat16()
        words = QuantizeTensorToFloat8Kwargs(granularity=activations)
        made[name] = Float8Tensor.from_hp(w, granularity=own, act_quant_kwargs=words)
    tensors, header = flatten_tensor_state_dict({f"{name}.weight": x for name, x in made.items()})
    tensors |= {f"{name}.dequantised": thinned(x.dequantize()) for name, x in made.items()}
    return Made(tensors, {name: {"quant_method": "torchao"} for name in made}, header)


def by_transformers() -> Made:
    """Returns layers of Transformers' FP8: tiles with scales in fp32 and in e8m0, and one scale per weight."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, FP8Linear, Fp8Quantize

    tensors, sections = {}, {}
    for name, words, rows in (
        ("tiles", {}, 256), ("tiles, e8m0", {"scale_fmt": "ue8m0"}, 128),
        ("one scale", {"weight_block_size": None}, 32),
        ("one scale, static", {"weight_block_size": None, "activation_scheme": "static"}, 32),
    ):  # fmt: skip
        config = FineGrainedFP8Config(**words)
        quantiser = SimpleNamespace(quantization_config=config)
        stored = Fp8Quantize(quantiser).convert({"weight": large()[:rows]})
        layer = FP8Linear(256, rows, config.weight_block_size, config.activation_scheme, config.scale_fmt)
        stored = {"weight": stored["weight"], "weight_scale_inv": stored["weight_scale_inv"].view_as(layer.weight_scale_inv)}
        if config.activation_scheme == "static":
            stored["activation_scale"] = torch.tensor(0.125)
        layer.load_state_dict(stored)
        found = dict(layer.state_dict())
        given = {"weight$": [found["weight"]], "weight_scale_inv": [found["weight_scale_inv"]]}
        found["dequantised"] = thinned(Fp8Dequantize(quantiser).convert(given)["weight"])
        tensors |= {f"{name}.{key}": x.detach() for key, x in found.items()}
        sections[name] = json.loads(json.dumps(config.to_dict()))
    return Made(tensors, sections, {})


LIBRARIES: dict[str, Callable[[], Made]] = {
    "autoawq": by_autoawq, "auto-gptq": by_auto_gptq, "gptqmodel": by_gptqmodel, "nvidia-modelopt": by_modelopt,
    "torchao": by_torchao, "transformers": by_transformers,
}  # fmt: skip


def main() -> None:
    for library in sys.argv[1:]:
        tensors, sections, header = LIBRARIES[library]()
        tensors = {name: x.contiguous() for name, x in tensors.items()}
        save_file(tensors, FOLDER / f"{library}.safetensors", {**header, "sections": json.dumps(sections)})


if __name__ == "__main__":
    main()
