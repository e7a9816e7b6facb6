"""The price of bf16: operators run in it, autocast's casts, and what the host does meanwhile."""

from __future__ import annotations

from collections.abc import Set

from rooftile.diagnosis.remedies import prices
from rooftile.diagnosis.remedies.alone import has_products, only_a_run_tells
from rooftile.diagnosis.remedies.bf16.autocast import Narrowed, narrowed
from rooftile.diagnosis.remedies.fusion.chains import held_up
from rooftile.diagnosis.remedies.observed_step import WORTH, ObservedStep, by_queue
from rooftile.diagnosis.remedies.queue import LaunchChange
from rooftile.diagnosis.remedies.remedy import Remedy
from rooftile.hardware.ceilings import Ceilings

# a narrower dtype whose products are this many times slower than in fp32 saves nothing
SLOW = 4


def narrower(seen: ObservedStep) -> Remedy | None:
    """Prices autocast to bf16; None where it saves nothing, or where too little of the step was tried in it to say."""
    if not bf16_may_gain(seen.ceilings) or not _computes_in_fp32(seen):
        return None
    rates = seen.ceilings.matmul_tflops
    under = narrowed(seen.calls, [f.operation for f in seen.findings], seen.kept, seen.device.type)
    untried = _untried(seen, under)
    tried = [(n, f) for n, f in enumerate(seen.findings) if under.calls[n] and n not in untried]
    # no rate of arithmetic is needed: what has products was run
    shares = prices.narrower_shares(tried, rate_ratio=rates["bf16"] / rates["fp32"], bytes_ratio=0.5, measured=seen.narrower)
    changes: dict[int, LaunchChange] = {}
    for n in {*shares, *under.casts}:
        casts = under.casts[n]
        changes[n] = LaunchChange(
            device=1 - (1 - shares.get(n, 1.0)) * under.share(n, seen.findings[n].operation.calls),
            device_us=under.cast_bytes[n] / (seen.ceilings.copy_gbs * 1e3) + casts * (seen.ceilings.node_us or 0.0),
            host_us=casts * seen.cast_us,
        )
    if seen.queue is not None:
        saved, host_us = by_queue(seen, seen.queue, changes)
    else:
        saved = sum(
            seen.findings[n].time_us * (1 - change.device) - change.device_us - change.host_us for n, change in changes.items()
        )
        host_us = None
    casts = sum(under.casts.values())
    words = f"; its {casts:,} casts move {sum(under.cast_bytes.values()) / 1e6:,.1f} MB" * bool(casts) + held_up(host_us)
    words += "".join(f"; {reason}, and are not in this price" for reason in _reasons(seen, untried))
    return prices.in_dtype("bf16", sorted(shares), saved, words)


def why_no_price(seen: ObservedStep) -> list[str]:
    """Returns notes for a step that computes in fp32 and has no price of bf16: why there is none.

    Nothing is said where all of it was tried, and it saves nothing.
    """
    if not _computes_in_fp32(seen):
        return []
    if not bf16_may_gain(seen.ceilings):
        rates = seen.ceilings.matmul_tflops
        slower = f"{rates['fp32'] / rates['bf16']:.3g} times as slow in it" if rates.get("bf16") else "not possible in it"
        return [f"bf16 has no price: products are {slower} on this machine"]
    under = narrowed(seen.calls, [f.operation for f in seen.findings], seen.kept, seen.device.type)
    return [f"bf16 has no price: {reason}" for reason in _reasons(seen, _untried(seen, under))]


def _computes_in_fp32(seen: ObservedStep) -> bool:
    """Whether most of the products run in fp32; what a program in a narrower dtype keeps in fp32 it keeps there on purpose."""
    in_products = {False: 0.0, True: 0.0}
    for f in seen.findings:
        if has_products(f.operation.op):
            in_products[f.operation.dtype == "fp32"] += f.time_us
    return in_products[True] > 0 and in_products[True] >= in_products[False]


def _untried(seen: ObservedStep, under: Narrowed) -> set[int]:
    """The rows that autocast narrows, whose price only a run tells, and that were not run."""
    return {
        n for n, f in enumerate(seen.findings) if under.calls[n] and only_a_run_tells(f.operation.op) and n not in seen.narrower
    }


def _reasons(seen: ObservedStep, untried: Set[int]) -> list[str]:
    """Why a noticeable part of the step was not tried in bf16."""
    found = []
    for rows, words in (
        (untried & seen.too_late, "were not tried in it, as a quarter of the budget had passed: a larger --budget tries them"),
        (untried - seen.too_late, "could not be run alone in it"),
    ):
        us = sum(seen.findings[n].time_us for n in rows)
        if us > WORTH * seen.step.time_us:
            found.append(f"operators of {us / 1e3:,.3g} ms {words}")
    return found


def bf16_may_gain(ceilings: Ceilings) -> bool:
    """Returns whether bf16 is worth a try. Where products in it are slow, trying takes minutes, and nothing makes up for them."""
    rates = ceilings.matmul_tflops
    return "bf16" in rates and rates["bf16"] > rates["fp32"] / SLOW
