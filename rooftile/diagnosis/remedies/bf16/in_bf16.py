"""The operators of a step, run in bf16: the share of each row's time that is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.records import OperatorRow, Sample
from rooftile.diagnosis.remedies.alone import chosen_shares, narrower_share
from rooftile.diagnosis.remedies.attentions import FUSED

# runs in each dtype without which a share says nothing
LEAST_RUNS = 4
# operators behind a call that chooses one of several kernels for a dtype
CHOSEN = ("_efficient_attention", "_flash_attention", "cudnn_batch_norm", "native_batch_norm")


def shares_in_bf16(
    operations: Sequence[OperatorRow], kinds: Mapping[tuple[object, ...], Sequence[int]],
    samples: Mapping[tuple[object, ...], Sample], call_us: Mapping[tuple[object, ...], float], device: torch.device,
    deadline: Deadline,
) -> tuple[dict[int, float], frozenset[int]]:  # fmt: skip
    """Runs operators in bf16, as long as a run in fp32 and a run in bf16 are expected to end in time.

    Returns by row the share of its time that is left in bf16, for rows that could be run so; and the rows that were too late.

    Args:
        operations: the rows of the table.
        kinds: the rows of each kind that is worth a run, the most expensive kind first.
        samples: recorded calls by kind.
        call_us: the time of one call of each kind.
        device: of the step.
        deadline: of all runs.
    """
    found: dict[int, float] = {}
    too_late: set[int] = set()

    def is_in_time(its: Sequence[tuple[object, ...]]) -> bool:
        return deadline.allows(2 * LEAST_RUNS * sum(call_us.get(kind, 0.0) for kind in its) / 1e6)

    if device.type == "cuda":
        tried: dict[tuple[object, ...], tuple[float, float] | None] = {}
        for main, others in with_backward(operations):
            sample, key = samples.get(operations[main].kind), (operations[main].kind, bool(others))
            if sample is None or not is_in_time([operations[row].kind for row in (main, *others)]):
                continue
            if key not in tried:
                tried[key] = chosen_shares(sample, torch.bfloat16, device, backward=bool(others))
            if (shares := tried[key]) is not None:
                found |= {main: shares[0]} | dict.fromkeys(others, shares[1])
    for kind, rows in kinds.items():
        if found.keys() >= {*rows}:
            continue
        if not is_in_time([kind]):
            too_late |= {*rows}
            continue
        share = narrower_share(operations[rows[0]], samples.get(kind), torch.bfloat16, device, deadline)
        if share is not None:
            found = dict.fromkeys(rows, share) | found
    return found, frozenset(too_late - found.keys())


def with_backward(operations: Sequence[OperatorRow]) -> list[tuple[int, list[int]]]:
    """Returns the rows of fp32 operators whose kernel PyTorch chooses by the dtype, each with the rows of its backward."""
    found = []
    for row, operation in enumerate(operations):
        if operation.phase != "forward" or operation.dtype != "fp32" or not operation.op.endswith(CHOSEN):
            continue
        # the backward of an attention may be another kernel's
        stem = operation.op.rpartition("_")[0] if operation.op.startswith(FUSED) else operation.op
        its = [
            n for n, other in enumerate(operations)
            if other.phase == "backward" and other.module == operation.module and other.op.startswith(stem)
        ]  # fmt: skip
        found.append((row, its))
    return found
