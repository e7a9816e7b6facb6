"""The Triton kernel for quantised tensors compiles for the chips that it is for, without one."""

from __future__ import annotations

import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.exact.spec import Spec  # noqa: E402
from rooftile.numerics.precision import PRESETS, Precision  # noqa: E402
from rooftile.numerics.recipe import quantise_qkv  # noqa: E402

WORDS = {torch.float8_e4m3fn: "fp8e4nv", torch.int8: "i8", torch.bfloat16: "bf16"}
# shared memory of a program
LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}


@pytest.mark.parametrize(
    ("sm", "dim", "precision", "instructions"),
    [
        (90, 128, PRESETS["fp8"], "QGMMA"),
        pytest.param(90, 256, PRESETS["int8"], "IGMMA QGMMA", marks=pytest.mark.sweep),
        (89, 64, PRESETS["int8"], "IMMA QMMA"),
        pytest.param(89, 256, PRESETS["fp8"], "QMMA", marks=pytest.mark.sweep),
        (80, 64, Precision(qk="int8", pv="native"), "IMMA HMMA"),
    ],
    ids=str,
)
def test_it_uses_the_chips_matrix_instructions(sm: int, dim: int, precision: Precision, instructions: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rooftile.exact.backends.triton import flash_fwd_8bit

    x = torch.randn(1, 4, 1, dim, dtype=torch.bfloat16)
    qkv = quantise_qkv(x, x, x, precision)
    spec = Spec(dtype=torch.bfloat16, dim=dim, dim_v=dim, scale=1.0, precision=precision, device=f"sm{sm}")
    constants = flash_fwd_8bit._constants(spec, qkv)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    kernel = flash_fwd_8bit._forward
    kinds = {"q_ptr": WORDS[qkv.q.dtype], "k_ptr": WORDS[qkv.k.dtype], "v_ptr": WORDS[qkv.v.dtype], "o_ptr": "bf16"}
    kinds |= dict.fromkeys(("part_q_ptr", "part_k_ptr", "cu_q_ptr", "cu_k_ptr"), "i32")
    signature = {}
    for name in kernel.arg_names:
        number = "fp32" if name in ("scale", "softcap") else "i32"
        pointer = "*" + kinds.get(name, "fp32")
        signature[name] = "constexpr" if name in constants else pointer if name.endswith("_ptr") else number
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(kernel.arg_names) if name.endswith("_ptr")}
    built = triton.compile(ASTSource(kernel, signature, places, aligned), target=GPUTarget("cuda", sm, 32), options=options)
    assert built.metadata.shared <= LIMIT[sm]
    found = set(re.findall(r"wgmma\.mma_async\S*|mma\.sync\S*", built.asm["ptx"]))
    words = {
        "QGMMA": r"wgmma\S*\.e4m3\.e4m3", "IGMMA": r"wgmma\S*\.s32\.s8\.s8", "QMMA": r"mma\.sync\S*\.e4m3\.e4m3",
        "IMMA": r"mma\.sync\S*\.s32\.s8\.s8", "HMMA": r"mma\.sync\S*\.bf16\.bf16",
    }  # fmt: skip
    due = set(instructions.split())
    assert {name for name in due if any(re.search(words[name], text) for text in found)} == due
