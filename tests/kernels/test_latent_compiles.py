"""The kernels of attention to latents compile for the chips that they are for, without one; no register spills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from tests.kernels.newer import NEWER  # noqa: E402
from tests.kernels.test_sampling_compiles import stack  # noqa: E402

# bytes outside of registers
ROOM = 32 if NEWER else 0
WORDS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
# the shared memory of a program
SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}


def compiled(name: str, sm: int, dtype: torch.dtype, heads: int, whole: bool) -> Any:
    """A kernel as it is launched for DeepSeek's sizes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rooftile.engine.mixers.latent import kernels

    kernel = getattr(kernels, name)
    constants = (
        kernels.merge_constants(512)
        if name == "_merge"
        else kernels.constants_of(heads, 512, 64, 16, kernels.tile_of(heads, dtype, f"sm{sm}"), whole)
    )
    options = {word: constants[word] for word in ("num_warps", "num_stages") if word in constants}
    constants = {word: value for word, value in constants.items() if word in kernel.arg_names}
    words = {
        "table_ptr": "*i32",
        "lengths_ptr": "*i32",
        "lse_ptr": "*fp32",
        "parts_ptr": "*fp32",
        "scale": "fp32",
        "parts": "i32",
    }
    words["table_stride"] = "i32"
    if name == "_decode" and not whole:
        words["o_ptr"] = "*fp32"
    signature: dict[str, Any] = {}
    for argument in kernel.arg_names:
        is_strides = argument.endswith("_strides")
        signature[argument] = (
            "constexpr" if argument in constants else ("i32", "i32") if is_strides else words.get(argument, WORDS[dtype])
        )
    names = list(enumerate(kernel.arg_names))
    even: list[tuple[int, ...]] = [(n,) for n, x in names if x.endswith("_ptr") and x not in ("table_ptr", "lengths_ptr")]
    even += [(n, axis) for n, argument in names if argument.endswith("_strides") for axis in range(2)]
    places = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    source = ASTSource(kernel, signature, places, {place: [["tt.divisibility", 16]] for place in even})
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("sm", "dtype", "heads"),
    [
        (90, torch.bfloat16, 128), (90, torch.bfloat16, 16), (80, torch.bfloat16, 128), (86, torch.bfloat16, 128),
        (86, torch.float32, 128),
    ],
)  # fmt: skip
def test_tokens_are_attended_without_spills(sm: int, dtype: torch.dtype, heads: int, whole: bool) -> None:
    built = compiled("_decode", sm, dtype, heads, whole)
    assert stack(built) <= ROOM
    assert built.metadata.shared <= SHARED[sm]


@pytest.mark.parametrize("dtype", WORDS)
def test_parts_are_merged_without_spills(dtype: torch.dtype) -> None:
    assert stack(compiled("_merge", 90, dtype, 128, False)) <= ROOM
