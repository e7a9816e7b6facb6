"""Programs that torch.compile has compiled: their generated kernels are operators, and they stay compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import rooftile as rt
from rooftile.diagnosis.diagnosis import Diagnosis
from rooftile.diagnosis.machine import roofs_of
from rooftile.diagnosis.remedies.alone import only_a_run_tells
from rooftile.diagnosis.watching.compiled import GeneratedKernel, operators_of
from rooftile.diagnosis.watching.watch import Watch
from tests.diagnosis.machine import Work, operation


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256))
    return rt.diagnose(torch.compile(model), torch.randn(1024, 256), backward=True, budget=1)


def test_generated_kernels_have_their_bytes(found: Diagnosis) -> None:
    """gelu and the norm are one kernel: it reads the product, a weight and a bias, and writes the result and two statistics."""
    assert found.program.mode == "compiled"
    (fused,) = [op for op in found.ops if op.op.startswith("inductor::") and op.phase == "forward"]
    assert "gelu" in fused.op
    assert "layer_norm" in fused.op
    rows, columns = 1024, 256
    # the statistics are read again where they were written
    assert fused.bytes == 4 * (2 * rows * columns + 2 * columns + 4 * rows)
    assert fused.flops == (8 + 8) * rows * columns
    assert fused.time_us > 0
    assert not any(op.op in ("aten::gelu", "aten::native_layer_norm") for op in found.ops)


def test_products_of_a_compiled_program_are_counted_as_ever(found: Diagnosis) -> None:
    assert sum(op.flops or 0 for op in found.ops if "mm" in op.op) == 5 * 2 * 1024 * 256 * 256
    assert all(op.where == "" or "torchinductor" not in op.where for op in found.ops)
    assert {op.phase for op in found.ops} == {"forward", "backward"}


def test_a_compiled_program_is_not_told_to_compile(found: Diagnosis) -> None:
    assert not any(remedy.name == "compile" for remedy in found.remedies)


@pytest.mark.parametrize(
    ("name", "products"),
    [("inductor::cpp_fused_convolution_relu_0", False), ("inductor::triton_poi_fused_convert_element_type_1", False),
     ("inductor::cpp_fused_native_batch_norm_2", False), ("inductor::triton_tem_fused_mm_3", True), ("aten::convolution", True),
     ("prims::convert_element_type", False)],
)  # fmt: skip
def test_a_generated_kernel_is_no_product_because_its_name_has_one(name: str, products: bool) -> None:
    """It is under the roof of arithmetic outside of products, and is never run on tensors of another dtype."""
    ceilings = SimpleNamespace(
        matmul_tflops={"fp32": 3.0}, fma_tflops=1.0, special_gops=1.0, copy_gbs=1.0, cache_gbs=1.0, operator_us=1.0
    )
    given = operation(Work(bytes=8, flops=8), op=name)
    assert roofs_of(given, torch.device("cpu"), ceilings).flops_per_s == (3e12 if products else 1e12)
    assert only_a_run_tells(name) == name.startswith("aten::")
    assert roofs_of(replace(given, dtype=""), torch.device("cpu"), ceilings).arithmetic == "int"


def test_a_kernel_of_a_template_is_not_counted_as_nothing() -> None:
    kernel = GeneratedKernel("triton_tem_fused_mm_0", lambda *unused: None, ("in", "in", "out"))
    assert kernel.arithmetic([torch.ones(2, 2)] * 3) == (None, None)


def test_a_compiled_program_stays_compiled() -> None:
    runs = 0

    def backend(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Tensor) -> Any:
            nonlocal runs
            runs += 1
            return graph(*args)

        return run

    step = torch.compile(lambda x: (x * 2).cos() + 1, backend=backend)
    x = torch.randn(64)
    rt.diagnose(step, x, budget=0.2)
    before = runs
    step(x)
    assert runs == before + 1


def test_kernels_are_put_back_when_the_step_fails() -> None:
    function = torch.compile(lambda x: (x * 3).sin() + 1)
    x = torch.randn(100)
    expected = function(x)

    def failing() -> None:
        with Watch():
            function(x)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        failing()
    with Watch() as watch:
        result = function(x)
    assert torch.equal(result, expected)
    (operation,) = watch.operations
    assert operation.op.startswith("inductor::cpp_fused")
    assert operation.bytes == 800


@pytest.mark.parametrize(
    ("name", "operators"),
    [
        ("cpp_fused_gelu_native_layer_norm_0", ["gelu", "native_layer_norm"]),
        ("triton_poi_fused_add_mul_silu_backward_3", ["add", "mul", "silu_backward"]),
        ("triton_red_fused__softmax_12", ["_softmax"]),
        ("triton_poi_fused_view_clone_0", []),
    ],
)
def test_the_operators_in_a_kernels_name(name: str, operators: list[str]) -> None:
    assert operators_of(name) == operators
