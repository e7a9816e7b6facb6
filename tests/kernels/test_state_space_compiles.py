"""The kernels of Mamba-2's recurrence compile for the chips that they are for, without one; no register spills."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.grids import swept

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from tests.kernels.newer import NEWER  # noqa: E402
from tests.kernels.test_sampling_compiles import stack  # noqa: E402

# bytes outside of registers
ROOM = 32 if NEWER else 0
WORDS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
IN_DTYPE = {
    *("x_ptr", "b_ptr", "c_ptr", "z_ptr", "y_ptr", "dt_ptr", "dy_ptr", "dx_ptr", "dz_ptr", "g_ptr", "v_ptr", "rows_ptr"),
    *("db_ptr", "dc_ptr", "d_dt_ptr"),
}
# tensors that pass from kernel to kernel: in bf16 for bf16
KEPT = {"cb_ptr", "kept_ptr", "state_ptr", "back_ptr"}
# tensors that the copy engine reads or writes, and what has a box of tokens and columns of a head, or of numbers of a state
VALUES, ROWS, STATES = {"x_ptr", "g_ptr", "v_ptr", "y_ptr"}, {"b_ptr", "c_ptr", "rows_ptr"}, {"kept_ptr", "state_ptr", "back_ptr"}
STRIDED = {f"{name}_strides" for name in ("x", "b", "c", "z", "g", "v", "rows")}
NAMES = ("_steps", "_products", "_segment_sums", "_scan", "_outputs")
BACKWARD = ("_segment_sums", "_chunk_states", "_input_gradients", "_map_gradients", "_map_sums", "_step_gradients")


def compiled(
    name: str, sm: int, dtype: torch.dtype, P: int, N: int, gated: bool = True, back: bool = False, ones: bool = False,
    copies: bool = False, end: bool = False,
) -> Any:  # fmt: skip
    """A kernel as it is launched for tensors that are aligned to 16 bytes; `ones` for the numbers that Triton specialises on.

    With `copies` the first tensors are descriptors.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rooftile.recurrent.kernels.state_space import backward_pass, call, forward_pass, gate

    places = [*vars(call).values(), *vars(forward_pass).values(), *vars(backward_pass).values(), *vars(gate).values()]
    kernel = next(x.fn for x in places if isinstance(x, call.Kernel) and x.name == name)
    constants: dict[str, Any] = call.constants_of(P, N, dtype, sm >= 90, 8, 2, False, back, copies, GATED=gated and not back)
    tile = call.tile_of(N, dtype, sm >= 90, back, copies)
    constants = constants | {
        "GROUPS": 2, "SIZE": P * N, "SOFTPLUS": True, "BIAS": True, "SKIP": True, "WHOLE": False, "BACK": back, "END": end,
        "SPAN": 4, "SPANS": 2, "PARTS": 1, "PARTS_N": 1, "THROUGH_ROWS": False, "STRIPES": tile.block // tile.rows if back else 1,
    }  # fmt: skip
    if name in ("_input_gradients", "_map_gradients", "_map_sums"):
        constants |= backward_pass.constants_of_sums(tile, N, name)
    if name == "_scan":
        constants = constants | {"BLOCK": call._SCANNED, "AHEAD": call.AHEAD}
    if name == "_gate_gradients":
        constants = constants | gate._CONSTANTS
    options = {word: constants[word] for word in ("num_warps", "num_stages")}
    if ones:
        free = {*kernel.do_not_specialize, "low", "high"}
        numbers = [word for word in kernel.arg_names if word.islower() and not word.endswith(("_ptr", "_strides"))]
        constants = constants | dict.fromkeys((word for word in numbers if word not in free), 1)
    given, constants = constants, {word: value for word, value in constants.items() if word in kernel.arg_names}
    signature: dict[str, Any] = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument.endswith("_strides"):
            signature[argument] = ("i32",) * (2 if argument == "d_strides" else 3)
        elif argument in ("low", "high"):
            signature[argument] = "fp32"
        elif copies and "COPIES" in kernel.arg_names and argument in VALUES | ROWS | STATES:
            numbers = constants.get("BLOCK_S", given["BLOCK_N"])
            columns = numbers if argument in ROWS else given["BLOCK_P"]
            box = (1, 1, columns, numbers) if argument in STATES else (1, 1, constants["BLOCK"], columns)
            signature[argument] = f"tensordesc<bf16[{', '.join(map(str, box))}]>"
        elif not argument.endswith("_ptr"):
            signature[argument] = "i32"
        elif argument == "cu_ptr":
            signature[argument] = "*i32"
        elif argument in KEPT:
            signature[argument] = "*bf16" if dtype == torch.bfloat16 else "*fp32"
        else:
            signature[argument] = WORDS[dtype] if argument in IN_DTYPE else "*fp32"
    names = list(enumerate(kernel.arg_names))
    even: list[tuple[int, ...]] = [(n,) for n, argument in names if signature[argument][0] == "*"]
    even += [(n, axis) for n, argument in names if argument in STRIDED for axis in range(3)]
    at = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    source = ASTSource(kernel, signature, at, {place: [["tt.divisibility", 16]] for place in even})
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


