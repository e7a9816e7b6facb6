"""The prices of single remedies, by the model of the verdicts: max(traffic, arithmetic) + fixed part, before and after.

Each function returns None where its remedy saves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil

from rooftile.diagnosis.remedies.remedy import ATTENTION, BATCH, DTYPE, GRAPH, PAD, Remedy
from rooftile.diagnosis.verdicts.findings import Finding
from rooftile.diagnosis.verdicts.step import StepEvidence
from rooftile.diagnosis.watching.host_place import HostPlace

# products want rows of whole 128-byte lines in 16 bits
PAD_TO = 64
TILE = (128, 128)
# a program's own steps are not captured, which says nothing about whether they could be
NOT_TRIED = "the program runs its own steps; name the function of one by --step to have it captured"
# ... and a step of several processes is made by all of them together
WITH_OTHERS = "the step meets other processes, which would have to make it as often"

# the line to try for each narrower dtype
NARROWER = {
    "bf16": "with torch.autocast(device, dtype=torch.bfloat16), or model.to(torch.bfloat16)",
    "fp16": "with torch.autocast(device, dtype=torch.float16), with a GradScaler in training",
    "tf32": 'torch.set_float32_matmul_precision("high")',
    "fp8": 'products in FP8 (torch._scaled_mm, torchao), attention with precision="fp8"',
}

Row = tuple[int, Finding]  # a row's number in the table, and its finding


def cuda_graph(step: StepEvidence, *, busy_us: float, launches: int, node_us: float) -> Remedy | None:
    """Prices the replay of the step as a CUDA graph: measured by E1, else its kernels with a node's cost between them.

    What the host waits for, such as data, no graph has in it, and the step takes as long for it as before.
    """
    graph_us = busy_us + launches * node_us if step.graph_us is None else step.graph_us
    reason = step.why_not.get("graph")
    first = f"first make it capturable ({reason}); then " if reason and reason not in (NOT_TRIED, WITH_OTHERS) else ""
    saved_us = step.time_us - step.waiting_us - graph_us
    return _remedy(
        name=GRAPH,
        predicted_us=saved_us,
        measured_us=None if step.graph_us is None else saved_us,
        how=f'{first}torch.compile(model, mode="reduce-overhead"), or torch.cuda.make_graphed_callables(model, inputs)',
        changes="memory",
    )


def larger_batch(step: StepEvidence, *, fixed_us: float | None = None) -> Remedy | None:
    """Prices twice the batch, as the time that it saves for the work of one step: half of the part that does not grow.

    The part comes from E2 (batch doubled, else halved), else from `fixed_us`: the sum of the operators' fixed parts and gaps.
    What the host waits for, such as data, is no such part, though an experiment with the same data does not see it grow.
    """
    words = ""
    if step.double_batch_us is not None:
        fixed_us = 2 * step.time_us - step.double_batch_us - step.waiting_us
    elif step.half_batch_us is not None:
        fixed_us = 2 * step.half_batch_us - step.time_us - step.waiting_us
    else:
        words = "; by the fixed parts of its operators, as no batch was changed"
    if fixed_us is None:
        return None
    two_us = 2 * step.time_us - fixed_us
    return _remedy(
        name=BATCH,
        predicted_us=fixed_us / 2,
        measured_us=None if step.double_batch_us is None else fixed_us / 2,
        how=f"twice the batch: one step of {two_us / 1e3:,.3g} ms in place of two of {step.time_us / 1e3:,.3g} ms{words}",
        changes="memory",
    )


def another_attention(
    rows: Sequence[Row], choices: Mapping[str, float], *, how: str, calls: int | None = None
) -> Remedy | None:  # fmt: skip
    """Prices the fastest of the timed attentions in place of the operators of one attention, or of the same in all layers.

    rows: the operators that it replaces; one of them in a fused attention, several in an eager one.
    choices: backend -> time of one call on the step's shapes.
    calls: the number of attentions in the rows; None: the number of calls of one row.
    """
    backend, best_us = min(choices.items(), key=lambda item: item[1])
    calls = max(f.operation.calls for _, f in rows) if calls is None else calls
    return _remedy(
        name=ATTENTION,
        ops=tuple(row for row, _ in rows),
        predicted_us=sum(f.time_us for _, f in rows) - calls * best_us,
        how=f"{how} (backend {backend})",
        changes="rounding",
    )


def narrower_shares(
    rows: Iterable[Row], *, rate_ratio: float, bytes_ratio: float, measured: Mapping[int, float] | None = None
) -> dict[int, float]:  # fmt: skip
    """Returns the share of its time that is left of each row in a narrower dtype; rows that do not change are left out.

    rate_ratio: the narrower dtype's ceiling over the present one. bytes_ratio: the present bytes' part that is left, 1/2 from
    fp32 to bf16. Special functions do not become faster. measured: by row, the share of its time that was left when it was run
    alone in the narrower dtype; such a row counts whether it gains or loses.
    """
    found = {}
    for row, f in rows:
        arithmetic_us = f.compute_us if f.verdict.model.compute == "special" else f.compute_us / rate_ratio
        after_us = max(arithmetic_us, f.traffic_us * bytes_ratio) + f.fixed_us
        if measured and row in measured:
            found[row] = measured[row]
        # a bound that the model does not explain stays: nothing is known about it
        elif f.verdict.bound in ("memory", "compute", "balanced") and after_us < f.call_us:
            found[row] = after_us / f.call_us
    return found


def in_dtype(dtype: str, rows: Sequence[int], predicted_us: float, words: str = "") -> Remedy | None:
    """Returns the remedy of a narrower dtype. words: what its price rests on."""
    return _remedy(
        name=f"{DTYPE}: {dtype}",
        ops=tuple(rows),
        predicted_us=predicted_us,
        how=NARROWER.get(dtype, f"inputs and weights in {dtype}") + words,
        changes="rounding",
    )


def pad(
    row: Row, sizes: tuple[int, int, int], *, multiprocessors: int, tile: tuple[int, int] = TILE, multiple: int = PAD_TO
) -> Remedy | None:  # fmt: skip
    """Prices a product of padded sizes: whole waves of tiles at the measured ceiling.

    sizes: M, N, K of (M, K) @ (K, N). M is the batch and stays; N and K are padded to a multiple of `multiple`.
    """
    number, f = row
    m, n, k = sizes
    padded_n, padded_k = (ceil(size / multiple) * multiple for size in (n, k))
    changed = [f"{a} to {b}" for a, b in ((n, padded_n), (k, padded_k)) if a != b]
    if not changed or f.verdict.bound != "compute":
        return None
    tiles = (ceil(m / tile[0]), ceil(padded_n / tile[1]))
    waves = ceil(tiles[0] * tiles[1] / multiprocessors)
    wave_us = multiprocessors * 2 * tile[0] * tile[1] * padded_k / f.roofs.flops_per_s * 1e6
    after_us = waves * wave_us + f.fixed_us
    return _remedy(
        name=PAD,
        ops=(number,),
        predicted_us=(f.call_us - after_us) * f.operation.calls,
        how=f"pad {' and '.join(changed)}: {tiles[0]:,} x {tiles[1]:,} tiles on {multiprocessors} multiprocessors, "
        f"{waves:,} waves",
        changes="memory",
    )


def store(rows: Sequence[Row], *, stored_bytes: int, module: str) -> Remedy | None:
    """Prices a block without checkpointing: the time of its forward's second run (`rows`)."""
    return _remedy(
        name="store instead of recompute",
        ops=tuple(row for row, _ in rows),
        predicted_us=sum(f.time_us for _, f in rows),
        how=f"leave torch.utils.checkpoint out in {module}: {stored_bytes / 1e6:,.0f} MB more",
        changes="memory",
    )


def recompute(rows: Sequence[Row], *, stored_bytes: int) -> Remedy | None:
    """Prices the recomputation of tensors that cost traffic only: they are not written, not read, and computed once more.

    rows: the operators that make them, in the forward; their inputs are read in the backward in any case.
    """
    if not rows:
        return None
    again_us = sum(f.compute_us * f.operation.calls for _, f in rows)
    traffic_us = 2 * stored_bytes / rows[0][1].roofs.bytes_per_s * 1e6
    return _remedy(
        name="recompute instead of store",
        ops=tuple(row for row, _ in rows),
        predicted_us=traffic_us - again_us,
        how=f"torch.utils.checkpoint of {rows[0][1].operation.where or 'these operators'}, compiled: "
        f"{stored_bytes / 1e6:,.0f} MB fewer",
        changes="memory",
    )


def remove_synchronisation(where: str, idle_us: float) -> Remedy | None:
    """Prices a line without its wait: the time in which the device has nothing to do because of it."""
    return _remedy(
        name="remove a synchronisation",
        predicted_us=idle_us,
        how=f"{where}: keep the number on the device, or read it every hundred steps",
        changes="nothing",
    )


def remove_wait(place: HostPlace, idle_us: float, *, is_collective: bool = False) -> Remedy | None:
    """Prices a place at which the host does something else than operators, or waits.

    is_collective: the step has collectives, so that the place may wait for other processes.
    """
    how = "do it before the step or in another process, or leave it out"
    if place.loads == "workers":
        how = "the loader's workers are slower than the step: give them less work for each example, or more cores"
    elif is_collective:
        how = f"if it waits for other processes, send less often (DDP's no_sync, larger batches); else {how}"
    return _remedy(name="remove a wait", predicted_us=idle_us, how=f"{place.words}: {how}", changes="nothing")


def load_beside(place: HostPlace, idle_us: float, *, step_us: float, threads: int, cores: int) -> Remedy | None:
    """Prices workers of a DataLoader that prepare data beside the step, on the cores that there are.

    All the work of the data and of the step's operators shares the cores, so the step takes at least its part of it.

    threads: of the step's operators, 1 if a GPU runs them.
    """
    rest_us = step_us - idle_us
    workers = max(1, min(cores - 1, ceil(idle_us / max(rest_us, 1.0))))
    least_us = max(rest_us, idle_us / workers, (idle_us + rest_us * min(threads, cores)) / cores)
    return _remedy(
        name="load beside the step",
        predicted_us=step_us - least_us if cores > 1 else 0.0,
        how=f"{place.words}: DataLoader(num_workers={workers}), as there are {cores} cores",
        changes="nothing",
    )


def overlap_copy(where: str, *, copy_us: float, busy_us: float) -> Remedy | None:
    """Prices a copy from pinned memory beside the kernels: all of it that they can cover.

    copy_us: the time in which a copy runs and no kernel. busy_us: the kernels' time.
    """
    return _remedy(
        name="pin and overlap a copy",
        predicted_us=min(copy_us, busy_us),
        how=f"{where}: pin_memory=True in the DataLoader, and x.to(device, non_blocking=True) one step ahead",
        changes="memory",
    )


def _remedy(
    *, name: str, ops: tuple[int, ...] = (), predicted_us: float, how: str, changes: str, measured_us: float | None = None
) -> Remedy | None:  # fmt: skip
    if predicted_us <= 0:
        return None
    return Remedy(name=name, ops=ops, predicted_us=predicted_us, measured_us=measured_us, how=how, changes=changes)
