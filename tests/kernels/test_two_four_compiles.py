"""The kernels of 2:4 weights compile without a GPU: whole words are read and written, and nothing spills."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from tests.kernels.test_sampling_compiles import stack  # noqa: E402

WORDS = {
    "mask_ptr": "*i8", "flag_ptr": "*i32", "places_ptr": "*u8", "x_scales_ptr": "*fp32", "w_scales_ptr": "*fp32",
    "bias_ptr": "*bf16",
}  # fmt: skip
NUMBERS = ("M", "N", "total", "stride", "x_stride", "sixteens")


def compiled(kernel: Any, sm: int, constants: dict[str, Any], **words: str):
    """A kernel as it is launched for aligned tensors whose rows are aligned, too."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(constants)
    options = {"num_warps": constants.pop("num_warps")}
    names = kernel.arg_names
    kinds = WORDS | dict.fromkeys(NUMBERS, "i32") | words
    signature = {name: "constexpr" if name in constants else kinds[name] for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = [n for n, name in enumerate(names) if name.endswith(("_ptr", "stride"))]
    source = ASTSource(kernel, signature, places, {(n,): [["tt.divisibility", 16]] for n in aligned})
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def widths(built: Any, what: str) -> set[str]:
    """How wide the accesses to memory are."""
    return set(re.findall(rf"{what}\.global(?:\.L1\S*)?\.(\S+) ", built.asm["ptx"]))


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("word", ["*i16", "*i32", "*u8"])
def test_masks_and_compression_are_one_pass(word: str, sm: int) -> None:
    from rooftile.weights.two_four import compression_kernels

    tiles, infinite = compression_kernels.tiles_of(4096), {"*i16": 0x7F80, "*i32": 0x7F800000, "*u8": 0x7E}[word]
    built = {
        "mask": compiled(compression_kernels._mask, sm, compression_kernels.tiles_of(4096, infinite), w_ptr=word, o_ptr="*i8"),
        "compress": compiled(compression_kernels._compress, sm, tiles, w_ptr=word, values_ptr=word),
        "dense": compiled(compression_kernels._dense, sm, tiles, values_ptr=word, o_ptr=word),
    }
    for name, one in built.items():
        assert stack(one) == 0, name
        # no access to a single number, but for the places of a group of groups
        assert not widths(one, "ld") & {"b8", "b16"} or name == "dense", (name, widths(one, "ld"))
    # a thread has whole groups: nothing crosses from one to another but the flag, and a mask's bytes beside words of another size
    for name in ("mask", "compress"):
        assert word == "*i32" or built[name].metadata.shared <= 64, name


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("word", ["*bf16", "*fp32", "*u8"])
def test_the_transposable_choice_stays_in_registers(word: str, sm: int) -> None:
    from rooftile.weights.two_four import compression_kernels

    built = compiled(compression_kernels._transposable_mask, sm, compression_kernels.blocks_of(4096), w_ptr=word, o_ptr="*i8")
    assert stack(built) == 0
    assert built.metadata.shared <= 64
    assert not re.search(r"\b(ld|st)\.local", built.asm["ptx"])
    # four rows of a block are four loads
    assert widths(built, "ld") == {{"*bf16": "v2.b32", "*fp32": "v4.b32", "*u8": "b32"}[word]}


@pytest.mark.parametrize("M", [1, 16, 64])
@pytest.mark.parametrize(("N", "K"), [(28672, 4096), (4096, 14336)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_products_of_few_rows(dtype: torch.dtype, N: int, K: int, M: int) -> None:
    from rooftile.weights.two_four.product import few_rows

    is_fp8 = dtype == torch.float8_e4m3fn
    tile = few_rows.tile_of(M, few_rows.SparseProduct(N, K, torch.bfloat16, False), is_fp8, True)
    word, groups = ("*u8", "*i16") if is_fp8 else ("*i16", "*i32")
    o = "*bf16" if tile.SPLITS == 1 else "*fp32"
    constants = few_rows.constants_of(dtype, tile)
    for sm in (80, 90) if not is_fp8 else (90,):
        built = compiled(few_rows._few_rows, sm, constants, x_ptr=word, values_ptr=groups, o_ptr=o)
        assert stack(built) == 0, stack(built)
        assert built.metadata.shared <= 100 * 1024
        assert re.search("wgmma" if sm == 90 else r"mma\.sync", built.asm["ptx"])
        assert "v4.b32" in widths(built, "ld")
        # 64-bit places: N times K passes 2^31
        assert not re.search(r"arith\.muli .*tensor<\d+xi32>", built.asm["ttir"])


@pytest.mark.parametrize("word", ["*bf16", "*fp32", "*i32"])
def test_results_are_transposed_in_whole_words(word: str) -> None:
    from rooftile.weights.two_four.product import transposed

    is_scaled = word != "*bf16"
    for sm in (80, 90):
        built = compiled(
            transposed._transpose, sm, transposed.constants_of(4096, is_scaled, is_scaled), y_ptr=word, o_ptr="*bf16"
        )  # fmt: skip
        assert stack(built) == 0
        assert "v4.b32" in widths(built, "ld")
        assert "v4.b32" in widths(built, "st")
