"""The kernels of attention between gathered rows compile without a GPU, on matrix instructions, with their loops in registers."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from rooftile.approximate.gathered import RowLists, from_hashes, from_members

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from tests.kernels.newer import NEWER  # noqa: E402
from tests.kernels.recorded import accesses, innermost_loops, run  # noqa: E402

SHARED = {80: 163 * 1024, 90: 227 * 1024}
POINTERS = {
    **dict.fromkeys(("lse_ptr", "delta_ptr", "dq_ptr", "dk_ptr", "dv_ptr"), "fp32"),
    **dict.fromkeys(("random_ptr", "score_ptr", "centroid_ptr"), "fp32"),
    **dict.fromkeys(("out_ptr", "rows_ptr", "keys_ptr", "marks_ptr", "lows_ptr", "flags_ptr"), "i32"),
}
# bytes outside of registers: a few numbers at the edges of the loop; Ampere's matrix instructions need more registers
STACK = {90: 128 if NEWER else 64, 80: 224}


def built(kernel: Any, shape: Any, warps: int, sm: int) -> Any:
    """Compiles a kernel for a shape."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    constants = shape if isinstance(shape, dict) else {"SHAPE": shape}
    signature: dict[str, Any] = {}
    for name in names:
        kind = "constexpr" if name in constants else "fp32" if name == "scale" else "i32"
        signature[name] = ("i32",) * 3 if name.endswith("strides") else kind
        if name.endswith("_ptr"):
            signature[name] = "*" + POINTERS.get(name, "bf16")
    aligned = [(n,) for n, name in enumerate(names) if name.endswith("_ptr")]
    aligned += [(n, axis) for n, name in enumerate(names) if name.endswith("strides") for axis in range(3)]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={(names.index(name),): x for name, x in constants.items()},
        attrs={place: [["tt.divisibility", 16]] for place in aligned},
    )  # fmt: skip
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"num_warps": warps, "num_stages": 2})


def compiled(kernel: Any, shape: Any, warps: int, sm: int) -> tuple[int, int, str]:
    """Returns stack and shared memory in bytes, and the matrix instruction."""
    found = built(kernel, shape, warps, sm)
    usage = read(found, "cuobjdump", "--dump-resource-usage")
    matrix = next((word for word in ("wgmma", "mma.sync") if word in found.asm["ptx"]), "")
    return int(re.search(r"STACK:(\d+)", usage)[1]), found.metadata.shared, matrix


def read(found: Any, tool: str, *flags: str) -> str:
    """Returns the words of one of Triton's tools about the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        return run(Path(triton.__file__).parent / "backends/nvidia/bin" / tool, *flags, file.name)


def lists_of(kind: str, width: int) -> RowLists:
    if kind == "lists":
        places = torch.zeros(1, 1, 4, width, dtype=torch.int32)
        return from_members(places, places, True)
    hashes = torch.zeros(1, 4 * width, 1, 2, dtype=torch.int32)
    return from_hashes(hashes, width, True, kind == "window", True)


@pytest.mark.parametrize(
    ("kind", "dim", "sm"),
    [("chunks", 128, 80), ("chunks", 128, 90), ("lists", 64, 80), ("lists", 128, 90), ("window", 128, 90)],
)
def test_the_kernels_of_a_shape(kind: str, dim: int, sm: int) -> None:
    from rooftile.approximate.gathered.kernels import gradients, outputs
    from rooftile.approximate.gathered.kernels.shape import shape_of, warps_of

    x = torch.empty(1, 512, 1, dim, dtype=torch.bfloat16)
    kernels = {"forward": outputs._forward, "dq": gradients._backward_q, "dkdv": gradients._backward_kv}
    for phase, kernel in kernels.items():
        shape = shape_of(x, x, x, lists_of(kind, 128), phase, hopper=sm == 90)
        stack, shared, matrix = compiled(kernel, shape, warps_of(shape), sm)
        assert shared <= SHARED[sm], phase
        assert matrix == ("wgmma" if sm == 90 else "mma.sync"), phase
        assert stack <= STACK[sm], f"{phase}: {stack}"


def test_the_repair_of_a_shape() -> None:
    """It runs for a tile that held a NaN, and may spill."""
    from rooftile.approximate.gathered.kernels import gradients
    from rooftile.approximate.gathered.kernels.shape import shape_of, warps_of

    x = torch.empty(1, 512, 1, 128, dtype=torch.bfloat16)
    shape = shape_of(x, x, x, lists_of("chunks", 128), "dkdv", hopper=True)._replace(REPAIR=True)
    assert compiled(gradients._backward_kv, shape, warps_of(shape), 90)[1] <= SHARED[90]


def test_the_choices() -> None:
    """Sixteen thousand scores of a cluster, 64 centroids, and 128 random vectors per round."""
    from rooftile.approximate.gathered.kernels import grouping

    for kernel, found in (
        (grouping._hash, grouping._hash_constants(128, 128)),
        (grouping._score, grouping._score_constants(128, 64, 2)),
        (grouping._best, grouping._best_constants(16384)),
    ):
        constants = {name: x for name, x in found.items() if not name.startswith("num_")}
        stack, shared, matrix = compiled(kernel, constants, found["num_warps"], 90)
        # ... and the newer Triton twenty words of the best, outside of its loops
        assert stack <= (96 if NEWER and kernel is grouping._best else 64), kernel.__name__
        assert matrix == ("" if kernel is grouping._best else "wgmma"), kernel.__name__
        assert shared <= SHARED[90]
    loops = innermost_loops(read(built(grouping._best, {"BLOCK": 16384}, 16, 90), "nvdisasm", "-c"))
    # exponents, and then bits, are tried in them
    assert len(loops) >= 2
    assert accesses(loops) == 0
