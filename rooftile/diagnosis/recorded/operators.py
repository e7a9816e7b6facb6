"""Finds the operators among the events of a trace, and makes the rows of the table.

A trace has an operator inside of another: `linear` calls `addmm`, which calls `copy_`. An operator here is what it is in a live
diagnosis: the outermost one that is neither made of others nor a view.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch._ops import OpOverload

from rooftile.diagnosis.counts import is_free
from rooftile.diagnosis.recorded.calls import Calls, RecordedCall, overload_of, packet_of
from rooftile.diagnosis.recorded.event import TraceEvent, listed
from rooftile.diagnosis.recorded.places import TracePlace
from rooftile.diagnosis.records import OperatorRow
from rooftile.diagnosis.watching.timeline import OpKey

# functions of PyTorch that are no operators, though they are named like some
FOREIGN = ("autograd", "torch", "profiler", "prim")


def is_operator(event: TraceEvent) -> bool:
    """Whether an event is an operator that runs something itself, as one that is unknown here may do."""
    return event.category in ("cpu_op", "user_annotation") and _runs(
        event.name(), tuple(map(str, listed(event.args, "Input type")))
    )


@cache
def _runs(name: str, types: tuple[str, ...]) -> bool:
    namespace, colons, word = name.partition("::")
    if not colons or namespace in FOREIGN or not word.isidentifier():
        return False
    packet = packet_of(name)
    if packet is None:
        return True
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    if any(map(is_free, overloads)):
        return False
    if types and (called := overload_of(name, types)) is not None:
        return not _is_made_of_others(called)
    # variants that fill a given tensor, or name dimensions, are made of the others
    own = [one for one in overloads if "out" not in one._overloadname and "name" not in one._overloadname.lower()]
    return not own or not all(map(_is_made_of_others, own))


def _is_made_of_others(func: OpOverload) -> bool:
    # TorchScript's own overloads have no kernel at all; what Python adds for tracing never ran in the program
    own = torch._C._dispatch_has_kernel(func.name())
    return not own or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@dataclass(slots=True)
class _Row:
    call: RecordedCall
    where: str
    indices: list[int] = field(default_factory=list)


def rows_of(
    operators: Sequence[TraceEvent], places: Sequence[TracePlace], calls: Calls, with_kernels: Collection[OpKey] | None
) -> list[OperatorRow]:  # fmt: skip
    """Returns a row for each operator in each module and phase with the same inputs, in the order of their first calls.

    Args:
        operators: their events, in the order of time.
        places: of each.
        calls: counts them.
        with_kernels: the operators that a GPU has worked for; None on a CPU.
    """
    rows: dict[tuple[object, ...], _Row] = {}
    for n, (event, place) in enumerate(zip(operators, places, strict=True)):
        call = calls.of(event)
        key = (place.module, place.phase, event.name(), call.overload, *call.kinds)
        row = rows.setdefault(key, _Row(call, place.where))
        row.indices.append(n)
    return [_operation(key, row, with_kernels) for key, row in rows.items()]


def _operation(key: tuple[object, ...], row: _Row, with_kernels: Collection[OpKey] | None) -> OperatorRow:
    module, phase, name = (str(word) for word in key[:3])
    found = OperatorRow(
        module=module, op=name, phase=phase, calls=len(row.indices), flops=row.call.counted.flops,
        special=row.call.counted.special, bytes=row.call.counted.bytes, where=row.where, dtype=row.call.dtype, device="cpu",
        key=key, indices=tuple(row.indices),
    )  # fmt: skip
    on_gpu = with_kernels is not None and (name, found.shapes) in with_kernels
    return replace(found, device="cuda") if on_gpu else found
