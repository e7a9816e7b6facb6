"""All remedies of a step, each with its price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import torch

from rooftile.diagnosis.remedies import prices
from rooftile.diagnosis.remedies.attentions import StepAttention
from rooftile.diagnosis.remedies.bf16.narrower import narrower
from rooftile.diagnosis.remedies.checkpoints import recomputed, without_checkpoint
from rooftile.diagnosis.remedies.fusion.chains import (
    Chain,
    chains_of_tensors,
    compiled,
    find_chains,
    fuse,
    fused_optimiser,
    left_of,
    optimiser_chain,
    saved_us,
)
from rooftile.diagnosis.remedies.fusion.recompute import recompute
from rooftile.diagnosis.remedies.observed_step import WORTH, ObservedStep, by_queue
from rooftile.diagnosis.remedies.queue import LaunchChange, Queue
from rooftile.diagnosis.remedies.remedy import Remedy
from rooftile.diagnosis.remedies.wider import wider
from rooftile.diagnosis.verdicts.classify import COLLECTIVES
from rooftile.diagnosis.verdicts.findings import Finding
from rooftile.diagnosis.verdicts.step import classify_step
from rooftile.diagnosis.watching.compiled import NAMESPACE
from rooftile.hardware import load

PRODUCTS = ("aten::mm", "aten::addmm")
# the host reads a number: compiled code ends there and goes on in another piece, whose guards take the time of this many launches
READ, BREAK = "aten::_local_scalar_dense", 10
# in launches of small operators, by h200-diagnosis.jsonl: what the host needs on a GPU for a launch of compiled code, which also
# allocates its results, and for each tensor that the code is given, which its guards look at
PACE, GUARD = 2.5, 1.0
# a compiler calls custom operators as they are: where this share of the calls is theirs, its gain is unknown
CUSTOM = 0.25


def propose(seen: ObservedStep) -> list[Remedy]:
    """Returns the remedies that save a noticeable part of a step."""
    on_gpu = seen.device.type == "cuda"
    multiprocessors = torch.cuda.get_device_properties(seen.device).multi_processor_count if on_gpu else 0
    found = [
        wider(seen),
        *_fused(seen),
        *_attentions(seen),
        narrower(seen),
        without_checkpoint(seen.calls, seen.findings),
        recomputed(seen.calls, seen.findings),
    ]
    return _worth(seen, found) + propose_by_times(seen, multiprocessors)


def propose_by_times(seen: ObservedStep, multiprocessors: int) -> list[Remedy]:
    """Returns the remedies whose prices need neither a run nor which operators share a tensor.

    multiprocessors: of the GPU; 0 where it is unknown, or none.
    """
    is_collective = any(f.operation.op.startswith(COLLECTIVES) for f in seen.findings)
    found = [
        prices.larger_batch(seen.step, fixed_us=_fixed_us(seen)),
        *(_device_only(seen, multiprocessors) if seen.device.type == "cuda" else ()),
        *(prices.remove_synchronisation(where, us) for where, us in seen.sync_us.items()),
        *(
            prices.remove_wait(place, us, is_collective=is_collective)
            for place, us in seen.waits.items()
            if place.loads != "here"
        ),
        _load_beside(seen),
    ]
    return _worth(seen, found)


def _worth(seen: ObservedStep, found: Sequence[Remedy | None]) -> list[Remedy]:
    return [remedy for remedy in found if remedy is not None and remedy.predicted_us >= WORTH * seen.step.time_us]


def _load_beside(seen: ObservedStep) -> Remedy | None:
    loading = {place: us for place, us in seen.waits.items() if place.loads == "here"}
    if not loading:
        return None
    threads = seen.threads if seen.device.type == "cpu" else 1
    longest = max(loading, key=lambda place: loading[place])
    return prices.load_beside(longest, sum(loading.values()), step_us=seen.step.time_us, threads=threads, cores=load.cores())


def _fixed_us(seen: ObservedStep) -> float | None:
    """The part of a step that certainly does not grow with its batch; None for a step without a module, which may lack it.

    It is the time that launches and the optimiser take.
    """
    if not any(f.operation.module for f in seen.findings):
        return None
    optimiser_us = sum(f.time_us for f in seen.findings if f.operation.phase == "optimiser")
    fixed_us = sum(
        f.fixed_us * f.operation.calls for f in seen.findings
        if f.operation.device == "cpu" and f.operation.phase != "optimiser"
    )  # fmt: skip
    return min(seen.step.time_us, optimiser_us + fixed_us + _overhead_us(seen))


def _fused(seen: ObservedStep) -> list[Remedy | None]:
    phases = [seen.findings[call.row].operation.phase for call in seen.calls]
    of_optimiser = [call for call, phase in zip(seen.calls, phases, strict=True) if phase == "optimiser"]
    rest = [call for call, phase in zip(seen.calls, phases, strict=True) if phase != "optimiser"]
    draws = _draws_on_cpu(seen)
    found: list[Remedy | None] = [None if draws or _is_custom(seen) else _compiled(seen)]
    if draws:
        # without them the other operators can be fused all the same
        rest = [replace(call, pointwise=call.pointwise and not call.draws) for call in rest]
    chains = find_chains(rest, seen.kept)
    is_fused = any(seen.findings[call.row].operation.op.startswith("aten::_fused_") for call in of_optimiser)
    chain = None if is_fused else optimiser_chain(of_optimiser, seen.kept)
    return [*found, *fuse(chains, seen.findings), fused_optimiser(chain, seen.findings) if chain else None]


def _compiled(seen: ObservedStep) -> Remedy | None:
    if any(f.operation.op.startswith(NAMESPACE) for f in seen.findings):
        # it is compiled already
        return None
    of_modules = {n for n, f in enumerate(seen.findings) if f.operation.module}
    # torch.compile(model) leaves the optimiser and what lies outside of modules as it is; a step without one is compiled whole
    affected = of_modules or set(range(len(seen.findings)))
    phases = [(call, seen.findings[call.row].operation.phase) for call in seen.calls if call.row in affected]
    fused = [call for call, phase in phases if phase != "optimiser"]
    chains = recompute(find_chains(fused, seen.kept, fewest=1), fused, seen.kept)
    # an operator that nothing is fused with, and that reads no less, stays as it is
    chains = [c for c in chains if len(c.calls) > 1 or c.bytes_fused < c.bytes_now or c.calls[0].anew]
    if not of_modules:
        chains += chains_of_tensors([call for call, phase in phases if phase == "optimiser"], seen.kept)
    if seen.queue is not None:
        return _compiled_queue(seen, seen.queue, chains, affected)
    calls, all_calls = (sum(f.operation.calls for f in some) for some in ([seen.findings[n] for n in affected], seen.findings))
    share = calls / max(all_calls, 1)
    removed = sum(len(chain.calls) - 1 for chain in chains)
    # generated code calls its kernels as fast as this machine calls operators one after the other
    left_us = max(0.0, seen.launches * share - removed + BREAK * _breaks(seen, affected)) * seen.ceilings.launch_us
    overhead_us = _overhead_us(seen) * share - left_us
    return compiled(chains, saved_us(chains, seen.findings) + overhead_us)


def _is_custom(seen: ObservedStep) -> bool:
    """Whether many calls of the step are custom operators."""
    calls = [(f.operation.op, f.operation.calls) for f in seen.findings]
    custom = sum(count for op, count in calls if not op.startswith(("aten::", "prims::", NAMESPACE)))
    return custom > CUSTOM * sum(count for _, count in calls)


def _given(seen: ObservedStep, affected: Set[int]) -> int:
    """Counts the tensors that compiled code is given: tensors that it reads and has not made."""
    made: set[int] = set()
    given: set[int] = set()
    for call in seen.calls:
        if call.row in affected:
            given |= call.reads.keys() - made
            made |= call.writes.keys()
    return len(given)


def _compiled_queue(seen: ObservedStep, queue: Queue, chains: Sequence[Chain], affected: Set[int]) -> Remedy | None:
    """torch.compile on a GPU: fewer and shorter kernels, and a host that asks for each in the time of a few small operators."""
    left, launch_us = left_of(chains, seen.findings), seen.ceilings.launch_us
    breaks = _breaks(seen, affected)
    reads = sum(seen.findings[n].operation.calls for n in affected if seen.findings[n].operation.op == READ) or 1
    changes = {}
    for row in affected:
        operation = seen.findings[row].operation
        time_left, launches_left = left.get(row, (1.0, 1.0))
        host_us = operation.calls * launches_left * launch_us * PACE
        if operation.op == READ:
            host_us += breaks * BREAK * launch_us * operation.calls / reads
        time_us, padded_us = seen.findings[row].time_us, seen.aligned_us.get(row, 0.0)
        changes[row] = LaunchChange(device=time_left - padded_us / time_us if padded_us else time_left, host=host_us)
    first = seen.calls[0].row if seen.calls else min(affected)
    keys = {(f.operation.op, f.operation.shapes) for f in (seen.findings[row] for row in affected)}
    kept_us = queue.short_waits_us(seen.step.waiting_us, keys)
    changes[first] = changes.get(first, LaunchChange())._replace(host_us=GUARD * launch_us * _given(seen, affected) + kept_us)
    predicted_us, held_us = by_queue(seen, queue, changes)
    return compiled(chains, predicted_us, host_us=held_us, padded_us=sum(seen.aligned_us.get(row, 0.0) for row in affected))


def _breaks(seen: ObservedStep, affected: Set[int]) -> int:
    """How often compiled code ends because a number is read; optimisers read none where they are compiled."""
    its = [seen.findings[n].operation for n in affected]
    return sum(operation.calls for operation in its if operation.op == READ and operation.phase != "optimiser")


def why_not_compiled(seen: ObservedStep) -> list[str]:
    """Returns a note where the saving of torch.compile is unknown."""
    if _draws_on_cpu(seen):
        reason = "on a CPU compiled code draws its random numbers in another, slower way"
    elif _is_custom(seen):
        reason = "many of the step's calls are custom operators, which compiled code calls as they are"
    else:
        return []
    return [f"compile has no price: {reason}; --apply compile tries it"]


def _draws_on_cpu(seen: ObservedStep) -> bool:
    """Whether the step draws random numbers between its operators, as dropout does, on a CPU."""
    return seen.device.type == "cpu" and any(call.draws and call.pointwise for call in seen.calls)


def _overhead_us(seen: ObservedStep) -> float:
    """The time of a step that launches take: between the operators of a CPU, and while a GPU waits for the host."""
    if seen.device.type == "cpu":
        return max(0.0, seen.step.idle_us.get("host", 0.0) - seen.step.waiting_us)
    return (classify_step(seen.step, seen.findings).overhead_share or 0.0) * seen.step.time_us


def _attentions(seen: ObservedStep) -> list[Remedy | None]:
    """One remedy for all layers with the same shapes."""
    kinds: dict[tuple[object, ...], list[tuple[StepAttention, Mapping[str, float], str]]] = {}
    for one, times, how in seen.attentions:
        kinds.setdefault((one.q, one.k, one.v, one.backward, how), []).append((one, times, how))
    found = []
    for same in kinds.values():
        rows = sorted({row for one, _, _ in same for row in one.rows})
        calls = sum(one.calls for one, _, _ in same)
        where = next((seen.findings[row].operation.where for row in rows if seen.findings[row].operation.where), "")
        _, times, words = same[0]
        how = f'{words}{f" at {where}" if where else ""}, or attn_implementation="rooftile" in Transformers'
        found.append(prices.another_attention([(row, seen.findings[row]) for row in rows], times, how=how, calls=calls))
    return found


def _device_only(seen: ObservedStep, multiprocessors: int) -> list[Remedy | None]:
    found = [prices.cuda_graph(seen.step, busy_us=seen.busy_us, launches=seen.launches, node_us=seen.node_us)]
    for row, f in enumerate(seen.findings):
        if f.operation.op in PRODUCTS and multiprocessors and f.operation.shapes:
            found.append(prices.pad((row, f), sizes_of(f), multiprocessors=multiprocessors))
        if any("Memcpy HtoD (Pageable" in name for name in seen.kernels.get(row, ())):
            idle_us = min(f.time_us, seen.step.idle_us.get("copy", 0.0))
            found.append(prices.overlap_copy(f.operation.where, copy_us=idle_us, busy_us=seen.busy_us))
    return found


def sizes_of(finding: Finding) -> tuple[int, int, int]:
    """Returns M, N, K of a product (M, K) @ (K, N)."""
    (m, k), (_, n) = [kind[0] for kind in finding.operation.key[4:] if isinstance(kind, tuple) and len(kind[0]) == 2][-2:]
    return m, n, k
