"""How many blocks a cache has: what a device has left beside the model."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.kvcache import Rotation
from rooftile.kvcache.route import MOST_GATHERED, route
from rooftile.models import Decoder

# of a CPU's memory, unless it is told how much
HOST_BYTES = 1 << 30
# what graphs and libraries take besides
SPARE_BYTES = 768 << 20


def block_bytes(decoder: Decoder, size: int, dtype: torch.dtype) -> int:
    """A block through all layers."""
    config = decoder.config
    line = config.head_dim * dtype.itemsize
    if dtype == torch.float8_e4m3fn:
        # a scale
        line += 4
    return config.layers * 2 * size * config.kv_heads * line


def most_gathered(size: int, dtype: torch.dtype, *, tokens: int, answers: int) -> int:
    """The most prompts that one step may read from a copy: of up to `answers` that have up to `tokens` tokens together."""
    fp8 = dtype == torch.float8_e4m3fn
    return next((n for n in range(answers, 0, -1) if route(tokens, n, size, fp8=fp8, copy_bytes=0).gather), 0)


def blocks_that_fit(
    decoder: Decoder, size: int, dtype: torch.dtype, *, utilization: float, max_batched_tokens: int, max_answers: int,
    max_len: int,
) -> int:  # fmt: skip
    """As many as all sequences could use, or as memory has room for.

    On a GPU that is `utilization` of its memory, less the model, less what the largest step takes: it is run once.
    """
    each = block_bytes(decoder, size, dtype)
    useful = max_answers * -(-max_len // size)
    device = decoder.embedding.device
    if device.type != "cuda":
        return max(min(HOST_BYTES // each, useful), -(-max_len // size))
    working = _working_bytes(decoder, min(max_batched_tokens, max_answers * max_len), max_answers)
    copied = most_gathered(size, dtype, tokens=max_batched_tokens, answers=max_answers)
    # a layer's at a time
    line = block_bytes(decoder, 1, decoder.embedding.dtype) // decoder.config.layers
    working += min(copied * max_len * line, MOST_GATHERED)
    free, total = torch.cuda.mem_get_info(device)
    room = free - int(total * (1 - utilization)) - working - SPARE_BYTES
    if room < each:
        raise InvalidInput(
            f"no memory for a cache: of {total / 1e9:.1f} GB {free / 1e9:.1f} are free, {1 - utilization:.0%} stay so "
            f"(gpu_memory_utilization {utilization}), a step of {max_batched_tokens:,} tokens takes {working / 1e9:.1f}, and "
            f"{SPARE_BYTES / 1e9:.1f} are kept for graphs: make max_batched_tokens smaller or gpu_memory_utilization larger"
        )
    return min(room // each, useful)


@torch.inference_mode()
def _working_bytes(decoder: Decoder, tokens: int, rows: int) -> int:
    """What a step takes at most, besides model and cache."""
    device = decoder.embedding.device
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
        # a kernel would be compiled for nothing: what it takes besides is an lse
        return torch.empty_like(q).clone()

    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    hidden = decoder(ids, ids, attend)
    # logits of all rows, and as many numbers again for their scores
    logits = decoder.logits(hidden[:rows])
    scores = logits.clone()
    torch.cuda.synchronize(device)
    del logits, scores, hidden
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak
