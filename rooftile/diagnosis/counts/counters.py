"""Compares predicted bytes and FLOPs with the counts of Nsight Compute, and verdicts with what it saw busy.

Each leading operator runs once, alone and with cold caches, in a process of its own under ncu:

    python -m rooftile.diagnosis.counts.counters FILE
"""

from __future__ import annotations

import pickle
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload

from rooftile.diagnosis.counts import ncu
from rooftile.diagnosis.records import Sample

DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
# this counts what the multiprocessors ask of the L2, in sectors of 32 bytes;
# `lts__t_bytes` also counts what its two halves pass to each other
L2, SECTOR = "lts__t_sectors_srcunit_tex.sum", 32
# one of these counts the multiply-adds of the tensor cores, by the dtype of the factors
TENSOR = {
    "bf16": "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
    "fp16": "sm__ops_path_tensor_src_fp16_dst_fp32.sum",
    "fp8": "sm__ops_path_tensor_src_fp8.sum",
}
TIME = "gpu__time_duration.sum"
# the share of the peak rate that main memory, the L2 and the multiprocessors ran at
BUSY = {
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm_percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
}
# the longest operators
MOST = 10
# one of them is the bound by the counters if it is this busy, and by this factor busier than the other
BUSIEST, AHEAD = 40.0, 1.2


def count(samples: Sequence[Sample]) -> tuple[list[dict[str, Any]], list[str]]:
    """Counts the leading operators' bytes and tensor FLOPs.

    Returns a row for each operator that was counted, with what was predicted for one call, and notes on what was not.
    """
    if shutil.which("ncu") is None:
        return [], ["Nsight Compute (ncu) is not on the PATH, so no counter checks the predicted bytes"]
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    known = [sample for sample in samples if isinstance(sample.function, OpOverload)][:MOST]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sample.pt"
        for sample in known:
            call = sample.operation.op, _overload(sample), sample.args, sample.kwargs
            # PyTorch's default protocol does not take memory formats
            torch.save(call, path, pickle_protocol=pickle.DEFAULT_PROTOCOL)
            try:
                rows.append(_counted(sample, path))
            except (RuntimeError, ValueError) as error:
                last = (str(error).splitlines() or [type(error).__name__])[-1]
                reason = "no rights to the GPU's counters" if "ERR_NVGPUCTRPERM" in str(error) else last
                notes.append(f"ncu could not count {sample.operation.op}: {reason}")
    return rows, notes


def busiest(row: Mapping[str, Any]) -> str | None:
    """Returns "memory" or "compute" by what a counted row says was busy; None where neither was clearly busier.

    The L2 counts where neither main memory nor the multiprocessors were busy: it also feeds those, tile after tile.
    """
    memory, compute = row["dram_percent"], row["sm_percent"]
    if max(memory, compute) < BUSIEST:
        memory = max(memory, row["l2_percent"])
    if max(memory, compute) < BUSIEST or max(memory, compute) < AHEAD * min(memory, compute):
        return None
    return "memory" if memory > compute else "compute"


def _counted(sample: Sample, path: Path) -> dict[str, Any]:
    operation = sample.operation
    tensor = [TENSOR[operation.dtype]] if operation.dtype in TENSOR else []
    metrics = (*DRAM, L2, *tensor, TIME, *BUSY.values())
    kernels = ncu.kernels(metrics, __name__, str(path), clocks="none")
    total = sum(kernel[TIME] for kernel in kernels)
    busy = {name: sum(kernel[metric] * kernel[TIME] for kernel in kernels) / total for name, metric in BUSY.items()}
    sums = {metric: sum(kernel[metric] for kernel in kernels) for metric in metrics}
    return {
        "module": operation.module,
        "op": operation.op,
        "phase": operation.phase,
        "bytes": operation.bytes,
        "dram_bytes": sum(sums[metric] for metric in DRAM),
        "l2_bytes": SECTOR * sums[L2],
        "flops": operation.flops,
        "tensor_flops": sums[tensor[0]] if tensor else None,
        "kernels": len(kernels),
        **busy,
    }


def _overload(sample: Sample) -> str:
    return str(getattr(sample.function, "_overloadname", "default"))


def main(path: str) -> None:
    """Runs one recorded operator for the profiler."""
    import rooftile.exact.ops  # noqa: F401 - Rooftile's own operators are known after this

    op, overload, args, kwargs = torch.load(path, weights_only=False)
    namespace, name = op.split("::")
    function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    with torch.no_grad():
        ncu.show_once(lambda: function(*args, **kwargs))


if __name__ == "__main__":
    main(*sys.argv[1:])
