"""The jobs that compile an engine's kernels, by running each once on very little memory; `compilation` runs them in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.engine.attention import masks_of
from rooftile.engine.sampling.sampler import SamplingFeatures, SamplingState, sample
from rooftile.engine.warm_up_sparse import SparseLayer
from rooftile.exact.api import prepare_paged
from rooftile.exact.backends import hopper
from rooftile.exact.masks import Mask
from rooftile.exact.paged_route import LONG_PROMPT, Route, route
from rooftile.exact.spec import Asked
from rooftile.fused import linear
from rooftile.fused.norm import add_norm, normalise
from rooftile.kvcache import Copy, PagedKV, Pages
from rooftile.models import Decoder, ModelConfig
from rooftile.models.layers import Layer, Multiply, Part
from rooftile.weights import QuantisedWeight

# tokens of prompts: so few that the kernels for prompts are not worth it, and usual ones
SHORT, USUAL = 8, 64
# rows of the decode step
ROWS = 16
# rows of products with quantised weights: one of each tile that the kernels have for a decode step and prompts
PRODUCT_ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048)
# the features that most requests ask for, and all others: each of the three has kernels of its own. A draw at temperature 0 is
# the most likely token.
FEATURES = (SamplingFeatures(chance=True), SamplingFeatures(chance=True, truncation=True))
RARER = (SamplingFeatures(chance=True, truncation=True, penalties=True, bias=True, mask=True),)


def jobs(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, size: int, kv_dtype: torch.dtype, longest: int,
    deterministic: bool = False,
) -> list[Callable[[], None]]:  # fmt: skip
    """Returns the jobs that compile kernels, longest first; whatever shares a kernel is one job, so none is compiled twice."""
    decoder = Decoder(_small(config), dtype=dtype, device=device)
    # one block to read and write, and one to copy it to
    pages = Pages(2, 1, config.kv_heads, config.head_dim, size=size, dtype=kv_dtype, device=device)
    masks = tuple(dict.fromkeys(masks_of(config))) if "attention" in config.mixers else ()
    sampling = [partial(_sample, decoder, config.vocab_size, kinds) for kinds in (FEATURES[:1], FEATURES[1:], RARER)]
    if deterministic:
        # one kernel reads chunks of any length, and no other attention runs
        read = partial(_read_prompts, decoder, pages, asked=Asked(config.scale, config.softcap, deterministic=True))
        return [
            *(partial(read, mask, (SHORT,), room=room) for mask in masks for room in (0, longest)),
            partial(_decode_alone, decoder, pages, ()),
            partial(_decode_without_attention, decoder, linear),
            *sampling,
        ]
    sparse: list[Callable[[], None]] = []
    if "native_sparse" in config.mixers:
        layer = SparseLayer(_small(config), dtype, device, size)
        # prompts of all lengths have most of their kernels in common
        sparse = [partial(layer.read_prompts, (longest, USUAL, SHORT)), partial(layer.decode, ROWS)]
    # lengths that take the same route share their kernels, so they are one job
    together: dict[Route, list[int]] = {}
    for tokens in (longest, USUAL, SHORT):
        way = route(tokens, 1, size, fp8=kv_dtype == torch.float8_e4m3fn, copy_bytes=0)
        together.setdefault(way, []).append(tokens)
    return [
        *sparse,
        *(partial(_read_prompts, decoder, pages, mask, tuple(lengths)) for lengths in together.values() for mask in masks),
        *(partial(_read_prompts, decoder, pages, mask, (SHORT,), room=LONG_PROMPT) for mask in masks),
        partial(_decode_alone, decoder, pages, masks),
        partial(_decode_without_attention, decoder),
        *sampling,
    ]


def jobs_of_products(layer: Layer, *, deterministic: bool = False) -> list[Callable[[], None]]:
    """Returns the jobs that compile a layer's products with quantised weights, and what writes codes for them; longest first.

    The layer's weights need not have been read: kernels depend on their formats.
    """
    multiply = linear if deterministic else functional.linear
    return [partial(_multiply, layer, M, multiply) for M in reversed(PRODUCT_ROWS)]


def kind_of_products(layer: Layer) -> tuple[Any, ...]:
    """Returns what the kernels of a layer's products depend on; () if none of its weights is quantised or 2:4."""
    found = tuple(_kind_of(part) for projection in layer.projections for part in projection.parts)
    return found if any(found) else ()


def _kind_of(part: Part) -> tuple[Any, ...]:
    if isinstance(part, QuantisedWeight):
        there = tuple(x is not None for x in (part.zeros, part.order, part.outer, part.input_scale))
        return part.format, part.group, part.shape, part.scales.dtype, *there
    return () if isinstance(part, Tensor) else ("2:4", part.shape, part.dtype)


def _small(config: ModelConfig) -> ModelConfig:
    """A model's configuration with one layer: all have the same kernels, and embedding and head have none of ours."""
    return replace(config, layers=1, windows=(None,), mixers=("attention",), unrotated=(), vocab_size=1, max_len=ROWS)


