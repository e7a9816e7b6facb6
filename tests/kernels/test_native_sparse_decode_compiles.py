"""The decode kernels of Native Sparse Attention compile without a GPU, and keep their loops in registers."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from tests.kernels.test_dependent_launch_compiles import assert_waits  # noqa: E402

FLOATS = ("acc_ptr", "top_ptr", "total_ptr", "sums_ptr", "reference_ptr")
INTEGERS = ("table_ptr", "near_table_ptr", "lengths_ptr", "chosen_ptr")
KINDS = {"fp32": FLOATS, "i32": INTEGERS, "i64": ("words_ptr",)}
SIZES = {"length": 32, "stride": 16, "block_size": 64, "count": 16, "first": 1, "local": 2, "window": 512}
# kernels that have matrix products
PRODUCTS = ("_decode_compressed", "_decode_tokens")


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(
    ("batch", "group", "dim", "dim_v", "size"), [(32, 16, 128, 128, 16), (1, 4, 64, 64, 128), (64, 5, 192, 128, 16)]
)
def test_the_kernels_of_a_shape(sm: int, batch: int, group: int, dim: int, dim_v: int, size: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rooftile.approximate.native_sparse.decoding_kernels import block_choice, compressed, merge, tokens
    from rooftile.approximate.native_sparse.decoding_kernels.shape import shape_of

    q = torch.empty(batch, 4 * group, dim, dtype=torch.bfloat16)
    # kernels wait for each other on a GPU of that kind
    shape = shape_of(q, 4, dim_v, size, **SIZES)._replace(PDL=sm >= 90)
    every: dict[str, Any] = {"SHAPE": shape, "num_warps": 4}
    scored, compared = block_choice.constants_of(shape)
    kernels = {
        compressed._decode_compressed: every, block_choice._score_blocks: scored, block_choice._keep_best: compared,
        tokens._decode_tokens: every, merge._merge_branches: merge.constants_of(shape),
    }  # fmt: skip
    for kernel, constants in kernels.items():
        names, name_of = kernel.arg_names, kernel.fn.__name__
        signature: dict[str, Any] = {}
        for name in names:
            kind = "constexpr" if name in constants else "fp32" if name == "scale" else "i32"
            if name.endswith("strides"):
                signature[name] = ("i32",) * (2 if name == "q_strides" else 3)
            elif name.endswith("_ptr"):
                signature[name] = "*" + next((kind for kind, known in KINDS.items() if name in known), "bf16")
            else:
                signature[name] = kind
        aligned = [(n,) for n, name in enumerate(names) if name.endswith("_ptr") and name not in INTEGERS]
        for n, name in enumerate(names):
            if name.endswith("strides"):
                aligned += [(n, axis) for axis in range(len(signature[name]))]
        source = ASTSource(
            fn=kernel, signature=signature,
            constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
            attrs={place: [["tt.divisibility", 16]] for place in aligned},
        )  # fmt: skip
        built = triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"num_warps": constants["num_warps"]})
        tools = Path(triton.__file__).parent / "backends/nvidia/bin"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            command = [str(tools / "cuobjdump"), "--dump-resource-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        ptx = built.asm["ptx"]
        if shape.PDL:
            assert_waits(ptx)
        assert re.search(r"STACK:(\d+)", usage)[1] == "0", name_of
        # at least two programs to a multiprocessor, unless heads are wide
        most = 160 if dim > 128 else 80 if sm == 80 else 112
        assert built.metadata.shared <= most * 1024, f"{name_of}: {built.metadata.shared}"
        assert (("mma.sync" in ptx) or ("wgmma" in ptx)) == (name_of in PRODUCTS), name_of
        # the next step's keys and values are on their way while a step is computed, where a program has several
        loops = name_of == "_decode_compressed" or (name_of == "_decode_tokens" and shape.EACH > 1)
        assert ("cp.async" in ptx) == loops, name_of