SIZES = ((64, 128), (128, 64), (64, 256), (32, 16))
GRID = [
    (name, sm, dtype, size) for name in NAMES for sm in (80, 90) for dtype in WORDS for size in SIZES
    if size[1] <= 128 or dtype != torch.float32
]  # fmt: skip


def _traits(case: tuple) -> tuple:
    """`make test` compiles every kernel for Hopper in bf16 at Mamba-2's sizes, and every chip, dtype and size with one."""
    name, sm, dtype, size = case
    return (sm == 90 and dtype == torch.bfloat16 and size == SIZES[0] and name), (name == "_outputs" and sm, dtype), size


@pytest.mark.parametrize(("name", "sm", "dtype", "size"), swept(GRID, _traits), ids=str)
def test_compiles_without_spills(name: str, sm: int, dtype: torch.dtype, size: tuple[int, int]) -> None:
    kernel = compiled(name, sm, dtype, *size)
    assert stack(kernel) <= ROOM
    assert re.search(r"mma|MMA", kernel.asm["ptx"]) or name in ("_steps", "_scan")


def test_the_outputs_of_mamba2_without_a_gate_spill_nothing() -> None:
    assert stack(compiled("_outputs", 90, torch.bfloat16, 64, 128, gated=False)) <= ROOM


BACKWARD_GRID = [
    (name, sm, dtype, size) for name in BACKWARD for sm in (80, 90) for dtype in WORDS for size in SIZES
    if size[1] <= 128 or dtype != torch.float32
]  # fmt: skip


def _backward_traits(case: tuple) -> tuple:
    name, sm, dtype, size = case
    return (sm == 90 and dtype == torch.bfloat16 and size == SIZES[0] and name), (name == "_input_gradients" and sm, dtype), size


# bytes outside of registers, for Hopper in bf16 at Mamba-2's sizes: with more of its registers a faster kernel than one without
SPILLED = {"_input_gradients": 216, "_map_gradients": 24}


@pytest.mark.parametrize(("name", "sm", "dtype", "size"), swept(BACKWARD_GRID, _backward_traits), ids=str)
def test_the_backward_compiles_without_spills(name: str, sm: int, dtype: torch.dtype, size: tuple[int, int]) -> None:
    kernel = compiled(name, sm, dtype, *size, back=True)
    # two numbers of a thread: what spills nothing is slower
    room = SPILLED.get(name, 8) if (sm, dtype) == (90, torch.bfloat16) and size[1] <= 128 else 8
    assert stack(kernel) <= max(ROOM, room)
    assert kernel.metadata.shared <= (99 if sm == 80 else 227) * 1024


COPYING = [(name, size) for name in ("_segment_sums", "_outputs", *BACKWARD[1:4]) for size in ((64, 128), (128, 64), (32, 16))]


@pytest.mark.parametrize(("name", "size"), swept(COPYING, lambda case: (case[0], case[1])), ids=str)
def test_tiles_come_by_the_copy_engine(name: str, size: tuple[int, int]) -> None:
    kernel = compiled(name, 90, torch.bfloat16, *size, gated=False, back=name in BACKWARD[1:], copies=True)
    assert "cp.async.bulk.tensor" in kernel.asm["ptx"]
    assert stack(kernel) <= max(ROOM, 240 if name == "_input_gradients" else 0)
    assert kernel.metadata.shared <= 227 * 1024


@pytest.mark.parametrize(("name", "back"), [("_segment_sums", True), ("_segment_sums", False), ("_scan", False)])
def test_states_at_the_end_of_tokens_compile(name: str, back: bool) -> None:
    copies = name == "_segment_sums"
    assert stack(compiled(name, 90, torch.bfloat16, 64, 128, gated=False, back=back, copies=copies, end=True)) <= ROOM


def test_the_gates_gradient_compiles() -> None:
    assert stack(compiled("_gate_gradients", 80, torch.bfloat16, 64, 128)) == 0


@pytest.mark.parametrize("name", sorted({*NAMES, *BACKWARD}))
def test_one_sequence_of_one_chunk(name: str) -> None:
    """Triton makes constants of numbers that are 1, which have no methods."""
    assert compiled(name, 90, torch.bfloat16, 64, 128, back=name in BACKWARD, ones=True).asm["cubin"]