def _multiply(layer: Layer, M: int, multiply: Multiply) -> None:
    """Runs what a layer does besides attention, on M rows."""
    memory = layer.o.memory
    stream = torch.zeros(M, layer.config.hidden, dtype=memory.dtype, device=memory.device)
    heads = torch.zeros(M, layer.o.inputs, dtype=memory.dtype, device=memory.device)
    norms = [norm for norm in (layer.attention_norm, layer.ffn_norm) if norm is not None]
    for norm, projection in zip(norms, (layer.qkv, layer.up), strict=False):
        projection(normalise(stream, norm, *projection.rows(stream)), multiply)
        add_norm(stream, stream.clone(), norm, None, *projection.rows(stream))
    layer.o(heads, multiply)
    # in the codes that the norm before it writes: a product of gate and up has kernels of its own for them
    last = layer.ffn_norm
    layer.feed_forward(stream if last is None else normalise(stream, last, *layer.up.rows(stream)), multiply)


def import_kernels() -> None:
    """Imports all modules that the threads need, in one thread: threads that import the same module at once can fail."""
    for name in (
        "exact.backends.triton.paged_decode", "exact.backends.triton.paged_fwd", "kvcache.kernels", "fused.kernels.norm",
        "fused.kernels.gated", "fused.kernels.gate_quantised", "fused.kernels.linear", "weights.triton.launch",
        "weights.hopper.launch", "weights.two_four.product.kernels", "weights.two_four.product.hopper",
        "weights.two_four.product.transposed",
        "numerics.kernels",
        "approximate.native_sparse.selected.kernels.choice", "approximate.native_sparse.selected.kernels.gated_sum",
        "approximate.native_sparse.decoding_kernels", "exact.backends.triton.flash_fwd",
    ):  # fmt: skip
        import_module(f"rooftile.{name}")
    import_module("rooftile.engine.sampling.kernels")
    hopper.import_kernels()


def _read_prompts(
    decoder: Decoder, pages: Pages, mask: Mask, lengths: tuple[int, ...], *, asked: Asked | None = None, room: int = 0
) -> None:
    """Runs attention of prompts, all of them in the first block, since the values do not matter.

    With `room` the tables have columns for that many tokens: a kernel may be chosen by how long a sequence could be, since the
    lengths are known only on the GPU.
    """
    device = decoder.embedding.device
    for tokens in lengths:
        table = torch.zeros(1, -(-max(tokens, room) // pages.storage.shape[3]), dtype=torch.int32, device=device)
        ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        q, _, _ = _projected(decoder, tokens)
        _attend(decoder, mask, q.contiguous(), pages.view(0, table, ends[1:], ends), asked)


def _decode_alone(decoder: Decoder, pages: Pages, masks: tuple[Mask, ...]) -> None:
    """Runs cache writes, copies of blocks, and attention of single tokens."""
    pages.copy([Copy(0, 1)])
    q, k, v = _projected(decoder, ROWS)
    padding = torch.full((ROWS,), -1, device=decoder.embedding.device)
    q = pages.write_and_rotate(0, q, k, v, padding, decoder.rotation(padding.clamp(min=0)))
    table = torch.zeros(ROWS, 1, dtype=torch.int32, device=decoder.embedding.device)
    for mask in masks:
        _attend(decoder, mask, q[:, None], pages.view(0, table, padding.int() + 1))


def _decode_without_attention(decoder: Decoder, multiply: Multiply = functional.linear) -> None:
    """Runs the rest of the layers."""
    rows = torch.zeros(ROWS, dtype=torch.int64, device=decoder.embedding.device)
    decoder(rows, rows, lambda layer, q, k, v, rotation, gates=None: q, multiply)


def _sample(decoder: Decoder, vocabulary: int, kinds: Sequence[SamplingFeatures]) -> None:
    """Runs the sampler for each kind of batch."""
    device = decoder.embedding.device
    rows = torch.zeros(ROWS, dtype=torch.int64, device=device)
    logits = torch.zeros(ROWS, vocabulary, dtype=decoder.embedding.dtype, device=device)
    if decoder.config.logit_softcap is not None:
        logits = logits.float()
    state = SamplingState(1, vocabulary, device)
    for features in kinds:
        state.prepare(features)
        sample(logits, rows, rows, state, features)


def _projected(decoder: Decoder, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values in the layout that a layer's projection gives them."""
    config = decoder.config
    heads = (config.heads, config.kv_heads, config.kv_heads)
    x = torch.zeros(tokens, sum(heads), config.head_dim, dtype=decoder.embedding.dtype, device=decoder.embedding.device)
    q, k, v = x.split(heads, dim=1)
    return q, k, v


def _attend(decoder: Decoder, mask: Mask, q: Tensor, cache: PagedKV, asked: Asked | None = None) -> None:
    config = decoder.config
    prepare_paged(q, cache, mask, asked=asked or Asked(config.scale, config.softcap))(q, cache)
