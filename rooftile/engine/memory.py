"""Decides how many blocks the KV cache gets, from the memory that a device has left beside the model."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from rooftile.engine.attention.layout import CacheLayout
from rooftile.engine.attention.native_sparse import reads_in_place
from rooftile.engine.sampling.state import SamplingState
from rooftile.errors import InvalidInput
from rooftile.exact.paged_route import MOST_GATHERED, route
from rooftile.kvcache import Rotation
from rooftile.models import Decoder

# the cache's memory on a CPU, unless num_blocks is given
HOST_BYTES = 1 << 30
# kept free on a GPU for CUDA graphs and libraries
SPARE_BYTES = 768 << 20


def most_gathered(size: int, dtype: torch.dtype, *, tokens: int, answers: int) -> int:
    """Returns how many prompts one step may at most read from a gathered copy.

    Args:
        size: tokens per block.
        dtype: the dtype of the KV cache.
        tokens: the most tokens that a step reads.
        answers: the most answers that run at once.
    """
    fp8 = dtype == torch.float8_e4m3fn
    return next((n for n in range(answers, 0, -1) if route(tokens, n, size, fp8=fp8, copy_bytes=0).gather), 0)


def blocks_that_fit(
    decoder: Decoder, layout: CacheLayout, dtype: torch.dtype, *, utilization: float, max_batched_tokens: int, max_answers: int,
    max_len: int, paged: bool = True,
) -> int:  # fmt: skip
    """Returns how many blocks fit into memory, but no more than all sequences together could use.

    On a GPU the cache gets the share `utilization` of its memory, less the model, less what the largest step takes, which is run
    once to measure it, less the tables of penalties and biases.

    Raises:
        InvalidInput: there is no room for a single block.
    """
    each, size = layout.block_bytes(dtype) + layout.row_bytes(dtype), layout.size
    within = partial(layout.blocks_in, dtype=dtype, answers=max_answers, tokens=max_batched_tokens, paged=paged)
    useful = max_answers * -(-max_len // size)
    device = decoder.embedding.device
    if device.type != "cuda":
        return max(min(within(HOST_BYTES), useful), -(-max_len // size))
    working = _working_bytes(decoder, min(max_batched_tokens, max_answers * max_len), max_answers)
    copied = most_gathered(size, dtype, tokens=max_batched_tokens, answers=max_answers)
    # copies of gathered prompts, one layer at a time
    line = 2 * layout.heads * layout.dim * decoder.embedding.dtype.itemsize
    working += min(copied * max_len * line, MOST_GATHERED) + layout.working_bytes(
        max_len, max_answers, decoder.config.heads, decoder.embedding.dtype, step=max_batched_tokens,
        in_place=decoder.config.native_sparse is not None and reads_in_place(decoder.config, decoder.embedding),
    )  # fmt: skip
    free, total = torch.cuda.mem_get_info(device)
    # made when a request first asks for penalties or biases, when it is too late to make the cache smaller
    working += SamplingState.table_bytes(max_answers + 1, decoder.config.vocab_size)
    room = free - int(total * (1 - utilization)) - working - SPARE_BYTES
    if room < each:
        raise InvalidInput(
            f"no memory for a cache: of {total / 1e9:.1f} GB {free / 1e9:.1f} are free, {1 - utilization:.0%} stay so "
            f"(gpu_memory_utilization {utilization}), a step of {max_batched_tokens:,} tokens takes {working / 1e9:.1f}, and "
            f"{SPARE_BYTES / 1e9:.1f} are kept for graphs: make max_batched_tokens smaller or gpu_memory_utilization larger"
        )
    return min(within(room), useful)


@torch.inference_mode()
def _working_bytes(decoder: Decoder, tokens: int, rows: int) -> int:
    """Returns the most memory that a step takes besides model and cache, in bytes."""
    device = decoder.embedding.device
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)

    def attend(
        layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, gates: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        # running attention would compile a kernel for nothing: beside its output it only takes an lse
        return torch.empty_like(q).clone()

    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    hidden = decoder(ids, ids, attend)
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
