"""The experts' kernels compile for the chips that they are for, without one; no register spills."""

from __future__ import annotations

import re

import pytest
import torch

from tests.grids import swept

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from tests.kernels.newer import NEWER  # noqa: E402
from tests.kernels.test_sampling_compiles import stack  # noqa: E402

# bytes outside of registers
ROOM = 32 if NEWER else 0
WORDS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def compiled(sm: int, dtype: torch.dtype, block_m: int, activation: str, keep: bool, bias: bool):
    """A product as it is launched for tensors that are aligned to 16 bytes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rooftile.moe import kernels
    from rooftile.moe.kernels.products import _product

    sizes = (1408, 2048) if activation == "none" else (2048, 1408)
    constants = dict(kernels._constants(64, *sizes, activation, dtype, sm >= 90, block_m, bias, keep))
    options = {word: constants.pop(word) for word in ("num_warps", "num_stages")}
    pointers = {"from_ptr": "*i64", "to_ptr": "*i64", "ends_ptr": "*i32"}
    signature = {
        name: "constexpr" if name in constants else "i32" if name == "TILES" else pointers.get(name, WORDS[dtype])
        for name in _product.arg_names
    }
    names = list(enumerate(_product.arg_names))
    places = {(n,): constants[name] for n, name in names if name in constants}
    even = {(n,): [["tt.divisibility", 16]] for n, name in names if name.endswith("_ptr")}
    source = ASTSource(_product, signature, places, even)
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


ROWS = (16, 32, 64, 128)
ACTIVATIONS = ("silu", "clamped", "relu2", "none")
GRID = [
    (sm, dtype, rows, activation)
    for sm in (80, 90)
    for dtype in WORDS
    for rows in ROWS
    for activation in ACTIVATIONS
    if rows <= (32 if dtype == torch.float32 else 128)
]


def _traits(case: tuple) -> tuple:
    """`make test` compiles every tile for Hopper in bf16, where it must be fast, and every chip and dtype with some tile."""
    sm, dtype, rows, activation = case
    return (sm == 90 and dtype == torch.bfloat16 and activation in ("silu", "none") and (rows, activation)), (sm, dtype)


@pytest.mark.parametrize(("sm", "dtype", "rows", "activation"), swept(GRID, _traits), ids=str)
def test_products_compile(sm: int, dtype: torch.dtype, rows: int, activation: str) -> None:
    is_clamped = activation == "clamped"
    built = compiled(sm, dtype, rows, activation, activation != "none", is_clamped)
    assert built.metadata.shared <= (227 if sm == 90 else 163) * 1024
    assert stack(built) <= ROOM
    if dtype == torch.bfloat16:
        # products of 16-bit numbers run on the matrix units
        assert re.search(r"wgmma" if sm >= 90 and rows >= 64 else r"mma\.sync|wgmma", built.asm["ptx"])
