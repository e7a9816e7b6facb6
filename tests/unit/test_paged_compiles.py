"""The Triton kernels for a paged cache compile for the chips that they are for, without one, and keep their rows in registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.masks import CAUSAL, FULL, Mask, Window  # noqa: E402
from rooftile.spec import Spec  # noqa: E402

# shared memory of a program
LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
WORDS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@pytest.mark.parametrize(
    ("sm", "dim", "group", "T", "mask", "dtype"),
    [
        (90, 128, 4, 1, CAUSAL, torch.bfloat16),
        (90, 64, 4, 0, CAUSAL, torch.bfloat16),
        (80, 128, 8, 1, CAUSAL & Window(1024), torch.bfloat16),
        (89, 256, 1, 0, FULL, torch.bfloat16),
        (100, 80, 71, 1, CAUSAL, torch.bfloat16),
        (90, 128, 1, 0, CAUSAL, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("split", [False, True])
def test_it_compiles(sm: int, dim: int, group: int, T: int, mask: Mask, dtype: torch.dtype, split: bool) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rooftile.backends.triton import paged_fwd

    spec = Spec(dtype=dtype, dim=dim, dim_v=dim, group=group, mask=mask, scale=1.0, layout="paged", device=f"sm{sm}")
    constants = paged_fwd._constants(spec, T == 0, 16, T) | {"SPLIT": split}
    warps = constants.pop("num_warps")
    kernels = {paged_fwd._forward: constants}
    if split:
        kernels[paged_fwd._join] = {name: value for name, value in constants.items() if name in paged_fwd._join.arg_names}
    ints = dict.fromkeys(("table_ptr", "lengths_ptr", "cu_q_ptr"), "*i32")
    tensors = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), f"*{WORDS[dtype]}") | ints
    for kernel, known in kernels.items():
        signature = {}
        for name in kernel.arg_names:
            number = "fp32" if name in ("scale", "softcap") else "i32"
            plain = tensors.get(name, "*fp32") if name.endswith("_ptr") else number
            signature[name] = "constexpr" if name in known else plain
        places = {(kernel.arg_names.index(name),): value for name, value in known.items()}
        aligned = [n for n, name in enumerate(kernel.arg_names) if name.endswith("_ptr") or "_stride_" in name]
        source = ASTSource(kernel, signature, places, {(n,): [["tt.divisibility", 16]] for n in aligned})
        built = triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"num_warps": warps})
        assert built.metadata.shared <= LIMIT[sm]
        if sm == 90 and dtype == torch.bfloat16:
            tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
            cubin = Path("/tmp") / f"{built.metadata.hash}.cubin"
            cubin.write_bytes(built.asm["cubin"])
            used = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
            cubin.unlink()
            assert int(re.findall(r"STACK:(\d+)", used)[-1]) <= 16, used
