"""Decides how many blocks the KV cache gets, and how many states there are, from the memory that is left beside the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from rooftile.engine.caches.layout import CacheLayout, PeakLoad
from rooftile.engine.mixers.layers import unmixed
from rooftile.engine.mixers.mixer import Largest, Mixer
from rooftile.engine.sampling.state import SamplingState
from rooftile.errors import InvalidInput
from rooftile.models import Decoder

# the cache's memory on a CPU, unless num_blocks is given
HOST_BYTES = 1 << 30
# kept free on a GPU for CUDA graphs and libraries
SPARE_BYTES = 768 << 20


# the share of the caches' memory that states may have beside pages
STATES_SHARE = 0.5
# the most blocks of a cache whose layers keep nothing in them, so that a block is a line in the books and no memory
MOST_EMPTY_BLOCKS = 1 << 17


class Fit(NamedTuple):
    """The blocks, answers and states that fit into the memory of a device."""

    blocks: int
    answers: int  # that run at once: fewer than are asked for where their states are large
    kept: int  # states for prefixes


def what_fits(
    decoder: Decoder, layout: CacheLayout, mixers: Sequence[Mixer], dtype: torch.dtype, load: PeakLoad, *, utilization: float,
    longest: int, num_blocks: int | None, state_share: float, draft: tuple[Decoder, Sequence[Mixer]] | None = None,
) -> Fit:  # fmt: skip
    """Returns how many blocks fit into memory, but no more than all sequences together could use, and how many states.

    On a GPU the cache gets the share `utilization` of its memory, less the model, less what the largest step takes, which is run
    once to measure it, less the tables of penalties and biases. On a CPU one answer of the longest sequence runs in any case.
    States have what is left beside the blocks that are asked for; otherwise at most half, if there are pages to grow into.

    Args:
        decoder: the model.
        layout: what a block, a row and a sequence hold.
        mixers: the kinds of layers.
        dtype: the dtype of the cache.
        load: the most that runs at once.
        utilization: a share of the memory of a GPU.
        longest: the longest sequence in tokens.
        num_blocks: the blocks that are asked for; None for what fits.
        state_share: the share of the caches' memory that kept states may have.
        draft: a draft model, and its kinds of layers.

    Raises:
        InvalidInput: there is no room for a single block, or for the states of one answer.
    """
    if num_blocks is not None and not layout.has_states:
        return Fit(num_blocks, load.answers, 0)
    on_gpu = decoder.embedding.device.type == "cuda"
    load = replace(load, kept=layout.kept_in(0, 0, load))
    models = [(decoder, mixers)] if draft is None else [(decoder, mixers), draft]
    room = _room(models, layout, dtype, load, utilization, longest) if on_gpu else HOST_BYTES
    if layout.has_states:
        left = _room_of_states(room, layout, dtype, load, num_blocks, on_gpu=on_gpu)
        kept = layout.kept_in(left, int(room * state_share), load)
        load = replace(load, kept=kept if num_blocks is None else min(kept, num_blocks))
        # one answer may leave no more than its pages
        load = replace(load, answers=max(layout.answers_in(left, load), 1))
    least = -(-longest // layout.tokens)
    useful = load.answers * least
    fit = layout.blocks_in(room, dtype, load)
    if num_blocks is not None:
        blocks = num_blocks
    elif fit is None:
        blocks = min(useful, max(MOST_EMPTY_BLOCKS, least))
    else:
        blocks = min(fit, useful) if on_gpu else max(min(fit, useful), least)
    # no state is kept but after a block of its own
    return Fit(blocks, load.answers, min(load.kept, blocks))


def _room_of_states(
    room: int, layout: CacheLayout, dtype: torch.dtype, load: PeakLoad, num_blocks: int | None, *, on_gpu: bool
) -> int:  # fmt: skip
    """Returns the bytes that all states may take of the bytes of all caches."""
    if num_blocks is None:
        return int(room * STATES_SHARE) if layout.block_bytes(dtype) + layout.row_bytes(dtype) else room
    if not on_gpu:
        return room
    taken = layout.page_bytes(num_blocks, dtype, load)
    if room - taken < layout.state_bytes(replace(load, answers=1)):
        raise InvalidInput(
            f"no memory for a state: of {room / 1e9:.1f} GB for caches {num_blocks:,} blocks (num_blocks) take {taken / 1e9:.1f}"
            f"{_states(layout, load)}: make num_blocks smaller"
        )
    return room - taken


def _room(
    models: Sequence[tuple[Decoder, Sequence[Mixer]]], layout: CacheLayout, dtype: torch.dtype, load: PeakLoad,
    utilization: float, longest: int,
) -> int:  # fmt: skip
    """Returns the bytes that a GPU has left for caches."""
    decoder, _ = models[0]
    device, working = decoder.embedding.device, 0
    # models and layers run one after the other
    for each, mixers in models:
        largest = Largest(longest, load.answers, load.tokens, dtype, each.embedding.dtype, device)
        step = _working_bytes(each, min(load.tokens, load.answers * longest), load.answers)
        working = max(working, step + max(mixer.working_bytes(largest) for mixer in mixers))
    free, total = torch.cuda.mem_get_info(device)
    # made when a request first asks for penalties or biases, when it is too late to make the cache smaller
    working += SamplingState.table_bytes(load.answers + 1, decoder.config.vocab_size)
    room = free - int(total * (1 - utilization)) - working - SPARE_BYTES
    least = layout.block_bytes(dtype) + layout.row_bytes(dtype) + layout.state_bytes(replace(load, answers=1))
    if room < least:
        raise InvalidInput(
            f"no memory for a cache: of {total / 1e9:.1f} GB {free / 1e9:.1f} are free, {1 - utilization:.0%} stay so "
            f"(gpu_memory_utilization {utilization}), a step of {load.tokens:,} tokens takes {working / 1e9:.1f}, and "
            f"{SPARE_BYTES / 1e9:.1f} are kept for graphs{_states(layout, load)}: make max_batched_tokens smaller or "
            "gpu_memory_utilization larger"
        )
    return room


def _states(layout: CacheLayout, load: PeakLoad) -> str:
    rows = layout.state_rows(replace(load, answers=1))
    if rows is None:
        return ""
    return f", and one answer takes {rows.total} states of {layout.states_in_words()} (also its beginning, padding and prefixes)"


@torch.inference_mode()
def _working_bytes(decoder: Decoder, tokens: int, rows: int) -> int:
    """Returns the most memory that a step takes besides model and cache, in bytes."""
    device = decoder.embedding.device
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)

    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    # running attention would compile a kernel for nothing: beside its output it only takes an lse
    hidden = decoder(ids, ids, unmixed(decoder))
    # logits of all rows, and as many numbers again for the sampler's scores
    logits = decoder.logits(hidden[:rows])
    scores = logits.clone()
    torch.cuda.synchronize(device)
    del logits, scores, hidden
    # the first step leaves layouts of 2:4 weights that libraries keep: they are no longer free
    kept = torch.cuda.memory_allocated(device) - before
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak - kept
