"""The kernels of the measured rates compile without a GPU, and no compiler removes their arithmetic."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")


@pytest.mark.parametrize(("name", "instruction"), [("multiply_adds_kernel", "fma.rn.f32"), ("exponentials_kernel", "ex2.approx")])
def test_every_step_of_the_chain_is_computed(name: str, instruction: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rooftile.hardware import arithmetic_kernels

    signature = {"x": "*fp32", "y": "*fp32", "REPEATS": "constexpr", "BLOCK": "constexpr"}
    source = ASTSource(getattr(arithmetic_kernels, name), signature, {(2,): 512, (3,): 1024})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    # 1,024 numbers over 128 threads: eight chains per thread, in a loop or unrolled
    assert ptx.count(instruction) >= 8
    assert "bra" in ptx or ptx.count(instruction) == 8 * 512
