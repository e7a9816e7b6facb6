"""The sampler's kernels compile for the chips that they are for, without one, and keep what they search in registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.grids import swept

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

WORDS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
INTS = {
    "slots_ptr": "*i64", "positions_ptr": "*i64", "seed_ptr": "*i64", "out_ptr": "*i64", "token_ptr": "*i32", "top_k_ptr": "*i32",
    "counts_ptr": "*i32", "prompted_ptr": "*u8", "masks_ptr": "*i32",
}  # fmt: skip


def compiled(name: str, sm: int, dtype: torch.dtype, aligned: bool, constants: dict[str, object], warps: int):
    """A kernel as it is launched for rows that are aligned to 16 bytes, or not."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rooftile.engine.sampling import sampling_kernels

    kernel = getattr(sampling_kernels, name)
    types = INTS | {"logits_ptr": WORDS[dtype]}
    if name == "_threshold":
        types |= {"x_ptr": WORDS[dtype], "copy_ptr": WORDS[dtype], "out_ptr": "*fp32"}
    signature = {}
    for argument in kernel.arg_names:
        plain = types.get(argument, "*fp32") if argument.endswith("_ptr") else "i32"
        signature[argument] = "constexpr" if argument in constants else plain
    places = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    round_16 = [
        n for n, argument in enumerate(kernel.arg_names)
        if argument.endswith("_ptr") or (aligned and argument in ("V", "logits_stride", "x_stride"))
    ]  # fmt: skip
    source = ASTSource(kernel, signature, places, {(n,): [["tt.divisibility", 16]] for n in round_16})
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def stack(built) -> int:
    """Bytes of a thread that did not fit into its registers."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cubin = Path("/tmp") / f"{built.metadata.hash}.cubin"
    cubin.write_bytes(built.asm["cubin"])
    used = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    cubin.unlink()
    return int(re.findall(r"STACK:(\d+)", used)[-1])


ROWS = [(80, torch.bfloat16, True), (90, torch.float32, True), (90, torch.bfloat16, False), (100, torch.bfloat16, True)]
GRID = [(*rows, changed) for changed in (False, True) for rows in ROWS]


def _traits(case: tuple) -> tuple:
    """`make test` compiles both on Hopper, where the stack is checked, and all kinds of rows."""
    sm, dtype, aligned, changed = case
    return (sm == 90 and changed), (sm, dtype, aligned), (dtype, changed)


@pytest.mark.parametrize(("sm", "dtype", "aligned", "changed"), swept(GRID, _traits), ids=str)
def test_it_compiles(sm: int, dtype: torch.dtype, aligned: bool, changed: bool) -> None:
    kernels = {
        "_draw": ({"CHANGED": changed}, 4), "_join": ({"SEGMENTS": 64}, 4), "_survey": ({"CHANGED": changed}, 4),
        "_threshold": ({}, 16),
    }  # fmt: skip
    for name, (constants, warps) in kernels.items():
        words = torch.float32 if name == "_threshold" and changed else dtype
        built = compiled(name, sm, words, aligned, constants, warps)
        assert built.metadata.shared <= 48 * 1024
        if sm == 90:
            assert stack(built) <= 16, name


def test_penalties_are_rounded_as_the_definition_rounds_them() -> None:
    """No product is fused with a sum: a threshold and what is compared with it come from different kernels."""
    built = compiled("_survey", 90, torch.float32, True, {"CHANGED": True}, 4)
    assert "fma.rn" not in re.sub(r"div\.rn\S*", "", built.asm["ptx"])
    assert "div.rn.f32" in built.asm["ptx"]


def test_a_vocabulary_of_one_compiles() -> None:
    """Triton makes a constant of an argument that is 1."""
    one = {"V": 1, "logits_stride": 1, "CHANGED": True}
    compiled("_draw", 90, torch.float32, False, one, 4)
    compiled("_survey", 90, torch.float32, False, one, 4)
    compiled("_threshold", 90, torch.float32, False, {"x_stride": 1}, 16)
