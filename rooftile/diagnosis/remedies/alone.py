"""An operator alone, beside a changed one: the same product with padded sizes, or in a narrower dtype."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import ceil
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from rooftile.diagnosis.counts.traffic import bound
from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.experiments.timing import keep_busy
from rooftile.diagnosis.records import OperatorRow, Sample
from rooftile.diagnosis.remedies.prices import PAD_TO
from rooftile.diagnosis.watching.compiled import NAMESPACE
from rooftile.diagnosis.watching.steps import wait_for

RUNS = 15
# seconds for all runs; a work that is very slow is run twice
LIMIT = 0.5
# a first run that takes this many times as long needs no second one
HOPELESS = 10
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
# GPU libraries have their fast kernels for rows of whole 16 bytes
ALIGNED_BYTES = 16


def times_us(works: Sequence[Callable[[], Any]], device: torch.device, runs: int = RUNS) -> list[float]:
    """The median time of each of several works in µs, run in turns; the first run of each prepares, unless it is the only one.

    On a GPU it is the time of its kernels: the host has asked for them before the first one begins.
    """
    taken: list[list[float]] = [[] for _ in works]
    launching_us = [0.0] * len(works)
    end = time.perf_counter() + LIMIT * len(works)
    for run in range(runs + 1):
        for n, work in enumerate(works):
            us, launched_us = _once_us(work, device, launching_us[n])
            taken[n].append(us)
            # the first run also loads kernels
            launching_us[n] = launched_us if run < 2 else min(launched_us, launching_us[n])
        if run and time.perf_counter() > end:
            break
    return [median(samples[1:] or samples) for samples in taken]


def _once_us(work: Callable[[], Any], device: torch.device, launching_us: float) -> tuple[float, float]:
    """The time of one run in µs, and the host's time for it, which was `launching_us` before."""
    wait_for(device)
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        us = (time.perf_counter() - began) * 1e6
        return us, us
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    keep_busy(device, launching_us + 50.0)
    start.record()
    began = time.perf_counter()
    work()
    launched_us = (time.perf_counter() - began) * 1e6
    stop.record()
    wait_for(device)
    return start.elapsed_time(stop) * 1e3, launched_us


def can_be_padded(sample: Sample) -> bool:
    """Returns whether both factors of a recorded product are dense."""
    return all(factor.layout == torch.strided for factor in _factors(sample))


def padded_saving_us(sample: Sample, device: torch.device, multiple: int = PAD_TO) -> float:
    """Times a recorded product (M, K) @ (K, N) and the same with K and N padded; returns the time saved in µs.

    The padded factors are there before the product, as padded weights and activations would be. An addend is left out of both.
    """
    left, right = _factors(sample)
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


def aligned_saving_us(sample: Sample, device: torch.device) -> float:
    """Times a recorded product (M, K) @ (K, N) and what torch.compile makes of it on a GPU, where a size has no whole 16 bytes.

    It copies both factors into larger ones, and takes a part of the result. Returns the time saved in µs, 0 where it saves none.
    """
    left, right = _factors(sample)
    if left.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return 0.0
    align = ALIGNED_BYTES // left.element_size()
    (m, k), n = left.shape, right.shape[1]
    more_m, more_k, more_n = (-size % align for size in (m, k, n))
    if not more_m + more_k + more_n:
        return 0.0

    def padded() -> Tensor:
        return (F.pad(left, (0, more_k, 0, more_m)) @ F.pad(right, (0, more_n, 0, more_k)))[:m, :n]

    with torch.no_grad():
        now_us, padded_us = times_us([lambda: left @ right, padded], device)
    return max(0.0, now_us - padded_us)


def _factors(sample: Sample) -> tuple[Tensor, Tensor]:
    left, right = [x for x in sample.args if isinstance(x, Tensor) and x.ndim == 2][-2:]
    return left, right


def narrower_share(
    operation: OperatorRow, sample: Sample | None, dtype: torch.dtype, device: torch.device,
    deadline: Deadline | None = None,
) -> float | None:  # fmt: skip
    """Times an operator with kernels of its own for each dtype in fp32 and in a narrower one; returns the share that is left.

    A matrix product is tried on random numbers with its shapes and strides, other operators on their recorded inputs. None
    without either. Only a run tells: a processor may have the narrower dtype's units, or a library a slow path, for some
    strides only. None as well where the operator has no such dtype. A single run tells where the deadline allows no more.
    """
    try:
        calls = _in_both(operation, sample, dtype, device)
        if calls is None:
            return None
        with torch.no_grad():
            if device.type == "cpu":
                # a slow path on a CPU takes seconds; the first run on a GPU takes long only because it loads a kernel
                (own,) = times_us(calls[:1], device, runs=3)
                (other,) = times_us(calls[1:], device, runs=0)
                if other > HOPELESS * own or not (deadline or Deadline()).allows(2 * (own + other) / 1e6):
                    return other / own
            own, other = times_us(calls, device)
    except (RuntimeError, NotImplementedError):
        # this refusal is the answer: there is nothing to gain
        return None
    return other / own


