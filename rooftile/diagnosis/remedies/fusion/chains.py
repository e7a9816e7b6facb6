"""Chains of operators that one kernel could compute, and what fusing them saves.

A chain is a set of pointwise calls in which each reads something that another one of them reads or writes, as a compiler fuses
them: other calls may lie between, if no member needs what they make of another member's result. Reductions of rows are members,
reductions of all elements end a chain, and none reaches from the forward into the backward. The fused kernel reads each tensor
from outside once, and writes only what somebody reads afterwards. `recompute` has what a compiler saves between the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rooftile.diagnosis.records import StepCall
from rooftile.diagnosis.remedies.remedy import COMPILE, FUSE, Remedy
from rooftile.diagnosis.verdicts.findings import Finding

# chains that may still get members; a compiler looks no farther for something to fuse either
OPEN = 8
# bytes of a tensor that is worth reading once for two calls that share nothing else
SMALL = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Calls that can be fused."""

    calls: tuple[StepCall, ...]
    bytes_now: int
    bytes_fused: int
    inputs: Mapping[int, int]  # bytes that the fused kernel reads, by tensor
    outputs: Mapping[int, int]  # ... and that it writes
    again: tuple[StepCall, ...] = ()  # calls of the forward that a backward's kernel makes once more


def find_chains(calls: Sequence[StepCall], kept: Collection[int] = (), fewest: int = 2) -> list[Chain]:
    """Returns the chains of two and more calls.

    kept: tensors that are read after the step: its results, and tensors that a backward has saved.
    fewest: calls of a chain; with 1 also calls that are fused with no other.
    """
    readers = _readers(calls)
    open_ones: list[_Open] = []
    found: list[_Open] = []
    for index, call in enumerate(calls):
        homes = [one for one in reversed(open_ones) if one.takes(call)] if call.pointwise else []
        home = homes[0] if homes else None
        for other in homes[1:]:
            # a call that reads the results of two chains makes one of them
            if home is not None and other.makes(call.reads) and home.absorbs(other):
                open_ones.remove(other)
                found.remove(other)
        for one in open_ones:
            if one is not home:
                one.pass_by(call)
        if home is not None:
            home.add(index, call)
        elif call.pointwise:
            found.append(_Open())
            found[-1].add(index, call)
            open_ones = [*open_ones[1 - OPEN :], found[-1]]
    return [_chain(one.members, calls, readers, kept) for one in found if len(one.members) >= fewest]


class _Open:
    """A chain that may get more members."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self._backward = False
        self._written: set[int] = set()
        self._read: dict[int, int] = {}
        self._after: set[int] = set()  # what other calls have made of its members' results
        self._changed: set[int] = set()  # tensors that others have written since a member read or wrote them
        self._largest = 0

    def takes(self, call: StepCall) -> bool:
        """Whether a pointwise call shares a tensor with a member, and needs nothing that a member has to wait for."""
        if call.backward != self._backward:
            return False
        touched = call.reads.keys() | call.writes.keys()
        if touched & (self._after | self._changed):
            return False
        if call.reads.keys() & self._written:
            return True
        # two that only read the same tensor go over the same elements if it is the largest of both
        shared = call.reads.keys() & self._read.keys()
        largest = max(call.reads.values(), default=0)
        return any(call.reads[tensor] == largest == self._largest > SMALL for tensor in shared)

    def makes(self, tensors: Collection[int]) -> bool:
        """Whether a member has written one of some tensors."""
        return not self._written.isdisjoint(tensors)

    def absorbs(self, other: _Open) -> bool:
        """Merges another chain into this one, unless a call outside both lies between them in the data flow."""
        for one, two in ((self, other), (other, self)):
            if (one._read.keys() | one._written) & (two._after | two._changed):
                return False
        self.members = sorted([*self.members, *other.members])
        self._written |= other._written
        self._read |= other._read
        self._after |= other._after
        self._changed |= other._changed
        self._largest = max(self._largest, other._largest)
        return True

    def add(self, index: int, call: StepCall) -> None:
        self.members.append(index)
        self._backward = call.backward
        if call.ends:
            self._after |= call.writes.keys()
        self._written |= call.writes.keys()
        self._read |= call.reads
        self._largest = max(self._largest, *call.reads.values(), 0) if call.reads else self._largest

    def pass_by(self, call: StepCall) -> None:
        """Another call runs, which is no member."""
        if call.reads.keys() & (self._written | self._after):
            self._after |= call.writes.keys()
        self._changed |= call.writes.keys() & (self._written | self._read.keys())


def optimiser_chain(calls: Sequence[StepCall], kept: Collection[int] = ()) -> Chain | None:
    """Returns the calls of an optimiser as one chain: a fused step reads and writes each tensor once; None if it has no two."""
    if len(calls) < 2:
        return None
    return _chain(range(len(calls)), calls, {}, kept)


def chains_of_tensors(calls: Sequence[StepCall], kept: Collection[int] = ()) -> list[Chain]:
    """Returns the calls of an optimiser that a compiler fuses: a chain for all that share a tensor which one of them writes."""
    written = {tensor for call in calls for tensor in call.writes}
    groups: list[tuple[set[int], list[int]]] = []
    for index, call in enumerate(calls):
        own, members = {t for t in {*call.reads, *call.writes} if t in written}, [index]
        separate = []
        for tensors, others in groups:
            if tensors & own:
                own |= tensors
                members = [*others, *members]
            else:
                separate.append((tensors, others))
        groups = [*separate, (own, members)]
    return [_chain(sorted(members), calls, {}, kept) for _, members in groups if len(members) > 1]


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


def left_of(chains: Sequence[Chain], findings: Sequence[Finding]) -> dict[int, tuple[float, float]]:
    """Returns what fused chains leave of each row of the table: the share of its kernels' time, and of its launches."""
    time_us: defaultdict[int, float] = defaultdict(float)
    launches: defaultdict[int, float] = defaultdict(float)
    for chain in chains:
        now_us = sum(findings[call.row].call_us for call in chain.calls)
        for call in chain.calls:
            if now_us:
                time_us[call.row] += findings[call.row].call_us / now_us * _saving_us(chain, findings)
            launches[call.row] += 1 - 1 / len(chain.calls)
    return {
        row: (
            1 - time_us[row] / findings[row].time_us if findings[row].time_us else 1.0,
            1 - count / findings[row].operation.calls,
        )
        for row, count in launches.items()
    }


