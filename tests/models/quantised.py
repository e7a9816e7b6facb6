"""Tiny checkpoints as other libraries quantise them, written from the layouts' descriptions, with their weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.checkpoints import SMALL, made, saved

Tensors = dict[str, Tensor]
GROUP = 32
LLAMA = SMALL | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def plain(folder: Path, **settings: Any) -> transformers.PreTrainedModel:
    """A Llama in 32 bits, saved to the folder."""
    model = made(transformers.LlamaConfig(**(LLAMA | settings)))
    saved(model, folder)
    return model


# the projections of a layer of ours with attention and a dense feed-forward
PROJECTIONS = ("qkv", "o", "feed_forward.up", "feed_forward.down")


def merged_modules(layer: Any) -> dict[str, list[torch.nn.Linear]]:
    """Returns the modules of a layer of Transformers that each projection of ours has side by side."""
    attention, mlp = layer.self_attn, layer.mlp
    return {
        "qkv": [attention.q_proj, attention.k_proj, attention.v_proj], "o": [attention.o_proj],
        "feed_forward.up": [mlp.gate_proj, mlp.up_proj], "feed_forward.down": [mlp.down_proj],
    }  # fmt: skip


def words(codes: Tensor, bits: int = 4) -> Tensor:
    """Words of int32 along the last axis, the first code in the lowest bits."""
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % (32 // bits))).unflatten(-1, (-1, 32 // bits))
    packed = (codes << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def integers(N: int, K: int, bits: int, generator: torch.Generator, *, zeros: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Unsigned codes (N, K), zero points and scales (N, K / GROUP)."""
    top, shape = 1 << bits, (N, K // GROUP)
    codes = torch.randint(top, (N, K), generator=generator)
    points = torch.randint(1, top, shape, generator=generator) if zeros else torch.full(shape, top // 2)
    scales = ((torch.rand(shape, generator=generator) + 0.5) * 0.6 / top).to(dtype)
    return codes, points, scales


def weight(codes: Tensor, points: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """(code - zero) * scale, with the group of each column."""
    return (codes - points[:, groups]).float() * scales.float()[:, groups]


def packed(
    N: int, K: int, g: torch.Generator, *, bits: int = 4, zeros: bool = False, act_order: bool = False
) -> tuple[Tensors, Tensor]:
    """compressed-tensors, pack-quantized."""
    codes, points, scales = integers(N, K, bits, g, zeros=zeros, dtype=torch.bfloat16)
    groups = torch.arange(K) // GROUP
    tensors = {
        "weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor([N, K]),
    }  # fmt: skip
    if zeros:
        tensors["weight_zero_point"] = words(points.T, bits).T.contiguous()
    if act_order:
        groups = groups[torch.randperm(K, generator=g)]
        tensors["weight_g_idx"] = groups.int()
    return tensors, weight(codes, points, scales, groups)


def gptq(
    N: int, K: int, g: torch.Generator, *, bits: int = 4, zeros: bool = True, less: int = 1, act_order: bool = False
) -> tuple[Tensors, Tensor]:
    """GPTQ; version 1 stores zero points less one."""
    codes, points, scales = integers(N, K, bits, g, zeros=zeros, dtype=torch.float16)
    groups = torch.arange(K) // GROUP
    if act_order:
        groups = groups[torch.randperm(K, generator=g)]
    tensors = {
        "qweight": words(codes, bits).T.contiguous(), "qzeros": words(points.T - less, bits), "scales": scales.T.contiguous(),
        "g_idx": groups.int(),
    }  # fmt: skip
    return tensors, weight(codes, points, scales, groups)


def awq(N: int, K: int, g: torch.Generator) -> tuple[Tensors, Tensor]:
    """AWQ, gemm: place n of a word has the output 0 2 4 6 1 3 5 7 [n]."""
    codes, points, scales = integers(N, K, 4, g, zeros=True, dtype=torch.float16)
    places = [0, 2, 4, 6, 1, 3, 5, 7]

    def stored(x: Tensor) -> Tensor:
        rows = x.T
        return words(torch.stack([rows[:, at + place] for at in range(0, N, 8) for place in places], dim=1))

    tensors = {"qweight": stored(codes), "qzeros": stored(points), "scales": scales.T.contiguous()}
    return tensors, weight(codes, points, scales, torch.arange(K) // GROUP)


def codes_of_fp8(N: int, K: int, g: torch.Generator) -> Tensor:
    return (torch.randn(N, K, generator=g) * 60).to(torch.float8_e4m3fn)


def fp8_rows(N: int, K: int, g: torch.Generator) -> tuple[Tensors, Tensor]:
    codes, scales = codes_of_fp8(N, K, g), (torch.rand(N, 1, generator=g) + 0.5) * 0.003
    return {"weight": codes, "weight_scale": scales.bfloat16()}, codes.float() * scales.bfloat16().float()


def fp8_one(N: int, K: int, g: torch.Generator) -> tuple[Tensors, Tensor]:
    """One scale for all weights, and one for all activations."""
    codes, scale = codes_of_fp8(N, K, g), (torch.rand(1, generator=g) + 0.5) * 0.003
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.1)}, codes.float() * scale


def fp8_one_by_transformers(N: int, K: int, g: torch.Generator) -> tuple[Tensors, Tensor]:
    """The same under Transformers' names."""
    tensors, numbers = fp8_one(N, K, g)
    names = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
    return {names.get(name, name): x for name, x in tensors.items()}, numbers


def fp8_tiles(N: int, K: int, g: torch.Generator, name: str = "weight_scale_inv") -> tuple[Tensors, Tensor]:
    codes = codes_of_fp8(N, K, g)
    scales = (torch.rand(-(-N // 128), -(-K // 128), generator=g) + 0.5) * 0.003
    spread = scales.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    return {"weight": codes, name: scales}, codes.float() * spread


def int8_rows(N: int, K: int, g: torch.Generator) -> tuple[Tensors, Tensor]:
    codes = torch.randint(-127, 128, (N, K), generator=g).to(torch.int8)
    scales = (torch.rand(N, 1, generator=g) + 0.5) * 0.003
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def mxfp8(N: int, K: int, g: torch.Generator) -> tuple[Tensors, Tensor]:
    codes, exponents = codes_of_fp8(N, K, g), torch.randint(116, 121, (N, K // 32), generator=g)
    powers = 2.0 ** (exponents - 127).repeat_interleave(32, 1)
    return {"weight": codes, "weight_scale": exponents.to(torch.uint8)}, codes.float() * powers


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def halves(codes: Tensor) -> Tensor:
    """Two codes per byte, the first in the low half."""
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def mxfp4(N: int, K: int, g: torch.Generator) -> tuple[Tensors, Tensor]:
    codes, exponents = torch.randint(16, (N, K), generator=g), torch.randint(120, 124, (N, K // 32), generator=g)
    numbers = E2M1[codes & 7] * (1 - 2 * (codes >> 3))
    tensors = {"weight_packed": halves(codes), "weight_scale": exponents.to(torch.uint8)}
    return tensors, numbers * 2.0 ** (exponents - 127).repeat_interleave(32, 1)


def nvfp4(N: int, K: int, g: torch.Generator) -> tuple[Tensors, Tensor]:
    codes = torch.randint(16, (N, K), generator=g)
    scales = (torch.rand(N, K // 16, generator=g) * 200 + 100).to(torch.float8_e4m3fn)
    outer = torch.tensor([4096.0])
    numbers = E2M1[codes & 7] * (1 - 2 * (codes >> 3))
    tensors = {"weight_packed": halves(codes), "weight_scale": scales, "weight_global_scale": outer}
    return tensors, numbers * scales.float().repeat_interleave(16, 1) / outer


def torchao_rows(N: int, K: int, g: torch.Generator, make: Any) -> tuple[Tensors, Tensor]:
    """torchao, Float8Tensor or Int8Tensor."""
    tensors, numbers = make(N, K, g)
    return {"_weight_qdata": tensors["weight"], "_weight_scale": tensors["weight_scale"]}, numbers


def torchao_intx(N: int, K: int, g: torch.Generator, *, zeros: bool) -> tuple[Tensors, Tensor]:
    """torchao, IntxUnpackedToInt8Tensor of 4 bits."""
    codes, points, scales = integers(N, K, 4, g, zeros=zeros, dtype=torch.bfloat16)
    signed, points_signed = ((x - 8).to(torch.int8) for x in (codes, points))
    tensors = {"_weight_qdata": signed, "_weight_scale": scales, "_weight_zero_point": points_signed}
    return tensors, weight(codes, points, scales, torch.arange(K) // GROUP)


def header_of(kind: str, K: int) -> dict[str, Any]:
    """Describes a weight with rows of K as the header of a file of torchao does."""
    parts = ["qdata", "scale"]
    if kind.startswith("torchao int4"):
        data = {"target_dtype": {"_type": "torch.dtype", "_data": "int4"}, "block_size": [1, GROUP]}
        data["activation_quantization"] = None
        return {"_type": "IntxUnpackedToInt8Tensor", "_data": data, "_tensor_data_names": [*parts, "zero_point"]}
    name, row = ("Float8", {"_type": "PerRow", "_data": {"dim": -1}}) if "fp8" in kind else ("Int8", None)
    quantised = {"_type": f"QuantizeTensorTo{name}Kwargs", "_data": {"granularity": row}}
    return {
        "_type": f"{name}Tensor", "_tensor_data_names": parts,
        "_data": {"block_size": [1, K], "act_quant_kwargs": None if kind.endswith("alone") else quantised},
    }  # fmt: skip


def groups_of(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
ONE = TOKEN | {"strategy": "tensor", "dynamic": False}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "sym": False,
    "desc_act": False,
    "checkpoint_format": "gptq",
}
Make = Callable[[int, int, torch.Generator], tuple[Tensors, Tensor]]

# each family and layout: the configuration, what writes a projection, and whether activations stay in their dtype
KINDS: dict[str, tuple[dict[str, Any], Make, bool]] = {
    "ct int4": (groups_of("pack-quantized", INT4), packed, True),
    "ct int4, zeros": (groups_of("pack-quantized", INT4 | {"symmetric": False}), lambda *a: packed(*a, zeros=True), True),
    "ct int4, act-order": (
        groups_of("pack-quantized", INT4 | {"actorder": "group"}), lambda *a: packed(*a, act_order=True), True
    ),
    "ct 8 bits, packed": (groups_of("pack-quantized", INT4 | {"num_bits": 8}), lambda *a: packed(*a, bits=8), True),
    "ct fp8, rows": (groups_of("float-quantized", FP8, TOKEN), fp8_rows, False),
    "ct fp8, one scale": (groups_of("naive-quantized", FP8 | {"strategy": "tensor"}, ONE), fp8_one, False),
    "ct fp8, tiles": (
        groups_of("float-quantized", FP8 | {"strategy": "block", "block_structure": [128, 128]}, TOKEN | {"strategy": "group"}),
        lambda *a: fp8_tiles(*a, name="weight_scale"), False,
    ),
    "ct int8": (groups_of("int-quantized", FP8 | {"type": "int"}, TOKEN | {"type": "int"}), int8_rows, False),
    "ct int8, weights alone": (groups_of("int-quantized", FP8 | {"type": "int"}), int8_rows, True),
    "ct mxfp8": (groups_of("mxfp8-quantized", FP8 | {"strategy": "group", "group_size": 32}), mxfp8, True),
    "ct mxfp4": (groups_of("mxfp4-pack-quantized", FP8 | {"num_bits": 4, "strategy": "group", "group_size": 32}), mxfp4, True),
    "ct nvfp4": (
        groups_of("nvfp4-pack-quantized", FP8 | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}), nvfp4, True
    ),
    "gptq": (GPTQ, gptq, True),
    "gptq, version 2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda *a: gptq(*a, less=0), True),
    "gptq, mislabelled": (GPTQ | {"sym": True}, lambda *a: gptq(*a, less=0, zeros=False), True),
    "gptq, symmetric": (GPTQ | {"sym": True}, lambda *a: gptq(*a, zeros=False), True),
    "gptq, act-order": (GPTQ | {"desc_act": True}, lambda *a: gptq(*a, act_order=True), True),
    "gptq, 8 bits": (GPTQ | {"bits": 8, "sym": True}, lambda *a: gptq(*a, bits=8, zeros=False), True),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq, True),
    "fp8, tiles": ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, fp8_tiles, False),
    "fp8, one scale": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_one, False),
    "fp8, one scale by Transformers": (
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}, fp8_one_by_transformers, False
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_one, False),
    "torchao fp8": ({"quant_method": "torchao"}, lambda *a: torchao_rows(*a, make=fp8_rows), False),
    "torchao int8": ({"quant_method": "torchao"}, lambda *a: torchao_rows(*a, make=int8_rows), False),
    "torchao int8, weights alone": ({"quant_method": "torchao"}, lambda *a: torchao_rows(*a, make=int8_rows), True),
    "torchao int4": ({"quant_method": "torchao"}, lambda *a: torchao_intx(*a, zeros=False), True),
    "torchao int4, zeros": ({"quant_method": "torchao"}, lambda *a: torchao_intx(*a, zeros=True), True),
}  # fmt: skip


def quantised(kind: str, folder: Path, **settings: Any) -> transformers.PreTrainedModel:
    """Writes a checkpoint, and returns the model in 32 bits whose weights are those that it stands for."""
    config, make, _ = KINDS[kind]
    model = plain(folder, **settings)
    generator = torch.Generator().manual_seed(5)
    tensors, state = load_file(folder / "model.safetensors"), model.state_dict()
    header = {name: json.dumps({"_type": "Tensor"}) for name in tensors}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        shape = tensors.pop(name).shape
        parts, state_weight = make(*shape, generator)
        header[name] = json.dumps(header_of(kind, shape[1]))
        tensors |= {f"{name.removesuffix('.weight')}.{suffix}": x.contiguous() for suffix, x in parts.items()}
        state[name].copy_(state_weight)
    header["tensor_names"] = json.dumps(list(header))
    save_file(tensors, folder / "model.safetensors", metadata=header if kind.startswith("torchao") else None)
    configure(folder, quantization_config=config)
    return model


def configure(folder: Path, **settings: Any) -> None:
    """Changes config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