def chosen_shares(
    sample: Sample, dtype: torch.dtype, device: torch.device, *, backward: bool
) -> tuple[float, float] | None:  # fmt: skip
    """Times a recorded attention or batch norm in fp32 and in a narrower dtype, by the call that chooses a kernel for the dtype.

    Returns the shares that are left of its forward and of its backward; None where it cannot be called so.
    """
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(backward):
            works = [_choosing(sample, width, backward) for width in (torch.float32, dtype)]
            taken = times_us([work for pair in works for work in pair], device)
    except (RuntimeError, KeyError):
        # this refusal is the answer: nothing is known
        return None
    if not backward:
        return taken[1] / taken[0], 1.0
    forward_us, both_us, narrow_us, narrow_both_us = taken
    return narrow_us / forward_us, max(0.0, narrow_both_us - narrow_us) / max(both_us - forward_us, 1e-3)


def _choosing(sample: Sample, width: torch.dtype, backward: bool) -> list[Callable[[], Any]]:
    """The call in a dtype, alone and, where there is a backward, with it."""
    given = bound(sample.function, sample.args, sample.kwargs)  # type: ignore[arg-type]
    words = ("query", "key", "value") if "query" in given else ("input", "weight", "bias")
    # autocast leaves the statistics and the weights of a norm as they are
    narrow = words if "query" in given else words[:1]
    x: list[Any] = [
        None if given[word] is None
        else given[word].detach().to(width if word in narrow else given[word].dtype).requires_grad_(backward)
        for word in words
    ]  # fmt: skip

    def forward() -> Tensor:
        if "query" not in given:
            return torch.batch_norm(
                x[0], x[1], x[2], given["running_mean"], given["running_var"], bool(given.get("training", True)),
                0.0, float(given.get("epsilon", given.get("eps", 1e-5))), torch.backends.cudnn.enabled,
            )  # fmt: skip
        mask = given.get("attn_mask", given.get("attn_bias"))
        mask = mask.to(width) if isinstance(mask, Tensor) and mask.is_floating_point() else mask
        return F.scaled_dot_product_attention(
            x[0], x[1], x[2], mask, given.get("dropout_p") or 0.0, bool(given.get("is_causal")), scale=given.get("scale")
        )

    def both() -> None:
        out = forward()
        torch.autograd.grad(out, [one for one in x if one is not None], torch.ones_like(out))

    return [forward, both] if backward else [forward]


def cast_us(device: torch.device, count: int = 100) -> float:
    """Returns the host's time for one copy between dtypes, waiting for no device."""
    x = torch.ones(16, device=device)
    taken = []
    for _ in range(5):
        wait_for(device)
        start = time.perf_counter()
        for _ in range(count):
            x.to(torch.bfloat16)
        taken.append(time.perf_counter() - start)
    return min(taken) / count * 1e6


def _in_both(
    operation: OperatorRow, sample: Sample | None, dtype: torch.dtype, device: torch.device
) -> list[Callable[[], Any]] | None:  # fmt: skip
    """The operator in fp32 and in a narrower dtype."""
    name, overload = operation.op.removeprefix("aten::"), str(operation.key[3]) or "default"
    kinds = [kind for kind in operation.key[4:] if isinstance(kind, tuple)]
    if any(len(kind) > 1 and not isinstance(kind[1], tuple) for kind in kinds):
        # a sparse or nested tensor, whose values decide its time
        return None
    if name in PRODUCTS and overload == "default" and all(kind[2] == "torch.float32" for kind in kinds):
        function = getattr(getattr(torch.ops.aten, name), overload)
        wide, narrow = ([_random(shape, stride, device, width) for shape, stride, _ in kinds] for width in (torch.float32, dtype))
        return [lambda: function(*wide), lambda: function(*narrow)]
    if sample is None or operation.dtype != "fp32" or not only_a_run_tells(operation.op):
        return None
    if device.type == "cuda" and "attention" in name:
        # PyTorch would choose another kernel, and this one reads what it got from the forward without a check
        return None
    # the LSE of attention and the statistics of a batch have fewer dimensions, and are in fp32 for inputs of any dtype
    fewest = 4 if "attention" in name else 3 if "batch_norm" in name else 0

    def narrowed(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= fewest else x

    args, kwargs = tree_map(narrowed, (sample.args, sample.kwargs))
    return [lambda: sample.function(*sample.args, **sample.kwargs), lambda: sample.function(*args, **kwargs)]


def _random(shape: Sequence[int], stride: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Random numbers with these strides; a dimension with stride 0 has one."""
    sizes = [size if step else 1 for size, step in zip(shape, stride, strict=True)]
    return torch.empty_strided(sizes, stride, device=device, dtype=dtype).normal_().expand(shape)


def only_a_run_tells(op: str) -> bool:
    """Whether no ceiling says how fast an operator is in a narrower dtype: a library has another kernel for each."""
    return has_products(op) or ("batch_norm" in op and not op.startswith(NAMESPACE))


def has_products(op: str) -> bool:
    """Whether an operator multiplies matrices, which a processor may be fast or slow at in each dtype.

    A generated kernel has the names of its neighbours, and would read tensors of another dtype in its own dtype.
    """
    if op.startswith(NAMESPACE) or "::convert" in op:
        return False
    return op.rpartition("::")[2] in PRODUCTS or any(word in op for word in ("conv", "attention", "rnn"))
