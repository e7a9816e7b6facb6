"""A small trace of a GPU, written by hand: its gaps, kernels and counts are known by arithmetic. Times are in µs.

    host    900 launches a kernel of step 3; 1,030 addmm; 1,090 .item() waits until 1,410; 1,500 gelu; 1,530 add;
            1,630 a copy to the GPU; 1,650 mul, in the optimiser; 1,900 sum, in the backward
    device  950-1,100 step 3's | 1,100-1,400 addmm | 1,400-1,410 the number | 1,510-1,560 gelu | 1,600-1,620 add
            | 1,640-1,740 the copy | 1,740-1,760 mul | 1,905-1,950 sum

Step 4 is 1,000 to 2,000 on the host, and 1,100 to 2,000 on the device.
"""

from __future__ import annotations

from typing import Any

H100 = {
    "id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85_000_000_000, "computeMajor": 9, "computeMinor": 0,
    "numSms": 132,
}  # fmt: skip
MAIN, AUTOGRAD = 11, 12


def event(category: str, name: str, start: float, us: float, tid: int = MAIN, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": us, "args": args}


def operator(
    name: str, start: float, us: float, number: int, dims: Any = (), types: Any = (), concrete: Any = (), tid: int = MAIN
) -> dict[str, Any]:
    strides = [[*(int(n) for n in row_major(size))] for size in dims]
    inputs = {"Input Dims": list(dims), "Input type": list(types), "Input Strides": strides, "Concrete Inputs": list(concrete)}
    return event("cpu_op", name, start, us, tid, **{"External id": number}, **(inputs if dims else {}))


def row_major(size: list[int]) -> list[int]:
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= n
    return strides[::-1]


def launch(start: float, number: int, correlation: int, name: str = "cudaLaunchKernel", us: float = 4, tid: int = MAIN) -> Any:
    return event("cuda_runtime", name, start, us, tid, correlation=correlation, **{"External id": number})


def kernel(name: str, start: float, us: float, number: int, correlation: int, category: str = "kernel", device: int = 0) -> Any:
    return event(category, name, start, us, 7, correlation=correlation, device=device, stream=7, **{"External id": number})


WIDE, BF16 = [4096, 4096], "c10::BFloat16"


def events() -> list[dict[str, Any]]:
    """The events, in no order."""
    return [
        event("user_annotation", "ProfilerStep#3", 0, 1000), event("user_annotation", "ProfilerStep#4", 1000, 1000),
        event("python_function", "train.py(30): train_step", 0, 2000),
        operator("aten::relu", 890, 20, 9, [WIDE], [BF16], [""]), launch(900, 9, 100), kernel("relu", 950, 150, 9, 100),
        # a linear layer is made of others; the products begin late, and without a gap
        event("python_function", "nn.Module: Linear_0", 1005, 70),
        operator("aten::linear", 1010, 60, 10),
        operator("aten::addmm", 1020, 40, 11, [[4096], [4096, 8192], [8192, 4096], [], []], [BF16] * 3 + ["Scalar"] * 2,
                 ["", "", "", "1", "1"]),
        launch(1030, 11, 101), kernel("sm90_gemm_bf16", 1100, 300, 11, 101),
        # the host waits for a number
        operator("aten::item", 1080, 335, 12, [[]], [BF16], [""]),
        operator("aten::_local_scalar_dense", 1082, 330, 13, [[]], [BF16], [""]),
        launch(1090, 13, 102, "cudaMemcpyAsync"), kernel("Memcpy DtoH (Device -> Pageable)", 1400, 10, 13, 102, "gpu_memcpy"),
        launch(1095, 13, 103, "cudaStreamSynchronize", 315),
        operator("aten::gelu", 1495, 20, 14, [WIDE, []], [BF16, ""], ["", ""]),
        launch(1500, 14, 104), kernel("gelu", 1510, 50, 14, 104),
        # asked for in time, and late
        operator("aten::add", 1525, 15, 15, [WIDE, WIDE, []], [BF16, BF16, "Scalar"], ["", "", "1"]),
        launch(1530, 15, 105), kernel("add", 1600, 20, 15, 105),
        operator("aten::copy_", 1625, 15, 16, [[1000], [1000], []], ["float", "float", "Scalar"], ["", "", "False"]),
        launch(1630, 16, 106, "cudaMemcpyAsync"), kernel("Memcpy HtoD (Pageable -> Device)", 1640, 100, 16, 106, "gpu_memcpy"),
        event("user_annotation", "Optimizer.step#AdamW.step", 1642, 30),
        operator("aten::mul", 1645, 15, 17, [WIDE, WIDE], [BF16, BF16], ["", ""]),
        launch(1650, 17, 107), kernel("mul", 1740, 20, 17, 107),
        # without shapes, as of a profile that recorded none
        event("cpu_op", "autograd::engine::evaluate_function: SumBackward0", 1890, 40, AUTOGRAD, **{"Sequence number": 3}),
        operator("aten::sum", 1895, 20, 18, tid=AUTOGRAD), launch(1900, 18, 108, tid=AUTOGRAD), kernel("sum", 1905, 45, 18, 108),
    ]  # fmt: skip


def trace(**others: Any) -> dict[str, Any]:
    """The trace as its file has it."""
    return {
        "schemaVersion": 1, "deviceProperties": [H100], "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
        "host_name": "elsewhere", "traceEvents": events(),
    } | others  # fmt: skip
