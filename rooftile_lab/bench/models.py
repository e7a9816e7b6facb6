"""Models for `rooftile bench serving`: the shapes of published ones with random weights, or a checkpoint's folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from rooftile.errors import InvalidInput
from rooftile.exact.spec import DTYPE_NAMES
from rooftile.models import Decoder, Mamba2Sizes, ModelConfig
from rooftile.models.checkpoints.quantised import quantise_decoder
from rooftile.models.experts.sizes import ExpertSizes
from rooftile.models.projection import Part, Projection
from rooftile.models.rotary import Rotary
from rooftile.moe.router import Router
from rooftile.weights import QuantisedWeight
from rooftile.weights.files.plan import quantiser_of
from rooftile.weights.two_four import TwoFour
from rooftile.weights.two_four.product.definition import CODES


def _llama3(factor: float, dim: int) -> Rotary:
    return Rotary(
        dim=dim, theta=500_000.0, scaling="llama3", factor=factor, original_len=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )


MODELS: dict[str, ModelConfig] = {
    # not published: small enough for a CPU, with positions for every workload
    "tiny": ModelConfig(
        family="llama", vocab_size=512, layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, max_len=65_536,
        scale=16**-0.5, windows=(None,) * 2, rotary=Rotary(dim=16), tie=True,
    ),
    # Qwen3-0.6B's
    "0.6b": ModelConfig(
        family="qwen3", vocab_size=151_936, layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, ffn=3072, max_len=40_960,
        scale=128**-0.5, windows=(None,) * 28, rotary=Rotary(dim=128, theta=1e6), qk_norm=True, tie=True, eos_ids=(151_645,),
        dtype=torch.bfloat16,
    ),
    # Llama-3.2-1B's
    "1b": ModelConfig(
        family="llama", vocab_size=128_256, layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, max_len=131_072,
        scale=64**-0.5, windows=(None,) * 16, rotary=_llama3(32.0, 64), norm_eps=1e-5, tie=True, eos_ids=(128_001,),
        dtype=torch.bfloat16,
    ),
    # Llama-3.1-8B's
    "8b": ModelConfig(
        family="llama", vocab_size=128_256, layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14_336,
        max_len=131_072, scale=128**-0.5, windows=(None,) * 32, rotary=_llama3(8.0, 128), norm_eps=1e-5, eos_ids=(128_001,),
        dtype=torch.bfloat16,
    ),
    # not published: attention of the size of Mamba-2 2.7B, and a hybrid as that paper's, with six layers of attention
    "attention-2.7b": ModelConfig(
        family="llama", vocab_size=50_288, layers=32, hidden=2560, heads=20, kv_heads=5, head_dim=128, ffn=8448,
        max_len=262_144, scale=128**-0.5, windows=(None,) * 32, rotary=Rotary(dim=128, theta=5e6), norm_eps=1e-5, tie=True,
        eos_ids=(0,), dtype=torch.bfloat16,
    ),
    "hybrid-2.7b": ModelConfig(
        family="rooftile", vocab_size=50_288, layers=64, hidden=2560, heads=20, kv_heads=5, head_dim=128, max_len=262_144,
        scale=128**-0.5, windows=(None,) * 64, rotary=Rotary(dim=128, theta=5e6), feed_forwards=(None,) * 64,
        mixers=tuple("attention" if n % 10 == 9 else "mamba2" for n in range(64)),
        mamba2=Mamba2Sizes(heads=80, head_dim=64), norm_eps=1e-5, tie=True, eos_ids=(0,), dtype=torch.bfloat16,
    ),
    # Mamba-2 2.7B's
    "mamba2-2.7b": ModelConfig(
        family="mamba2", vocab_size=50_288, layers=64, hidden=2560, max_len=262_144, windows=(None,) * 64, rotary=None,
        mixers=("mamba2",) * 64, feed_forwards=(None,) * 64, mamba2=Mamba2Sizes(heads=80, head_dim=64), norm_eps=1e-5,
        wide_stream=True, tie=True, eos_ids=(0,), dtype=torch.bfloat16,
    ),
    # DeepSeekMoE 16B's
    "moe-16b": ModelConfig(
        family="deepseek", vocab_size=102_400, layers=28, hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn=10_944,
        max_len=4096, scale=128**-0.5, windows=(None,) * 28, rotary=Rotary(dim=128), feed_forwards=("dense", *("experts",) * 27),
        experts=ExpertSizes(experts=64, hidden=1408, router=Router(active=6), shared=2816), eos_ids=(100_001,),
        dtype=torch.bfloat16,
    ),
    # the shape of Granite 4.0 H Small: four layers of forty have attention
    "granite-h-small": ModelConfig(
        family="granitemoehybrid", vocab_size=100_352, layers=40, hidden=4096, heads=32, kv_heads=8, head_dim=128,
        max_len=131_072, scale=1 / 128, windows=(None,) * 40, rotary=None, unrotated=tuple(range(40)),
        mixers=tuple("attention" if n in (5, 15, 25, 35) else "mamba2" for n in range(40)), feed_forwards=("experts",) * 40,
        mamba2=Mamba2Sizes(heads=128, head_dim=64),
        experts=ExpertSizes(experts=72, hidden=768, router=Router(active=10, score="chosen softmax"), shared=1536), norm_eps=1e-5,
        embedding_scale=12.0, residual_scale=0.22, logit_divisor=16.0, tie=True, eos_ids=(100_257,), dtype=torch.bfloat16,
    ),
}  # fmt: skip


def decoder_named(name: str, device: torch.device, weights: str = "auto") -> Decoder:
    """One of MODELS with random weights, in bf16 on a GPU and in fp32 on a CPU; or the checkpoint in a folder, in its dtype.

    Args:
        name: the model's.
        device: where it is made.
        weights: the format of its projections, as `LLM` takes it.

    Raises:
        InvalidInput: it is neither, the folder holds no checkpoint, or there is no such format.
    """
    if name in MODELS:
        decoder = Decoder.random(MODELS[name], torch.bfloat16 if device.type == "cuda" else torch.float32, device)
        quantiser = quantiser_of(weights)
        if quantiser is not None:
            quantise_decoder(decoder, quantiser)
        return decoder
    if not Path(name).is_dir():
        raise InvalidInput(f"model is {name!r}, which is no folder; has {', '.join(MODELS)}, or give a checkpoint's folder")
    return Decoder.from_folder(name, device=device, weights=weights)


def shared_named(name: str, device: torch.device) -> ModelConfig | Path:
    """The model of a name, as several ranks take it: a configuration, whose weights are random, or a checkpoint's folder.

    Raises:
        InvalidInput: it is neither.
    """
    if name in MODELS:
        return replace(MODELS[name], dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    if not Path(name).is_dir():
        raise InvalidInput(f"model is {name!r}, which is no folder; has {', '.join(MODELS)}, or give a checkpoint's folder")
    return Path(name)


def check_llama(suite: str, name: str) -> None:
    """Raises InvalidInput unless a name is a Llama's of MODELS, whose checkpoint Transformers can read."""
    models = [model for model, config in MODELS.items() if config.family == "llama"]
    if name not in models:
        raise InvalidInput(f"model is {name!r}; bench {suite} has {', '.join(models)}")


def formats_of(decoder: Decoder) -> str:
    """Names the formats of a decoder's projections, such as "bf16", or "fp8" or "int4:128+w8" where they are quantised.

    Example:
        >>> formats_of(decoder_named("tiny", torch.device("cpu"), "w8"))
        'w8'
    """
    return "+".join(sorted({_word(part) for projection in _projections(decoder) for part in _parts(projection)}))


def _projections(decoder: Decoder) -> list[Projection]:
    return [module for module in decoder.modules() if isinstance(module, Projection)]


def _parts(projection: Projection) -> tuple[Part, ...]:
    return projection.parts if projection.weight is None else (projection.weight,)


def _word(part: Part) -> str:
    if isinstance(part, TwoFour):
        return f"2:4 {CODES.get(part.dtype) or DTYPE_NAMES[part.dtype]}"
    if not isinstance(part, QuantisedWeight):
        return DTYPE_NAMES[part.dtype]
    return f"{part.format}:{part.group}" if part.format == "int4" else part.format