def compiled(
    chains: Sequence[Chain], predicted_us: float, *, host_us: float | None = None, padded_us: float = 0.0
) -> Remedy | None:  # fmt: skip
    """Returns torch.compile of the whole step: all of its chains are fused, and no Python runs between operators.

    predicted_us: what it saves. host_us: the host's time that is left where the step cannot be shorter than it, on a GPU.
    padded_us: the part of the saving that padded products have.
    """
    launches = sum(len(chain.calls) - 1 for chain in chains)
    if predicted_us <= 0:
        return None
    saved = sum(chain.bytes_now - chain.bytes_fused for chain in chains)
    fused = sum(len(chain.calls) > 1 for chain in chains)
    what = "nothing to fuse, and less time between operators"
    if fused:
        them = f"{fused:,} chains of operators become one kernel each" if fused > 1 else "a chain of operators becomes one kernel"
        what = f"{them}, {saved / 1e6:,.1f} MB and {launches:,} launches fewer"
    what += f"; products padded to whole 16 bytes save {padded_us / 1e3:,.3g} ms of it" * (padded_us > 0)
    return Remedy(
        name=COMPILE,
        ops=tuple(sorted({call.row for chain in chains for call in chain.calls})),
        predicted_us=predicted_us,
        how=f"torch.compile(model): {what}{held_up(host_us)}",
        changes="rounding",
    )


def held_up(host_us: float | None) -> str:
    """Says that a changed step waits for the host, if it does."""
    return "" if host_us is None else f"; then the host holds the step up, with {host_us / 1e3:,.3g} ms"


def _readers(calls: Sequence[StepCall]) -> dict[int, list[int]]:
    """The positions of the calls that read each tensor."""
    found: dict[int, list[int]] = {}
    for index, call in enumerate(calls):
        for tensor in call.reads:
            found.setdefault(tensor, []).append(index)
    return found


def _chain(
    members: Sequence[int], calls: Sequence[StepCall], readers: Mapping[int, Sequence[int]], kept: Collection[int]
) -> Chain:  # fmt: skip
    """The chain of some calls.

    readers: the calls that read each tensor; a tensor without a reader is a result.
    """
    own, its = set(members), [calls[index] for index in members]
    inputs: dict[int, int] = {}
    written: dict[int, int] = {}
    for call in its:
        for tensor, size in call.reads.items():
            if tensor not in written:
                inputs[tensor] = max(size, inputs.get(tensor, 0))
        for tensor, size in call.writes.items():
            written[tensor] = max(size, written.get(tensor, 0))
    # a tensor that no call reads is a result; a result that is an input too was written in place, and outlives the chain
    outputs = {
        t: size
        for t, size in written.items()
        if t in kept or t in inputs or t not in readers or any(r > members[0] and r not in own for r in readers[t])
    }
    # a call that needs two passes reads once more what comes from outside
    more = sum((call.passes - 1) * size for call in its for tensor, size in call.reads.items() if tensor in inputs)
    return Chain(
        calls=tuple(its),
        bytes_now=sum(sum(call.reads.values()) + sum(call.writes.values()) for call in its),
        bytes_fused=sum(inputs.values()) + more + sum(outputs.values()),
        inputs=inputs,
        outputs=outputs,
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
    as_now = [f for f, call in zip(members, chain.calls, strict=True) if not call.anew]
    # a kernel in place of a library's takes the time that the ceilings say, whatever the library's takes
    anew = [f.verdict.model for f, call in zip(members, chain.calls, strict=True) if call.anew]
    traffic_us = sum(f.traffic_us for f in as_now) + sum(model.memory_us or 0.0 for model in anew)
    if chain.bytes_now:
        traffic_us *= chain.bytes_fused / chain.bytes_now
    arithmetic_us = sum(f.compute_us for f in as_now) + sum(model.compute_us or 0.0 for model in anew)
    arithmetic_us += sum(findings[call.row].compute_us for call in chain.again)
    # it is unknown whether a fused kernel does away with a time that the model does not explain
    fused_us = max(traffic_us, arithmetic_us) + max(f.fixed_us for f in members) + sum(f.unexplained_us for f in as_now)
    return max(0.0, sum(f.call_us for f in members) - fused_us)


def _short(finding: Finding) -> str:
    return finding.operation.op.split("::")[-1].split(".")[0]
