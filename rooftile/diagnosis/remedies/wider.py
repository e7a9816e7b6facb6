"""The price of fp32 where a processor multiplies a narrower dtype more slowly, as a CPU without units for bf16 does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.records import OperatorRow, Sample
from rooftile.diagnosis.remedies.alone import has_products, times_us
from rooftile.diagnosis.remedies.observed_step import ObservedStep
from rooftile.diagnosis.remedies.remedy import WIDER, Remedy
from rooftile.hardware.ceilings import Ceilings

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
# products in fp32 that are this many times as fast are worth a run
FASTER = 1.2
RUNS = 3


def slow_dtypes(ceilings: Ceilings) -> list[str]:
    """Returns the dtypes whose products run slower than products in fp32 here."""
    rates = ceilings.matmul_tflops
    return [name for name in NARROW if name in rates and rates["fp32"] > FASTER * rates[name]]


def shares_in_fp32(
    operations: Sequence[OperatorRow], kinds: Mapping[tuple[object, ...], Sequence[int]],
    samples: Mapping[tuple[object, ...], Sample], call_us: Mapping[tuple[object, ...], float], slow: Sequence[str],
    device: torch.device, deadline: Deadline,
) -> dict[int, float]:  # fmt: skip
    """Runs products of slow dtypes in fp32 while there is time; returns by row the share of its time that is left.

    Args:
        operations: the rows of the table.
        kinds: the rows of each kind, the most expensive kind first.
        samples: recorded calls by kind.
        call_us: the time of one call in the step, by kind.
        slow: see `slow_dtypes`.
        device: of the step.
        deadline: nothing is run that takes longer in the step than is left.
    """
    found: dict[int, float] = {}
    for kind, rows in kinds.items():
        operation, sample = operations[rows[0]], samples.get(kind)
        if sample is None or operation.dtype not in slow or not has_products(operation.op) or not call_us.get(kind):
            continue
        if not deadline.allows(call_us[kind] / 1e6):
            continue
        args, kwargs = tree_map(_widened, (sample.args, sample.kwargs))
        try:
            with torch.inference_mode(False), torch.no_grad():
                (wide_us,) = times_us([lambda: sample.function(*args, **kwargs)], device, runs=RUNS)  # noqa: B023
        except (RuntimeError, NotImplementedError):
            # this refusal is the answer: the operator has no fp32 form with these arguments
            continue
        found |= dict.fromkeys(rows, wide_us / call_us[kind])
    return found


def wider(seen: ObservedStep) -> Remedy | None:
    """Prices fp32 for products of a dtype that is slower here; None where it saves nothing."""
    shares = {row: share for row, share in seen.wider.items() if share < 1}
    saved_us = sum(seen.findings[row].time_us * (1 - share) for row, share in shares.items())
    if saved_us <= 0:
        return None
    dtypes = " and ".join(sorted({seen.findings[row].operation.dtype for row in shares}))
    rows_us = sum(seen.findings[row].time_us for row in shares)
    return Remedy(
        name=WIDER, ops=tuple(sorted(shares)), predicted_us=saved_us,
        how=f"products in {dtypes} take {rows_us / (rows_us - saved_us):.1f} times as long here as in fp32, as the processor has "
        "no units for them: leave autocast out, or use model.float()",
        changes="rounding",
    )  # fmt: skip


def _widened(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.float() if x.dtype in NARROW.values() else x
    return torch.float32 if x in NARROW.values() else x
