"""The kernels that score and choose pages compile without a GPU, and keep their numbers in registers."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from tests.kernels.newer import NEWER  # noqa: E402

CPU = torch.device("cpu")
POINTERS = dict.fromkeys(("table_ptr", "lengths_ptr", "count_ptr", "pages_ptr", "out_ptr"), "i32")
POINTERS |= dict.fromkeys(("top_ptr", "total_ptr", "score_ptr"), "fp32")


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(("group", "r", "size", "capped"), [(4, 32, 16, False), (8, 16, 64, True), (1, 24, 8, False)])
def test_scoring(sm: int, group: int, r: int, size: int, capped: bool) -> None:
    from rooftile.approximate.loki import decoding_kernels as kernels

    ptx = compiled(kernels._page_sums, sm, kernels.constants_of(group, r, size, capped, CPU), aligned=r % 16 == 0)
    # on matrix instructions
    assert "mma.sync" in ptx or "wgmma" in ptx


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("pages", [64, 8192, 16384])
def test_choosing(sm: int, pages: int) -> None:
    from rooftile.approximate.loki import decoding_kernels as kernels

    assert pages <= kernels.MOST_PAGES
    # the newer Triton keeps a few words outside of the loops that search
    room = 48 if NEWER and pages == 16384 else 0
    compiled(kernels._choose, sm, kernels.chooses(pages, CPU), room=room)


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("group", [1, 4, 17])
def test_sharing(sm: int, group: int) -> None:
    from rooftile.approximate.loki import decoding_kernels as kernels

    compiled(kernels._page_shares, sm, kernels.shares_of(group, CPU))


def compiled(kernel: Any, sm: int, constants: dict[str, Any], *, aligned: bool = True, room: int = 0) -> str:
    """Compiles a kernel, checks that it fits with `room` bytes of stack, and returns its PTX.

    Addresses are multiples of 16, and strides if `aligned`.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(constants)
    warps = constants.pop("num_warps")
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else "fp32" if name in ("scale", "softcap") else "i32" for name in names}
    signature |= {name: "*" + POINTERS.get(name, "bf16") for name in names if name.endswith("_ptr")}
    even = [n for n, name in enumerate(names) if name.endswith("_ptr") or (name.startswith("k_stride") and aligned)]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(place,): [["tt.divisibility", 16]] for place in even},
    )  # fmt: skip
    built = triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"num_warps": warps})
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [str(tools / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # ptxas finds a word or two too few on Ampere
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= max(room, 16 if sm == 80 else 0)
    assert built.metadata.shared <= 99 * 1024
    return built.asm["ptx"]
