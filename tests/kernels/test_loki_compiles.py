"""The kernel that scores pages compiles without a GPU, on matrix instructions, and keeps its numbers in registers."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

POINTERS = {"table_ptr": "i32", "lengths_ptr": "i32", "top_ptr": "fp32", "total_ptr": "fp32"}


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(("group", "r", "size", "capped"), [(4, 32, 16, False), (8, 16, 64, True), (1, 24, 8, False)])
def test_the_kernel_of_a_shape(sm: int, group: int, r: int, size: int, capped: bool) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rooftile.approximate.paged import kernels

    constants: dict[str, Any] = kernels.constants_of(group, r, size, capped)
    warps = constants.pop("num_warps")
    kernel = kernels._page_sums
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else "fp32" if name in ("scale", "softcap") else "i32" for name in names}
    signature |= {name: "*" + POINTERS.get(name, "bf16") for name in names if name.endswith("_ptr")}
    # addresses and strides are multiples of 16 in a cache
    aligned = [n for n, name in enumerate(names) if name.endswith("_ptr") or (name.startswith("k_stride") and r % 16 == 0)]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(place,): [["tt.divisibility", 16]] for place in aligned},
    )  # fmt: skip
    built = triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"num_warps": warps})
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [str(tools / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"STACK:(\d+)", usage)[1] == "0"
    assert built.metadata.shared <= 99 * 1024
    assert "mma.sync" in built.asm["ptx"] or "wgmma" in built.asm["ptx"]
