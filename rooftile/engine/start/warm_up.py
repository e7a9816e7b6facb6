"""The jobs that compile an engine's kernels, by running each once on very little memory; `compilation` runs them in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.engine.mixers.layers import unmixed
from rooftile.engine.mixers.registry import MIXERS, kind_of
from rooftile.engine.mixers.trial import ROWS, TrialSetup
from rooftile.engine.sampling.sampler import SamplingFeatures, SamplingState, sample
from rooftile.exact.backends import hopper
from rooftile.fused import linear
from rooftile.fused.norm import add_norm, normalise
from rooftile.models import Decoder, ModelConfig
from rooftile.models.experts.feed_forward import QUANTISED, ExpertFeedForward
from rooftile.models.layers import Layer
from rooftile.models.projection import Multiply, Part
from rooftile.moe.problem import FEW
from rooftile.weights import QuantisedWeight

# rows of products with quantised weights: one of each tile that the kernels have for a decode step and prompts
PRODUCT_ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048)
# the features that most requests ask for, and all others: each of the three has kernels of its own. A draw at temperature 0 is
# the most likely token.
FEATURES = (SamplingFeatures(chance=True), SamplingFeatures(chance=True, truncation=True))
RARER = (SamplingFeatures(chance=True, truncation=True, penalties=True, bias=True, mask=True),)


# the modules with kernels; each mixer names its own modules
KERNELS = (
    "fused.kernels.norm", "fused.kernels.one_row", "fused.kernels.gated", "fused.kernels.gate_quantised",
    "fused.kernels.linear", "weights.triton.launch",
    "weights.hopper.launch", "weights.two_four.product.few_rows", "weights.two_four.product.hopper",
    "weights.two_four.product.transposed", "numerics.row_kernels", "engine.sampling.sampling_kernels",
)  # fmt: skip


def jobs(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, size: int, kv_dtype: torch.dtype, longest: int,
    deterministic: bool = False, context_ranks: int = 1,
) -> list[Callable[[], None]]:  # fmt: skip
    """Returns the jobs that compile kernels, longest first; whatever shares a kernel is one job, so none is compiled twice."""
    trial = TrialSetup(config, dtype, device, size, kv_dtype, longest, deterministic, context_ranks)
    decoder = Decoder(trial.small(config.mixers[0]), dtype=dtype, device=device)
    # the kernels of what `approximate=` puts in the place of exact layers are compiled at their first step
    mixing = [job for name in dict.fromkeys(config.mixers) for job in kind_of(name, context_ranks=context_ranks).trials(trial)]
    multiply = linear if deterministic else functional.linear
    # products of one row have kernels for the shapes of each kind of layer
    alone = [
        partial(_decode_without_mixing, Decoder(trial.small(name), dtype=dtype, device=device), multiply, 1)
        for name in dict.fromkeys(config.mixers)
    ]
    sampling = [partial(_sample, decoder, config.vocab_size, kinds) for kinds in (FEATURES[:1], FEATURES[1:], RARER)]
    return [*mixing, partial(_decode_without_mixing, decoder, multiply, ROWS), *alone, *sampling]


def jobs_of_products(layer: Layer, *, longest: int, deterministic: bool = False) -> list[Callable[[], None]]:
    """Returns the jobs that compile a layer's products with quantised weights or experts, and what writes codes for them.

    The longest come first. The layer's weights need not have been read: kernels depend on their formats. Tiles of experts grow
    with the tokens of each, so up to `longest` tokens are run for them.
    """
    multiply = linear if deterministic else functional.linear
    # also the smallest number of tokens that is sorted: its tiles may be smaller than the tiles of the next power of two
    more = {FEW + 1, *(1 << n for n in range(longest.bit_length()))} if _experts_of(layer) else set()
    return [partial(_multiply, layer, M, multiply) for M in sorted({*PRODUCT_ROWS, *more}, reverse=True)]


def kind_of_products(layer: Layer) -> tuple[Any, ...]:
    """Returns what the kernels of a layer's products depend on; () if it has no experts and no quantised or 2:4 weights."""
    found = tuple(_kind_of(part) for projection in layer.projections for part in projection.parts)
    experts = _experts_of(layer)
    return (*found, *experts) if any(found) or experts else ()


def _experts_of(layer: Layer) -> tuple[Any, ...]:
    """Returns the sizes and formats of a layer's experts, on which their kernels depend; () for a layer without experts."""
    if not isinstance(layer.feed_forward, ExpertFeedForward):
        return ()
    weights = [getattr(layer.feed_forward, name) for name in QUANTISED]
    return layer.feed_forward.sizes, *(_kind_of(weight) for weight in weights if weight is not None)


def _kind_of(part: Part) -> tuple[Any, ...]:
    if isinstance(part, QuantisedWeight):
        there = tuple(x is not None for x in (part.zeros, part.order, part.outer, part.input_scale))
        return part.format, part.group, part.shape, part.scales.dtype, *there
    return () if isinstance(part, Tensor) else ("2:4", part.shape, part.dtype)


def _multiply(layer: Layer, M: int, multiply: Multiply) -> None:
    """Runs what a layer does besides attention, on M rows."""
    placement = layer.o.placement
    stream = torch.zeros(M, layer.config.hidden, dtype=placement.dtype, device=placement.device)
    heads = torch.zeros(M, layer.o.inputs, dtype=placement.dtype, device=placement.device)
    if layer.mixer_norm is not None:
        layer.reader(normalise(stream, layer.mixer_norm, *layer.reader.rows(stream)), multiply)
        add_norm(stream, stream.clone(), layer.mixer_norm, None, *layer.reader.rows(stream))
    layer.o(heads, multiply)
    if layer.feed_forward is None:
        return
    # in the codes that the norm before it writes: a product of gate and up has kernels of its own for them
    x, rows = stream, layer.feed_forward.rows(stream)
    if layer.ffn_norm is not None:
        x = normalise(stream, layer.ffn_norm, *rows)
        add_norm(stream, stream.clone(), layer.ffn_norm, None, *rows)
    # without a sum over ranks: threads would run it, each in an order of its own
    layer.feed_forward.compute(x, multiply)


def import_kernels() -> None:
    """Imports all modules that the threads need, in one thread: threads that import the same module at once can fail."""
    for name in dict.fromkeys((*KERNELS, *(name for mixer in MIXERS.values() for name in mixer.kernels))):
        import_module(f"rooftile.{name}")
    hopper.import_kernels()


def _decode_without_mixing(decoder: Decoder, multiply: Multiply, count: int) -> None:
    """Runs what layers do besides mixing tokens, on this number of tokens."""
    rows = torch.zeros(count, dtype=torch.int64, device=decoder.embedding.device)
    decoder(rows, rows, unmixed(decoder), multiply)


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
