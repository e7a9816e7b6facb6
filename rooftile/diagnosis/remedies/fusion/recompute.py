"""A compiler of forward and backward saves bytes between the two: the backward computes from what is there in any case.

PyTorch's partitioner chooses the smallest set of tensors to keep for the backward. Pointwise work and norms are cheap, so their
results are made again from the tensors that a product has read or written. Random numbers are kept. A tensor that a product of
the backward reads is kept, because a product reads memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from rooftile.diagnosis.records import StepCall
from rooftile.diagnosis.remedies.fusion.chains import Chain


def recompute(chains: Sequence[Chain], calls: Sequence[StepCall], kept: Collection[int]) -> list[Chain]:
    """Returns the chains of a step with fewer bytes: a backward's chain makes again what it would read of a forward's.

    Args:
        chains: all of them, also chains of one call.
        calls: of the step, in order.
        kept: tensors that outlive the step.
    """
    found = list(chains)
    reading: defaultdict[int, list[int]] = defaultdict(list)  # chains of the backward, by what they read
    for n, chain in enumerate(found):
        if chain.calls[0].backward:
            for tensor in chain.inputs:
                reading[tensor].append(n)
    # a read by a call that is in no chain is one that needs memory
    members = {id(call) for chain in chains for call in chain.calls}
    needed = {tensor for call in calls if id(call) not in members for tensor in call.reads} | {*kept}
    read_in_forward = {tensor for chain in chains if not chain.calls[0].backward for tensor in chain.inputs}
    for n, chain in enumerate(chains):
        if chain.calls[0].backward:
            continue
        for tensor, size in chain.outputs.items():
            sources, again = _sources(tensor, chain)
            readers = reading[tensor]
            is_there = sources.keys() <= chain.inputs.keys() | chain.outputs.keys()
            if not readers or tensor in needed or tensor in sources or not is_there:
                continue
            new = [{t: b for t, b in sources.items() if t not in found[reader].inputs} for reader in readers]
            is_written = tensor in read_in_forward
            saved = (0 if is_written else size) + sum(found[reader].inputs[tensor] for reader in readers)
            if saved <= sum(sum(more.values()) for more in new):
                continue
            if not is_written:
                outputs = {t: b for t, b in found[n].outputs.items() if t != tensor}
                found[n] = replace(found[n], outputs=outputs, bytes_fused=found[n].bytes_fused - size)
            for reader, more in zip(readers, new, strict=True):
                found[reader] = _reading(found[reader], tensor, more, again)
    return found


def _sources(tensor: int, chain: Chain) -> tuple[dict[int, int], tuple[StepCall, ...]]:
    """Finds the tensors from outside and random numbers that make a tensor of a chain, with their bytes; and the calls."""
    sources: dict[int, int] = {}
    again: list[StepCall] = []
    wanted = {tensor}
    for call in reversed(chain.calls):
        made = wanted & call.writes.keys()
        if not made:
            continue
        if call.draws or call.ends or made & call.reads.keys():
            # it cannot be made again: random, or written in place
            sources |= {t: call.writes[t] for t in made}
            wanted -= made
            continue
        again.append(call)
        wanted = (wanted - made) | call.reads.keys()
        sources |= {t: chain.inputs[t] for t in call.reads if t in chain.inputs}
    return sources, tuple(reversed(again))


def _reading(chain: Chain, tensor: int, more: dict[int, int], again: tuple[StepCall, ...]) -> Chain:
    """A chain that reads other tensors in place of one, and makes that one again."""
    inputs = {t: b for t, b in chain.inputs.items() if t != tensor} | more
    change = sum(more.values()) - chain.inputs[tensor]
    known = {id(call) for call in chain.again}
    added = tuple(call for call in again if id(call) not in known)
    return replace(chain, inputs=inputs, bytes_fused=chain.bytes_fused + change, again=(*chain.again, *added))
