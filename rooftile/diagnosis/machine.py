"""This machine's ceilings as the roofs of an operator."""

from __future__ import annotations

from dataclasses import replace

import torch

from rooftile.diagnosis.records import OperatorRow
from rooftile.diagnosis.verdicts.roofs import Roofs
from rooftile.diagnosis.watching.compiled import NAMESPACE, TEMPLATE
from rooftile.hardware.ceilings import Ceilings
from rooftile.runtime.devices import capability


def roofs_of(
    operation: OperatorRow, device: torch.device, measured: Ceilings, *, in_tf32: bool | None = None
) -> Roofs:  # fmt: skip
    """The roofs that an operator meets: by the dtype of its numbers, and whether they are products.

    in_tf32: whether fp32 products ran in TF32; None asks the settings of this process.
    """
    name, products = operation.op.split("::")[1], _has_products(operation.op)
    on_gpu = device.type == "cuda"
    dtype = operation.dtype if operation.dtype in measured.matmul_tflops else "fp32"
    # numbers narrower than fp32 are computed in fp32, outside of products
    wide = dtype if dtype == "fp64" else "fp32"
    if products and dtype == "fp32" and on_gpu and (runs_in_tf32(name, device) if in_tf32 is None else in_tf32):
        # the tensor cores of all GPUs that have TF32 are half as fast in it as in bf16
        dtype, measured = "tf32", replace(measured, matmul_tflops={"tf32": measured.matmul_tflops["bf16"] / 2})
    rate = measured.fma_tflops if wide == "fp32" and not products else measured.matmul_tflops[dtype if products else wide]
    return Roofs(
        memory="HBM" if on_gpu else "DRAM", bytes_per_s=measured.copy_gbs * 1e9, cache="L2" if on_gpu else "cache",
        cache_bytes_per_s=measured.cache_gbs * 1e9,
        # integers are computed beside fp32's units, at no higher rate
        arithmetic="tensor" if on_gpu and products and dtype not in ("fp32", "fp64") else wide if operation.dtype else "int",
        flops_per_s=rate * 1e12, special_per_s=measured.special_gops * 1e9,
        fixed_us=(measured.node_us or 0.0) if on_gpu else measured.operator_us,
        launch_us=measured.launch_us if on_gpu else 0.0,
    )  # fmt: skip


def _has_products(op: str) -> bool:
    """Whether an operator multiplies matrices. A generated kernel has the names of its neighbours, and only a template does."""
    name = op.split("::")[1]
    if op.startswith(NAMESPACE):
        return name.startswith(TEMPLATE)
    return any(word in name for word in ("mm", "conv", "attention", "linear", "rnn")) and not name.startswith("convert")


def runs_in_tf32(name: str, device: torch.device) -> bool:
    """Whether PyTorch computes an fp32 product in TF32: convolutions and recurrent layers do unless told otherwise."""
    if capability(device) < (8, 0):
        return False
    kind = "conv" if "conv" in name else "rnn" if "rnn" in name else "matmul"
    if hasattr(torch.backends, "fp32_precision"):
        # the older flags cannot be read once a program has set these
        of = torch.backends.cuda.matmul if kind == "matmul" else getattr(torch.backends.cudnn, kind)
        return bool(of.fp32_precision == "tf32")
    return bool(torch.backends.cuda.matmul.allow_tf32 if kind == "matmul" else torch.backends.cudnn.allow_tf32)
