"""An operator alone, beside a changed one: the same product with padded sizes, or in a narrower dtype."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import ceil
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from rooftile.diagnosis.records import Sample
from rooftile.diagnosis.remedies.prices import PAD_TO
from rooftile.diagnosis.steps import wait_for

RUNS = 15
# seconds for all runs; a work that is very slow is run twice
LIMIT = 0.5


def times_us(works: Sequence[Callable[[], Any]], device: torch.device, runs: int = RUNS) -> list[float]:
    """The median time of each of several works in µs, run in turns; the first run of each prepares."""
    taken: list[list[float]] = [[] for _ in works]
    end = time.perf_counter() + LIMIT * len(works)
    for run in range(runs + 1):
        for samples, work in zip(taken, works, strict=True):
            wait_for(device)
            start = time.perf_counter()
            work()
            wait_for(device)
            samples.append((time.perf_counter() - start) * 1e6)
        if run and time.perf_counter() > end:
            break
    return [median(samples[1:]) for samples in taken]


def padded_saving_us(sample: Sample, device: torch.device, multiple: int = PAD_TO) -> float:
    """Times a recorded product (M, K) @ (K, N) and the same with K and N padded; returns the time saved in µs.

    The padded factors are there before the product, as padded weights and activations would be. An addend is left out of both.
    """
    left, right = [x for x in sample.args if isinstance(x, Tensor) and x.ndim == 2][-2:]
    (m, k), n = left.shape, right.shape[1]
    wide_k, wide_n = (ceil(size / multiple) * multiple for size in (k, n))
    wide_left = left.new_zeros(m, wide_k)
    wide_left[:, :k] = left
    # the axis that is contiguous stays so
    transposed = right.stride(0) == 1 and k > 1
    wide_right = right.new_zeros(wide_n, wide_k).T if transposed else right.new_zeros(wide_k, wide_n)
    wide_right[:k, :n] = right
    with torch.no_grad():
        now, padded = times_us([lambda: left @ right, lambda: wide_left @ wide_right], device)
    return now - padded


def narrower_share(sample: Sample, dtype: torch.dtype, device: torch.device) -> float:
    """Times a recorded operator in its own dtype and in a narrower one; returns the share of the time that is left.

    Only a run tells: a processor may have the narrower dtype's units, or a library's slow path, for some strides only.
    """

    def narrow(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    args, kwargs = tree_map(narrow, (sample.args, sample.kwargs))
    with torch.no_grad():
        own, other = times_us(
            [lambda: sample.function(*sample.args, **sample.kwargs), lambda: sample.function(*args, **kwargs)], device
        )
    return other / own
