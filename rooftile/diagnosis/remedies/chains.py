"""Chains of operators that one kernel could compute, and what fusing them saves.

A chain is a run of consecutive pointwise calls in which each reads something that an earlier one of them wrote. The fused kernel
reads each tensor from outside once, and writes only what somebody reads afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rooftile.diagnosis.records import Call
from rooftile.diagnosis.remedies.remedy import COMPILE, FUSE, Remedy
from rooftile.diagnosis.verdicts.findings import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Consecutive calls that can be fused."""

    calls: tuple[Call, ...]
    bytes_now: int
    bytes_fused: int


def find_chains(calls: Sequence[Call], kept: Collection[int] = ()) -> list[Chain]:
    """Returns the chains of two and more calls.

    kept: tensors that are read after the step: its results, and tensors that a backward has saved.
    """
    last_read = {tensor: i for i, call in enumerate(calls) for tensor in call.reads}
    found: list[Chain] = []
    start = 0
    while start < len(calls):
        stop = _end(calls, start)
        if stop - start > 1:
            found.append(_chain(calls[start:stop], stop, last_read, kept))
        start = stop
    return found


def optimiser_chain(calls: Sequence[Call], kept: Collection[int] = ()) -> Chain | None:
    """Returns the calls of an optimiser as one chain: a fused step reads and writes each tensor once; None if it has no two."""
    if len(calls) < 2:
        return None
    return _chain(calls, len(calls), {}, kept)


def chains_of_tensors(calls: Sequence[Call], kept: Collection[int] = ()) -> list[Chain]:
    """Returns the calls of an optimiser that a compiler fuses: a chain for all that share a tensor which one of them writes."""
    written = {tensor for call in calls for tensor in call.writes}
    groups: list[tuple[set[int], list[Call]]] = []
    for call in calls:
        own, members = {t for t in {*call.reads, *call.writes} if t in written}, [call]
        apart = []
        for tensors, others in groups:
            if tensors & own:
                own |= tensors
                members = [*others, *members]
            else:
                apart.append((tensors, others))
        groups = [*apart, (own, members)]
    return [_chain(members, len(calls), {}, kept) for _, members in groups if len(members) > 1]


def fuse(chains: Sequence[Chain], findings: Sequence[Finding]) -> list[Remedy]:
    """Returns a remedy per kind of chain: the same operators in the same order, in all layers that have them."""
    kinds: dict[tuple[str, ...], list[Chain]] = {}
    for chain in chains:
        kinds.setdefault(tuple(_short(findings[call.row]) for call in chain.calls), []).append(chain)
    return [_remedy(names, kind, findings) for names, kind in kinds.items()]


def saved_us(chains: Sequence[Chain], findings: Sequence[Finding]) -> float:
    """Returns the time that fused chains save in kernels."""
    return sum(_saving_us(chain, findings) for chain in chains)


def fused_optimiser(chain: Chain, findings: Sequence[Finding]) -> Remedy | None:
    """Prices one call in place of an optimiser's many."""
    predicted_us = _saving_us(chain, findings)
    if predicted_us <= 0:
        return None
    return Remedy(
        name="fused optimiser",
        ops=tuple(sorted({call.row for call in chain.calls})),
        predicted_us=predicted_us,
        how=f"fused=True in Adam, AdamW, SGD or Adagrad, else torch.compile of its step: {len(chain.calls):,} calls become "
        f"one, {(chain.bytes_now - chain.bytes_fused) / 1e6:,.1f} MB fewer",
        changes="rounding",
    )


def compiled(chains: Sequence[Chain], findings: Sequence[Finding], *, overhead_us: float = 0.0) -> Remedy | None:
    """Prices torch.compile of the whole step: all of its chains are fused, and no Python runs between operators.

    overhead_us: the time between operators that compiled code does not need; negative if it needs more.
    """
    launches = sum(len(chain.calls) - 1 for chain in chains)
    predicted_us = saved_us(chains, findings) + overhead_us
    if predicted_us <= 0:
        return None
    saved = sum(chain.bytes_now - chain.bytes_fused for chain in chains)
    return Remedy(
        name=COMPILE,
        ops=tuple(sorted({call.row for chain in chains for call in chain.calls})),
        predicted_us=predicted_us,
        how=f"torch.compile(model): {len(chains):,} chains of operators become one kernel each, {saved / 1e6:,.1f} MB and "
        f"{launches:,} launches fewer",
        changes="rounding",
    )


def _end(calls: Sequence[Call], start: int) -> int:
    """Returns the index after the last call of the chain that begins at `start`."""
    stop, written = start + 1, set(calls[start].writes)
    while calls[start].pointwise and stop < len(calls) and calls[stop].pointwise and written & calls[stop].reads.keys():
        written |= calls[stop].writes.keys()
        stop += 1
    return stop


def _chain(calls: Sequence[Call], stop: int, last_read: Mapping[int, int], kept: Collection[int]) -> Chain:
    inputs: dict[int, int] = {}
    written: dict[int, int] = {}
    for call in calls:
        for tensor, size in call.reads.items():
            if tensor not in written:
                inputs[tensor] = max(size, inputs.get(tensor, 0))
        for tensor, size in call.writes.items():
            written[tensor] = max(size, written.get(tensor, 0))
    # a tensor that nobody reads is a result; one that is an input too was written in place, and outlives the chain
    outputs = {
        t: size
        for t, size in written.items()
        if t in kept or t in inputs or t not in last_read or last_read[t] >= stop
    }
    return Chain(
        calls=tuple(calls),
        bytes_now=sum(sum(call.reads.values()) + sum(call.writes.values()) for call in calls),
        bytes_fused=sum(inputs.values()) + sum(outputs.values()),
    )


def _remedy(names: tuple[str, ...], chains: Sequence[Chain], findings: Sequence[Finding]) -> Remedy:
    saved = sum(chain.bytes_now - chain.bytes_fused for chain in chains)
    launches = sum(len(chain.calls) - 1 for chain in chains)
    where = next((findings[call.row].operation.where for call in chains[0].calls if findings[call.row].operation.where), "")
    times = f", {len(chains)} times" if len(chains) > 1 else ""
    return Remedy(
        name=FUSE,
        ops=tuple(sorted({call.row for chain in chains for call in chain.calls})),
        predicted_us=sum(_saving_us(chain, findings) for chain in chains),
        how=(
            f"torch.compile the function{f' at {where}' if where else ''}: {' + '.join(names)}{times} in one kernel, "
            f"{saved / 1e6:,.1f} MB and {launches:,} launches fewer"
        ),
        # a compiler keeps intermediate values in fp32, and contracts products and sums
        changes="rounding",
    )


def _saving_us(chain: Chain, findings: Sequence[Finding]) -> float:
    members = [findings[call.row] for call in chain.calls]
    traffic_us = sum(f.traffic_us for f in members)
    if chain.bytes_now:
        traffic_us *= chain.bytes_fused / chain.bytes_now
    arithmetic_us = sum(f.compute_us for f in members)
    # nobody knows whether a fused kernel does away with a time that the model does not explain
    fused_us = max(traffic_us, arithmetic_us) + max(f.fixed_us for f in members) + sum(f.unexplained_us for f in members)
    return max(0.0, sum(f.call_us for f in members) - fused_us)


def _short(finding: Finding) -> str:
    return finding.operation.op.split("::")[-1].split(".")[0]
