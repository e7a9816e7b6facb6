"""Autocast's bf16 in an fp32 step: which calls become narrower, and the copies that it adds.

Products run in bf16; each operand that is still in fp32 is cast before, a weight once a step, and its gradient is cast back. Some
operators run in fp32 all the same, and cast bf16 inputs back. All others run in the dtypes of their inputs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from rooftile.diagnosis.counts.traffic import names
from rooftile.diagnosis.records import OperatorRow, StepCall
from rooftile.diagnosis.remedies.alone import has_products

# autocast's lists of operators in fp32, as far as they reach a step as operators of their own
WIDE = {
    "cuda": frozenset(
        names(
            """acos asin binary_cross_entropy_with_logits cosh cumprod cumsum exp expm1 linalg_vector_norm log log10 log1p log2
            mse_loss native_group_norm native_layer_norm nll_loss2d_forward nll_loss_forward norm pow prod reciprocal rsqrt sinh
            smooth_l1_loss softplus sum tan _log_softmax _softmax"""
        )
    ),
    "cpu": frozenset(names("binary_cross_entropy grid_sampler_2d mse_loss nll_loss_forward prod smooth_l1_loss _log_softmax")),
}
# beside tensors of another dtype, and in norms, a read of less than this share of the largest one is a mask or a statistic
LARGE = 1 / 3
# bytes of a single number, whose dtype changes no other
NUMBER = 8


@dataclass(slots=True)
class Narrowed:
    """The calls of a step that autocast narrows and the copies that it adds, by row of the table."""

    calls: Counter[int] = field(default_factory=Counter)  # that run in bf16
    casts: Counter[int] = field(default_factory=Counter)  # copies between fp32 and bf16, around the row's calls
    cast_bytes: Counter[int] = field(default_factory=Counter)  # that they read and write

    def share(self, row: int, calls: int) -> float:
        """Returns the share of a row's calls that run in bf16."""
        return self.calls[row] / calls


def narrowed(
    calls: Sequence[StepCall], operations: Sequence[OperatorRow], kept: Set[int], device: str
) -> Narrowed:  # fmt: skip
    """Follows the dtypes of a step under autocast.

    kept: tensors that outlive the step, such as weights. device: "cuda" or "cpu", which have lists of their own.
    """
    found = Narrowed()
    narrow: set[int] = set()
    cast_once: set[int] = set()
    trains = any(operation.phase == "backward" for operation in operations)
    # casts of the forward, whose gradients are cast back: by module and bytes
    to_cast_back: defaultdict[tuple[str, int], int] = defaultdict(int)

    def cast(row: int, size: int) -> None:
        found.casts[row] += 1
        found.cast_bytes[row] += size + size // 2

    def runs_narrow(call: StepCall, operation: OperatorRow, in_forward: bool) -> None:
        found.calls[call.row] += 1
        for tensor, size in call.writes.items():
            # the gradient of what the forward has cast is cast back
            if not in_forward and to_cast_back[operation.module, size]:
                to_cast_back[operation.module, size] -= 1
                cast(call.row, size)
            else:
                narrow.add(tensor)

    for call in calls:
        operation = operations[call.row]
        name = operation.op.rpartition("::")[2]
        if operation.phase == "optimiser" or operation.dtype != "fp32":
            continue
        in_forward = operation.phase == "forward" or call.again
        deciding = _deciding(call, operation, name)
        if has_products(operation.op):
            for tensor, size in (call.reads if in_forward else {}).items():
                if tensor not in narrow and tensor not in cast_once:
                    cast(call.row, size)
                    to_cast_back[operation.module, size] += 1
                    cast_once |= {tensor} & kept
            runs_narrow(call, operation, in_forward)
        elif in_forward and name in WIDE[device]:
            for tensor in call.reads.keys() & narrow:
                cast(call.row, call.reads[tensor])
        elif deciding and deciding <= narrow:
            runs_narrow(call, operation, in_forward)
        else:
            narrow -= call.writes.keys() - call.reads.keys()
            if in_forward and trains:
                # the sum of a narrow and a wide tensor is wide, and so is its gradient, which is cast for the narrow one
                for tensor in deciding & narrow:
                    cast(call.row, call.reads[tensor])
    return found


def _deciding(call: StepCall, operation: OperatorRow, name: str) -> set[int]:
    """The tensors whose dtypes decide the dtype of the result."""
    of_one_dtype = all(kind[2] == "torch.float32" for kind in operation.key[4:] if isinstance(kind, tuple))
    if of_one_dtype and "norm" not in name:
        return {tensor for tensor, size in call.reads.items() if size > NUMBER}
    largest = max(call.reads.values(), default=0)
    return {tensor for tensor, size in call.reads.items() if size > LARGE * largest}
