"""Kernels of fused operations with gradients compile without a GPU, in registers, with loads of 16 bytes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from tests.kernels.test_quantised_products_compile import compiled
from tests.kernels.test_sampling_compiles import stack

FLOATS = dict.fromkeys(("eps", "scale", "smoothing", "softcap", "spread", "z_loss"), "fp32")
FP32 = dict.fromkeys(("dw_ptr", "db_ptr", "losses_ptr", "lse_ptr", "dlosses_ptr"), "*fp32")
WORDS = FLOATS | FP32 | {"rows": "i32", "per_program": "i32", "parts": "i32", "ignore_index": "i32", "target_ptr": "*i64"}


def built(kernel, sm: int, constants: dict):
    strides = {name: "i32" for name in kernel.arg_names if name.endswith("_stride")}
    return compiled(kernel, sm, constants, **WORDS, **strides)


@pytest.mark.parametrize("sm", [80, 90])
def test_rows_of_4096(sm: int) -> None:
    from rooftile.fused.kernels import cross_entropy, gate_up, norm_gradients, softmax

    norm = norm_gradients.constants_of(4096, 2, True, False, True)
    gate, loss = gate_up.constants_of(14336, "silu"), cross_entropy.constants_of(128256, True, SMOOTHED=True)
    for kernel, constants in (
        (norm_gradients._norm_gradients, norm), (norm_gradients._add_parts, norm_gradients.constants_of_adding(4096)),
        (gate_up._gate_up, gate), (gate_up._gate_up_gradients, gate),
        (softmax._softmax, softmax.constants_of(4096, softmax.WHOLE, softmax.LONG_PIECE)),
        (softmax._softmax_gradient, softmax.constants_of(4096, softmax.WHOLE_OF_GRADIENT, softmax.PIECE_OF_GRADIENT)),
        (cross_entropy._cross_entropy, loss),
        (cross_entropy._cross_entropy_gradient, cross_entropy.constants_of(128256, True, PART=True)),
    ):  # fmt: skip
        found = built(kernel, sm, constants)
        assert stack(found) == 0, kernel
        # rows that are on their way; consumer cards have 99 KiB per program
        assert found.metadata.shared <= (72 * 1024 if kernel is norm_gradients._norm_gradients else 16384)
        assert ("cp.async" in found.asm["ptx"]) == (kernel is norm_gradients._norm_gradients)
        assert "ld.global" in found.asm["ptx"]


@pytest.mark.parametrize("size", [16384, 32768, 65536])
def test_long_rows(size: int) -> None:
    from rooftile.fused.kernels import norm, norm_gradients, softmax

    # ptxas writes numbers for which there are no registers to local memory, and reads them again
    assert stack(built(softmax._softmax, 90, softmax.constants_of(size, softmax.WHOLE, softmax.LONG_PIECE))) == 0
    constants = softmax.constants_of(size, softmax.WHOLE_OF_GRADIENT, softmax.PIECE_OF_GRADIENT)
    assert stack(built(softmax._softmax_gradient, 90, constants)) == 0
    if size <= norm_gradients.WHOLE:
        built(norm_gradients._norm_gradients, 90, norm_gradients.constants_of(size, 2, False, False, False))
        return
    summing, adding = norm_gradients.long_constants(size, True, False, True)
    assert stack(built(norm_gradients._long_sums, 90, summing)) == 0
    assert stack(built(norm_gradients._long_gradients, 90, adding)) == 0
    if size > norm.WHOLE:
        strides = {"x_stride_t": "i32", "x_stride_h": "i32"}
        constants = norm.long_constants(1, size, "layer", True, torch.device("cpu"))
        assert stack(compiled(norm._normalise_long, 90, constants, **WORDS, **strides)) == 0


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(("size", "groups", "shared"), [(5120, 1, False), (8192, 8, False), (4096, 32, True), (16384, 1, False)])
def test_gated_norms(size: int, groups: int, shared: bool, sm: int) -> None:
    from rooftile.fused.gated_norm import LONGEST_OF_GRADIENT
    from rooftile.fused.kernels import gated_norm

    for gate_first in (True, False):
        shape = size, groups, gate_first, shared
        for kernel, constants in (
            (gated_norm._gated_norm, gated_norm.forward_constants(*shape, torch.device("cpu"))),
            (gated_norm._gated_norm_gradients, gated_norm.gradient_constants(*shape)),
        )[: 2 if size // groups <= LONGEST_OF_GRADIENT else 1]:
            assert stack(built(kernel, sm, constants)) == 0, kernel
