"""Loads the weights of an engine's models; on a GPU their kernels are compiled meanwhile."""

from __future__ import annotations

import torch

from rooftile.engine.ranks.late_group import LateGroup
from rooftile.engine.start.blueprint import Blueprint
from rooftile.engine.start.compilation import Compilation
from rooftile.models import Decoder, ModelConfig
from rooftile.models.checkpoints.quantised import quantise_decoder
from rooftile.models.drafts.head import DraftHead
from rooftile.models.placement import Placement
from rooftile.models.projection import Projection
from rooftile.weights.files.plan import quantiser_of
from rooftile.weights.two_four import TwoFour

# rows that every library for 2:4 weights takes
MANY = 512


def load_decoder(blueprint: Blueprint, late: LateGroup | None = None) -> Decoder:
    """Loads the weights; on a GPU the kernels are compiled meanwhile, and are ready when this returns."""
    model, config = blueprint.model, blueprint.config
    compilation = start_compiling(blueprint)
    try:
        placement = Placement(blueprint.shape.dtype, blueprint.device)
        if late is not None and config.tensor_parallel_size > 1:
            placement = Placement(*placement[:2], late.rank, late.ranks, late.add, late.gather, blueprint.deal_experts)
        if isinstance(model, Decoder | ModelConfig):
            decoder = model if isinstance(model, Decoder) else Decoder.random(model, placement=placement)
            quantiser = quantiser_of(config.weights)
            if quantiser is not None:
                quantise_decoder(decoder, quantiser)
        else:
            decoder = Decoder.from_folder(
                model, max_len=blueprint.max_len, weights=config.weights,
                on_layer=None if compilation is None else compilation.add, placement=placement,
            )  # fmt: skip
    except BaseException:
        # a caller whose folder has no weights hears that at once, and does not wait for kernels
        if compilation is not None:
            compilation.stop()
        raise
    if compilation is not None:
        compilation.add_all(decoder)
        compilation.finish()
        if not config.deterministic:
            lay_out(decoder)
    return decoder


def load_draft(blueprint: Blueprint, decoder: Decoder) -> Decoder | DraftHead:
    """Loads a draft model, or a head for a decoder that is there."""
    if blueprint.head is None:
        return load_decoder(blueprint)
    compilation = start_compiling(blueprint)
    try:
        head = blueprint.head.read(decoder)
    except BaseException:
        if compilation is not None:
            compilation.stop()
        raise
    if compilation is not None:
        compilation.add_all(head)
        compilation.finish()
    return head


@torch.inference_mode()
def lay_out(decoder: Decoder) -> None:
    """Runs each projection that is 2:4 once with many rows: a library lays it out then, and may not inside of a CUDA graph."""
    for module in decoder.modules():
        if isinstance(module, Projection) and any(isinstance(part, TwoFour) for part in module.parts):
            module(torch.zeros(MANY, module.inputs, dtype=decoder.embedding.dtype, device=decoder.embedding.device))


def start_compiling(blueprint: Blueprint) -> Compilation | None:
    """Starts to compile the model's kernels in threads; None where there is nothing to compile."""
    config, device, dtype = blueprint.config, blueprint.device, blueprint.shape.dtype
    if device.type != "cuda":
        return None
    return Compilation(
        blueprint.shape, dtype, device, size=config.block_size, kv_dtype=config.cache_dtype(dtype),
        longest=min(config.max_batched_tokens, blueprint.max_len), deterministic=config.deterministic,
        context_ranks=config.context_parallel_size,
    )  # fmt: skip
