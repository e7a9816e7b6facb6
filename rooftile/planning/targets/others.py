"""The operators of a module that are no linear layers, counted and bounded by the diagnosis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set

from rooftile.diagnosis.machine import roofs_of
from rooftile.diagnosis.output.table import PHASES
from rooftile.diagnosis.records import OperatorRow, StepCall
from rooftile.diagnosis.remedies.fusion.chains import Chain, find_chains
from rooftile.diagnosis.verdicts.roofs import model
from rooftile.diagnosis.watching.watch import Watch
from rooftile.planning.costs import DeviceCeilings
from rooftile.planning.records import Other

# the diagnosis says more than a plan needs
_BOUNDS = {"latency": "overhead"}


def others_of(watch: Watch, in_layers: Set[int], machine: DeviceCeilings, root: str) -> list[Other]:
    """Returns the operators outside of linear layers, the longest time first.

    in_layers: the numbers of the calls that are in one.
    root: the class of the model, with which the diagnosis begins all names.
    """
    operations = watch.operations
    saved = _saved(find_chains(watch.calls, watch.kept), operations)
    found = [
        _other(operation, machine, root, *saved.get(row, ("", 0.0)))
        for row, operation in enumerate(operations)
        if not in_layers & set(operation.indices)
    ]
    return sorted(found, key=lambda other: -(other.predicted_us or 0.0))


def _other(operation: OperatorRow, machine: DeviceCeilings, root: str, fuse_with: str, saved_bytes: float) -> Other:
    roofs = roofs_of(operation, machine.device, machine.ceilings)
    found = model(operation, roofs)
    calls, bound = operation.calls, found.bound or ""
    if bound == "balanced":
        bound = "memory" if (found.memory_us or 0.0) >= (found.compute_us or 0.0) else "compute"
    saved_us = saved_bytes / roofs.bytes_per_s * 1e6 if bound == "memory" else 0.0
    return Other(
        module=operation.module.removeprefix(f"{root}."), operator=PHASES.get(operation.phase, "") + _short(operation),
        calls=float(calls),
        flops=None if operation.flops is None else float(operation.flops * calls),
        nbytes=None if operation.bytes is None else float(operation.bytes * calls),
        ridge=roofs.flops_per_s / roofs.bytes_per_s, bound=_BOUNDS.get(bound, bound),
        predicted_us=None if found.roof_us is None else calls * (found.roof_us + found.fixed_us),
        fuse_with=fuse_with, saved_bytes=saved_bytes, saved_us=saved_us,
    )  # fmt: skip


def _saved(chains: Sequence[Chain], operations: Sequence[OperatorRow]) -> dict[int, tuple[str, float]]:
    """By row: the operators that it can be fused with, and its part of the bytes that this saves."""
    names: dict[int, dict[str, None]] = defaultdict(dict)
    saved: dict[int, float] = defaultdict(float)
    for chain in chains:
        if chain.bytes_fused >= chain.bytes_now:
            continue
        for call in chain.calls:
            share = _bytes(call) / chain.bytes_now
            saved[call.row] += share * (chain.bytes_now - chain.bytes_fused)
            names[call.row] |= dict.fromkeys(_short(operations[other.row]) for other in chain.calls if other is not call)
    return {row: (", ".join(names[row]), size) for row, size in saved.items()}


def _bytes(call: StepCall) -> int:
    return sum(call.reads.values()) + sum(call.writes.values())


def _short(operation: OperatorRow) -> str:
    return operation.op.split("::")[-1].split(".")[0]
