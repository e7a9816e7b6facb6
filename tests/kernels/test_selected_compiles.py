"""The kernels of attention to chosen blocks compile without a GPU, on matrix instructions, and keep their loops in registers."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.grids import swept

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from tests.kernels.newer import NEWER  # noqa: E402

SHARED = {80: 163 * 1024, 90: 227 * 1024}
POINTERS = {
    **dict.fromkeys(("lse_ptr", "delta_ptr", "rests_ptr", "kept_ptr"), "fp32"),
    **dict.fromkeys(
        (
            "table_ptr",
            "counts_ptr",
            "entries_ptr",
            "pages_ptr",
            "cu_q_ptr",
            "cu_k_ptr",
            "queries_ptr",
            "numbers_ptr",
            "chosen_ptr",
        ),
        "i32",
    ),
    **dict.fromkeys(("starts_ptr", "order_ptr"), "i64"),
}
# bytes outside of registers: the walk that sets NaN aside, and divides the weights of far rows, is part of each kernel
STACK = {"_forward": 128 if NEWER else 64, "_backward_q": 64, "_backward_kv": 640}


def compiled(kernel: Any, constants: Any, warps: int, sm: int, stages: int = 3) -> tuple[int, int, str]:
    """Stack and shared memory in bytes, and the matrix instruction. The constants are by name, or the one called SHAPE."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    constants = constants if isinstance(constants, dict) else {"SHAPE": constants}
    signature: dict[str, Any] = {}
    for name in names:
        kind = "constexpr" if name in constants else "fp32" if name == "scale" else "i32"
        signature[name] = ("i32", "i32") if name.endswith("strides") else kind
        if name.endswith("_ptr"):
            signature[name] = "*" + POINTERS.get(name, "bf16")
    aligned = [(n,) for n, name in enumerate(names) if name.endswith("_ptr")]
    aligned += [(n, axis) for n, name in enumerate(names) if name.endswith("strides") for axis in (0, 1)]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={place: [["tt.divisibility", 16]] for place in aligned},
    )  # fmt: skip
    built = triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"num_warps": warps, "num_stages": stages})
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [str(tools / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    matrix = next((word for word in ("wgmma", "mma.sync") if word in built.asm["ptx"]), "")
    return int(re.search(r"STACK:(\d+)", usage)[1]), built.metadata.shared, matrix


# heads of 192 are those of models for Hopper
@pytest.mark.parametrize(
    ("sm", "heads", "dim", "dim_v"),
    swept(
        [(80, 16, 128, 128), (90, 16, 128, 128), (80, 4, 64, 64), (90, 4, 64, 64), (90, 16, 192, 128)],
        lambda case: (case[0], case[1:]),
    ),
)
def test_the_kernels_of_a_shape(sm: int, heads: int, dim: int, dim_v: int) -> None:
    from rooftile.approximate.native_sparse.selected.kernels import gradients, lists, outputs
    from rooftile.approximate.native_sparse.selected.kernels.shape import launch_of, shape_of
    from rooftile.approximate.native_sparse.selected.tiles import queries_for, queries_of_step

    q, v = torch.empty(1, heads, dim, dtype=torch.bfloat16), torch.empty(1, 1, dim_v, dtype=torch.bfloat16)
    shape = shape_of(q, v, 1, 64, queries_for(heads))
    assert shape.ROWS == 64
    of_step = shape._replace(QUERIES=queries_of_step(heads))
    gives_up = NEWER and (sm, heads) == (80, 4)
    for kernel, each, launch in (
        (outputs._forward, shape, launch_of(shape, outputs.STAGES)),
        (gradients._backward_q, shape, launch_of(shape, gradients.STAGES_Q)),
        (gradients._backward_kv, of_step, gradients.launch_of_kv(of_step)),
    ):
        stack, shared, matrix = compiled(kernel, each, launch.warps, sm, launch.stages)
        assert shared <= SHARED[sm], kernel.__name__
        assert matrix == ("wgmma" if sm == 90 else "mma.sync"), kernel.__name__
        # Ampere's registers are as many, and its matrix instructions need more of them
        fits = stack <= STACK[kernel.__name__] * (4 if sm == 80 or dim > 128 else 1)
        assert fits or (gives_up and kernel is gradients._backward_kv), f"{kernel.__name__}: {stack}"
    if sm == 90:
        union = lists.Union(queries_for(heads), 16, 16, 64)
        assert compiled(lists._unite, {"UNION": union}, 1, sm)[0] == 0
        assert compiled(lists._number, {"COUNT": 16, "BLOCK": 64, "PIECE": lists.PIECE}, 4, sm)[0] == 0
        assert compiled(lists._name, {"PIECE": lists.PIECE}, 4, sm)[0] == 0
    assert compiled(gradients._join_kv, shape, launch_of(shape, gradients.STAGES_KV).warps, sm)[::2] == (0, "")
    if gives_up:
        pytest.skip("with Triton 3.9 ptxas gives dk and dv 32 registers of Ampere's 255, and keeps the rest in memory")


@pytest.mark.parametrize(("sm", "has_lse"), swept([(sm, lse) for sm in (80, 90) for lse in (False, True)], lambda case: case))
def test_the_choice_with_the_papers_sizes(sm: int, has_lse: bool) -> None:
    from rooftile.approximate.native_sparse.selected.kernels import block_choice

    q = torch.empty(1, 64, 128, dtype=torch.bfloat16)
    shape = block_choice.choice_of(q, 4, 4, 32, 16, 64, 16, 1, 2, has_lse)
    assert shape.MOST >= shape.NEW >= 16
    stack, shared, matrix = compiled(block_choice._choose, shape, 8, sm)
    assert shared <= SHARED[sm]
    assert matrix == ("wgmma" if sm == 90 else "mma.sync")
    assert stack == 0
