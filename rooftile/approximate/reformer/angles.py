"""Hashes of vectors by their angles, by which Reformer sorts."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from rooftile.approximate.chosen_arguments import as_given, check_seed
from rooftile.approximate.gathered.grouping import can_choose
from rooftile.approximate.gathered.grouping import hashes as hashes_in_kernel
from rooftile.errors import InvalidInput
from rooftile.runtime.arguments import check_count, shown
from rooftile.runtime.operators import outside_transforms, transformed, watched
from rooftile.runtime.words import answers_foreign_words


@answers_foreign_words
def lsh(x: Tensor, rounds: int, buckets: int, seed: int = 0) -> Tensor:
    """Hashes of vectors by their angles: argmax [x R; -x R] with a random R per head and round.

    Args:
        x: vectors (B, T, H, D).
        rounds: hashes per vector.
        buckets: values of a hash, an even number.
        seed: of R, which is drawn on the host: the same on every device.

    Returns:
        (B, T, H, rounds) int32, computed in fp32; ties go to the lower bucket.

    Example:
        >>> lsh(torch.randn(1, 100, 8, 64), rounds=4, buckets=16).shape
        torch.Size([1, 100, 8, 4])
    """
    if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point():
        raise InvalidInput(f"x is {shown(x)}; must be a floating-point tensor (B, T, H, D)")
    rounds, buckets, seed = check_count("rounds", rounds), check_count("buckets", buckets), check_seed(seed)
    if buckets % 2:
        raise InvalidInput(f"buckets is {buckets}; must be even: half of them are the negatives of the others")
    H, D = x.shape[2:]
    r = _drawn_on(x.device, (H, D, rounds, buckets // 2), seed)
    with torch.no_grad(), as_given(x):
        if can_choose(x):
            return hashes_in_kernel(x, r)
        turned = torch.einsum("bthd,hdrn->bthrn", x.float(), r)
        return torch.cat([turned, -turned], dim=-1).argmax(-1).int()


def _drawn_on(device: torch.device, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random numbers, which are drawn once: a million of them take the host as long as many layers take a GPU."""
    if transformed():
        # all samples of torch.vmap hash alike, as the rows of a batch do
        with outside_transforms():
            return _drawn_on(device, shape, seed)
    if torch.compiler.is_compiling() or watched():
        return _drawn(shape, seed).to(device)
    return _remembered(device, shape, seed)


@lru_cache(maxsize=8)
def _remembered(device: torch.device, shape: tuple[int, ...], seed: int) -> Tensor:
    # an inference tensor would be one for every later call
    with torch.inference_mode(False):
        return _drawn(shape, seed).to(device)


def _drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    """Random numbers, which a compiled graph holds: older Dynamos do not trace a generator."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# torch.compiler.assume_constant_result sets this mark; calling it would import Dynamo, over a second
_drawn._dynamo_marked_constant = True  # type: ignore[attr-defined]
