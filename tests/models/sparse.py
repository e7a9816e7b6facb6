"""Tiny checkpoints with Native Sparse Attention, and their attention without a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import rooftile
from rooftile import approximate as ap
from rooftile.fused.rope import Rotation, rotate
from rooftile.models import Decoder, ModelConfig
from tests.models.checkpoints import SMALL, VOCABULARY

SIZES = {"length": 8, "stride": 4, "block_size": 16, "count": 3, "first": 1, "local": 1, "window": 12}
MIXERS = ["native_sparse", "attention", "native_sparse"]


def settings(family: str = "llama", *, mixers: list[str] = MIXERS, **sizes: Any) -> dict[str, Any]:
    """A config.json."""
    section = {"native_sparse": SIZES | sizes} if "native_sparse" in mixers else {}
    return SMALL | {"model_type": family, "head_dim": 8, "layer_mixers": mixers} | section


def checkpoint(folder: Path, said: dict[str, Any]) -> Path:
    """Writes a checkpoint with random weights, large enough that the tokens of a text differ."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(said))
    config = ModelConfig.from_folder(folder)
    decoder = Decoder(config, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(3)
    stored = {}
    for name, place in decoder.tensors():
        noise = 0.3 * torch.randn(place.shape, generator=generator)
        stored[name if name.startswith("lm_head") else f"model.{name}"] = 1 + noise if name.endswith("norm.weight") else noise
    save_file(stored, folder / "model.safetensors")
    return folder


def attention_without_cache(decoder: Decoder, **options: Any) -> Any:
    """The attention of one sequence, all tokens at once, by `ap.native_sparse` and `rooftile.attention`."""
    config, sizes = decoder.config, decoder.config.native_sparse

    def attend(
        layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, gates: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if gates is None:
            return rooftile.attention(q[None], k[None], v[None], rooftile.CAUSAL, scale=config.scale)[0]
        branches = [(keys[None], values[None]) for keys, values in zip(k.chunk(3, 1), v.chunk(3, 1), strict=True)]
        maps, lengths = decoder.layers[layer].compression, {"length": sizes.length, "stride": sizes.stride}
        compressed = tuple(compressed_by(maps, x[0], which, **lengths) for which, x in enumerate(branches[0]))
        return ap.native_sparse(
            q[None], compressed, *branches[1:], gates[None], scale=config.scale, window=sizes.window, **sizes.keywords(),
            **options,
        )[0]  # fmt: skip

    return attend


def compressed_by(maps: Any, x: Tensor, which: int, *, length: int, stride: int) -> Tensor:
    """The compressed keys or values (1, n, Hk, D) of one sequence, block by block."""
    blocks = [x[None, start : start + length] for start in range(0, len(x) - length + 1, stride)]
    return torch.cat([maps(block, which) for block in blocks])[None] if blocks else x[None, :0]


def likeliest(decoder: Decoder, prompt: list[int], answer: list[int]) -> list[int]:
    """The most likely token at each place of an answer, by one pass over all tokens without a cache."""
    ids = torch.tensor(prompt + answer)
    with torch.inference_mode():
        hidden = decoder(ids, torch.arange(len(ids)), attention_without_cache(decoder, backend="eager"))
        return decoder.logits(hidden[len(prompt) - 1 : -1]).argmax(-1).tolist()


__all__ = ["MIXERS", "SIZES", "VOCABULARY", "attention_without_cache", "checkpoint", "likeliest", "settings"]
