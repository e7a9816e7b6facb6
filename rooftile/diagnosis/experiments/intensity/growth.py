"""E4 of products, convolutions and attention: what adds the fewest bytes grows, and the time that it adds is watched.

Attention over as many queries as keys has the same bytes with its causal mask and without: the pairs that the mask leaves out are
what is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from rooftile.diagnosis.experiments.call import RepeatableCall, held_bytes, operator_name
from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.experiments.intensity.sweep import PLANNED_ROUNDS, TIMED_S, Sweep
from rooftile.diagnosis.experiments.smaller.axes import with_result
from rooftile.diagnosis.experiments.timing import Timer, error, interleaved, low
from rooftile.errors import Unsupported

# dimensions of products that may grow alone; the one that two factors share would add bytes to both
GROWING: dict[str, tuple[tuple[tuple[int, int], ...], ...]] = {
    "mm": (((0, 0),), ((1, 1),), ((0, 1), (1, 0))),
    "addmm": (((1, 0), (0, 0)), ((2, 1), (0, -1)), ((1, 1), (2, 0))),
    "bmm": (((0, 1),), ((1, 2),), ((0, 2), (1, 1))),
    "linear": (((0, 0),), ((1, 0), (2, 0))),
    # more images, channels that come out, channels that go in; the backward's gradient is before them
    "convolution": (((0, 0),), ((1, 0), (2, 0)), ((0, 1), (1, 1))),
    "convolution_backward": (((0, 0), (1, 0)), ((1, 1), (2, 1))),
    # more queries per key
    "scaled_dot_product_attention": (((0, 2),),),
    "_scaled_dot_product_flash_attention_for_cpu": (((0, 2),),),
    "_scaled_dot_product_flash_attention": (((0, 2),),),
    "_scaled_dot_product_efficient_attention": (((0, 2),),),
    "_scaled_dot_product_cudnn_attention": (((0, 2),),),
    # a backward has its numbers of queries among its arguments: only its mask changes
    "_scaled_dot_product_flash_attention_for_cpu_backward": (),
    "_scaled_dot_product_flash_attention_backward": (),
    "_scaled_dot_product_efficient_attention_backward": (),
    "_scaled_dot_product_cudnn_attention_backward": (),
}
# tiles of queries and keys that a kernel computes whole, at most
TILE = 128
# a product with one row is often another program than one with two
STEEPEST = 2.5
TIMES = (2, 4, 8, 16, 32, 64)


def grows(call: RepeatableCall) -> bool:
    """Returns whether the operator is one whose arithmetic grows by a dimension."""
    return operator_name(call.function) in GROWING


def sweep(
    call: RepeatableCall, timer: Timer, time_us: float, arithmetic_us: float, flops: float, deadline: Deadline,
    memory_bytes: int,
) -> Sweep:  # fmt: skip
    """Returns times of the call with its cheapest dimension 2, 4, ... times as long, until its arithmetic alone takes T0 more.

    Args:
        call: a product, a convolution or attention.
        timer: of its device.
        time_us: T0.
        arithmetic_us: what its arithmetic takes alone, in the cache.
        flops: of the call.
        deadline: for timing.
        memory_bytes: that the grown tensors may take.
    """
    if "attention" in operator_name(call.function) and ((at := _mask_place(call)) is not None):
        return _by_mask(call, at, timer, time_us, arithmetic_us, flops, deadline)
    if "attention" in operator_name(call.function) and (len(call.tensors) != 3 or _is_causal(call)):
        raise Unsupported("more queries would see other keys under its mask")
    places = min(_choices(call), key=lambda places: _bytes_moved(call, places))
    grown: dict[int, RepeatableCall] = {1: call}
    for times in TIMES:
        if times > 4 and (times // 2 - 1) * arithmetic_us > time_us:
            break
        planned_us = PLANNED_ROUNDS * sum(time_us + (n - 1) * arithmetic_us for n in (*grown, times))
        if times == TIMES[0]:
            deadline.check(planned_us / 1e6)
        elif not deadline.allows(planned_us / 1e6):
            break
        if _bytes(_enlarged(call, places, times, dry=True)) > memory_bytes:
            break
        grown[times] = call.on(_enlarged(call, places, times))
    if len(grown) == 1:
        raise Unsupported("there is no memory to make it larger")
    taken = interleaved({times: partial(timer.used, made) for times, made in grown.items()}, TIMED_S, deadline)
    threads = timer.threads(call)
    return _checked(
        Sweep(
            tuple((times - 1) * arithmetic_us for times in grown),
            tuple(low(samples) / threads for samples in taken.values()),
            max(error(samples) for samples in taken.values()) / threads,
            tuple((times - 1) * flops for times in grown),
        )
    )


def _checked(found: Sweep) -> Sweep:
    if found.slope is not None and found.slope > STEEPEST:
        raise Unsupported("its time rises by several times what was added, so the library computes the larger one in another way")
    return found


def _mask_place(call: RepeatableCall) -> int | None:
    """The place of `is_causal` among the arguments of an attention over as many queries as keys; None for another one."""
    schema = getattr(call.function, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    if "is_causal" not in names or names.index("is_causal") >= len(call.args):
        return None
    at, given = names.index("is_causal"), dict(zip(names, call.args, strict=False)) | call.kwargs
    query, key, bias = given["query"], given["key"], given.get("attn_bias", given.get("attn_mask"))
    return at if query.shape[-2] == key.shape[-2] and query.shape[-2] > TILE and bias is None else None


def _by_mask(
    call: RepeatableCall, at: int, timer: Timer, time_us: float, arithmetic_us: float, flops: float, deadline: Deadline
) -> Sweep:  # fmt: skip
    """Returns the times with the causal mask and without. A backward's LSE is the call's own in both."""
    is_causal = bool(call.args[at])
    tiles = -(-next(x.shape[-2] for x in call.tensors) // TILE)
    # all tiles over those on and under the diagonal
    times = 2 * tiles / (tiles + 1)
    deadline.check(2 * PLANNED_ROUNDS * time_us * (times if is_causal else 1.0) / 1e6)
    masked, whole = (call.with_argument(at, value) for value in (True, False))
    for one in (masked, whole):
        one.run()
    taken = interleaved({"masked": partial(timer.used, masked), "whole": partial(timer.used, whole)}, TIMED_S, deadline)
    threads = timer.threads(call)
    added = times - 1 if is_causal else 1 - 1 / times
    return _checked(
        Sweep(
            (0.0, added * arithmetic_us),
            (low(taken["masked"]) / threads, low(taken["whole"]) / threads),
            max(error(samples) for samples in taken.values()) / threads,
            (0.0, added * flops),
        )
    )


def _is_causal(call: RepeatableCall) -> bool:
    schema = getattr(call.function, "_schema", None)
    if schema is None:
        # any flag may be the one
        return any(value is True for value in (*call.args, *call.kwargs.values()))
    given = dict(zip((argument.name for argument in schema.arguments), call.args, strict=False)) | call.kwargs
    return bool(given.get("is_causal", False))


def _choices(call: RepeatableCall) -> list[tuple[tuple[int, int], ...]]:
    """The dimensions that may grow. A bias that is broadcast along one stays as it is."""
    sizes = [x.shape for x in call.tensors]
    there = [
        tuple((which, dim) for which, dim in places if which < len(sizes) and -len(sizes[which]) <= dim < len(sizes[which]))
        for places in GROWING[operator_name(call.function)]
    ]
    if operator_name(call.function) == "addmm" and len(sizes[0]) == 1:
        there[0] = ((1, 0),)
    if operator_name(call.function).startswith("convolution") and not _is_plain_convolution(call):
        return there[:1]
    return with_result(call, there)


def _is_plain_convolution(call: RepeatableCall) -> bool:
    """Whether each channel that comes out meets each that goes in: no groups, and not transposed."""
    given = dict(zip((argument.name for argument in call.function._schema.arguments), call.args, strict=False))  # type: ignore[attr-defined]
    return given["groups"] == 1 and not given["transposed"]


def _enlarged(call: RepeatableCall, places: Sequence[tuple[int, int]], times: int, *, dry: bool = False) -> list[torch.Tensor]:
    """The tensors with the dimension repeated; dry: without memory."""
    tensors = [x.to("meta") for x in call.tensors] if dry else list(call.tensors)
    for which, dim in places:
        x = tensors[which]
        if x.shape[dim] == 1 and which == 0 and operator_name(call.function) == "addmm":
            # its addend is broadcast
            continue
        tensors[which] = torch.cat([x] * times, dim).to(x.dtype)
    return tensors


def _bytes_moved(call: RepeatableCall, places: Sequence[tuple[int, int]]) -> int:
    """The bytes of the arguments and results with the dimension twice as long."""
    return call.on(_enlarged(call, places, 2, dry=True)).bytes()


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(held_bytes(x) for x in tensors)
