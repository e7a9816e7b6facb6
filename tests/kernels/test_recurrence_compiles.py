"""The recurrence's kernels compile for the chips that they are for, without one; no register spills."""

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
NAMES = {
    "_segment_sums": "sums", "_outputs": "outputs", "_query_gradients": "queries", "_key_gradients": "keys",
    "_value_gradients": "values",
}  # fmt: skip
IN_DTYPE = {"q_ptr", "k_ptr", "v_ptr", "x_ptr", "y_ptr", "o_ptr", "do_ptr", "dq_ptr", "dx_ptr"}


def compiled(name: str, sm: int, dtype: torch.dtype, dim: int, *, causal: bool = True, group: int = 1, packed: bool = False):
    """A kernel as it is launched for tensors that are aligned to 16 bytes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rooftile.recurrent.linear.kernels import call as kernels
    from rooftile.recurrent.linear.kernels import gradients, outputs, states

    kernel = {
        "_segment_sums": states._segment_sums, "_outputs": outputs._outputs,
        "_query_gradients": gradients._query_gradients, "_key_gradients": gradients._key_or_value_gradients,
        "_value_gradients": gradients._key_or_value_gradients,
    }[name]  # fmt: skip
    own = {"CAUSAL": causal, "NORMALISE": True, "WEIGHTED": group > 1, "FEATURE": "elu", "KEYS": name == "_key_gradients"}
    shape = {"HEADS": 4, "GROUP": group, "D": dim, "DV": dim, "PACKED": packed}
    constants = kernels.tile_of(NAMES[name], dim, dim, dtype, sm >= 90, group > 1) | shape | own
    options = {word: constants.pop(word) for word in ("num_warps", "num_stages")}
    constants = {word: value for word, value in constants.items() if word in kernel.arg_names}
    signature = {}
    for argument in kernel.arg_names:
        pointer = WORDS[dtype] if argument in IN_DTYPE else "*i32" if argument in ("lost_ptr", "cu_ptr") else "*fp32"
        signature[argument] = "constexpr" if argument in constants else pointer if argument.endswith("_ptr") else "i32"
        if argument.endswith("_strides"):
            signature[argument] = ("i32",) * 3
    places = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    names = list(enumerate(kernel.arg_names))
    even: list[tuple[int, ...]] = [(n,) for n, argument in names if argument.endswith("_ptr")]
    even += [(n, axis) for n, argument in names if argument.endswith("_strides") for axis in range(3)]
    source = ASTSource(kernel, signature, places, {place: [["tt.divisibility", 16]] for place in even})
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


CHIPS = [(sm, dtype) for sm in (80, 90) for dtype in WORDS]
GRID = [(name, *chip, dim) for name in NAMES for chip in CHIPS for dim in (64, 128)]


def _traits(case: tuple) -> tuple:
    """`make test` compiles every kernel for Hopper in bf16, where it must be fast, and every chip and dtype with some kernel."""
    name, sm, dtype, dim = case
    return (sm == 90 and dtype == torch.bfloat16 and (name, dim)), (sm, dtype)


@pytest.mark.parametrize(("name", "sm", "dtype", "dim"), swept(GRID, _traits), ids=str)
def test_kernels_compile(name: str, sm: int, dtype: torch.dtype, dim: int) -> None:
    built = compiled(name, sm, dtype, dim)
    assert built.metadata.shared <= (227 if sm == 90 else 163) * 1024
    assert stack(built) <= ROOM
    if dtype == torch.bfloat16:
        # products of 16-bit numbers run on the matrix units
        assert re.search(r"wgmma" if sm >= 90 else r"mma\.sync", built.asm["ptx"])


FORMS = [
    ("_segment_sums", {"group": 4}),
    ("_outputs", {"group": 4, "packed": True}),
    ("_outputs", {"causal": False}),
    ("_query_gradients", {"causal": False}),
    ("_key_gradients", {"group": 4, "packed": True}),
    ("_key_gradients", {"causal": False}),
    ("_value_gradients", {"group": 4, "packed": True}),
    ("_value_gradients", {"causal": False}),
]


@pytest.mark.parametrize(
    ("sm", "name", "options"),
    swept([(sm, *form) for sm in (90, 80) for form in FORMS], lambda case: (case[0] == 90 and str(case), case[:2])),
    ids=str,
)
def test_other_forms_spill_nothing(sm: int, name: str, options: dict) -> None:
    assert stack(compiled(name, sm, torch.bfloat16, 128, **options)) <= ROOM
