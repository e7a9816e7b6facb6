"""The bytes of what makes long sequences fit: a loss over ranks, feed-forwards in tiles, activations on the host.

Each function returns the bytes on one rank with and without it, and what it sends; printed, they are a line of a plan. Bytes
without are for PyTorch's separate steps on a rank with as many tokens and the whole weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rooftile.fused.chunks import chunks
from rooftile.parallel.offload import AHEAD

# sums over ranks, and the gradient of a weight, are fp32
WIDE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one rank: on the device with and without, on the host, and sent to other ranks in forward and backward."""

    name: str
    device_bytes: int
    without_bytes: int
    host_bytes: int = 0
    sent_bytes: int = 0

    def __str__(self) -> str:
        parts = [f"{self.name}: {_size(self.device_bytes)} on the device, {_size(self.without_bytes)} without"]
        if self.host_bytes:
            parts.append(f"{_size(self.host_bytes)} on the host, copied there and back")
        if self.sent_bytes:
            parts.append(f"{_size(self.sent_bytes)} sent")
        return "; ".join(parts)


def loss(
    tokens: int, *, vocabulary: int, dim: int, itemsize: int = 2, ranks: int = 1, split: str | None = None, smoothed: bool = False
) -> Memory:  # fmt: skip
    """Counts `fused.linear_cross_entropy` with a mean: some logits at a time, and the gradients that its forward makes.

    Args:
        tokens: the tokens of all ranks together.
        split: "tokens" or "vocabulary", as for the function.
        smoothed: whether there is label smoothing, which is a third number for each token.

    Example:
        >>> print(loss(131_072, vocabulary=128_256, dim=4096, ranks=2, split="vocabulary"))
        loss: 2.5 GiB on the device, 64.6 GiB without; 2.0 GiB sent
    """
    T = -(-tokens // ranks) if split == "tokens" else tokens
    V = -(-vocabulary // ranks) if split == "vocabulary" else vocabulary
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
    input, weight = (torch.empty(n, dim, dtype=dtype, device="meta") for n in (T, V))
    rows = max((part.stop - part.start for part in chunks(input, weight)), default=0)
    held = rows * V * itemsize + T * dim * itemsize + V * dim * max(itemsize, WIDE_BYTES)
    sent = 0
    if split == "vocabulary":
        held += rows * dim * max(itemsize, WIDE_BYTES)
        sent = T * (dim + 3 + smoothed) * max(itemsize, WIDE_BYTES)
    elif split == "tokens":
        sent = 8 + WIDE_BYTES
    without = 2 * T * vocabulary * itemsize + (T + vocabulary) * dim * itemsize
    # an all-reduce sends each number twice, less a rank's own share
    return Memory(name="loss", device_bytes=held, without_bytes=without, sent_bytes=2 * sent * (ranks - 1) // ranks)


def feed_forward(tokens: int, *, ffn: int, tile: int, itemsize: int = 2) -> Memory:
    """Counts what a gated feed-forward keeps for its backward inside of `tiled`: gate, up, and the product of both.

    Example:
        >>> print(feed_forward(131_072, ffn=14_336, tile=4096))
        feed-forward in tiles: 336.0 MiB on the device, 10.5 GiB without
    """
    each = 3 * ffn * itemsize
    return Memory(name="feed-forward in tiles", device_bytes=min(tile, tokens) * each, without_bytes=tokens * each)


def offload(tokens: int, *, dim: int, blocks: int, itemsize: int = 2) -> Memory:
    """Counts the inputs of blocks under activation checkpointing inside of `parallel.offload`.

    Example:
        >>> print(offload(131_072, dim=4096, blocks=32))
        offload: 6.0 GiB on the device, 32.0 GiB without; 32.0 GiB on the host, copied there and back
    """
    each = tokens * dim * itemsize
    # in the backward: the input of a block, the one before, and those that are on their way
    return Memory(
        name="offload", device_bytes=min(AHEAD + 2, blocks) * each, without_bytes=blocks * each, host_bytes=blocks * each
    )


def _size(count: int) -> str:
    """Returns a number of bytes in the largest unit of which it has one."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
