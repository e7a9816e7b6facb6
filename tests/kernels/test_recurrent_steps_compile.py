"""The kernels of the convolution, of the selective scan and of the steps compile for their chips; no register spills."""

from __future__ import annotations

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
IN_FP32 = {"first_ptr", "g_ptr", "A_ptr", "D_ptr", "bias_ptr", "weight_ptr", "part_ptr", "total_ptr"} | {
    f"{name}_ptr" for name in ("rates", "adjoint", "starts", "sums", "dA", "dD", "dbias")
}
# B and C too, where a thread walks tokens
BY_TOKENS = ("_chunk_states", "_chunk_adjoints", "_outputs", "_wide_outputs", "_gradients", "_wide_gradients")
# the numbers of strides that are a tuple, with the last one 1
RANKS = {
    "_ssd_step": {"state": 4, "D": 2, "dt": 2},
    "_conv_step": {"x": 2},
    "_scan_step": {"x": 2, "dt": 2, "B": 2, "C": 2, "z": 2},
}


def kernels() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Each kernel by name, with the constants of a launch of a model's size."""
    from rooftile.recurrent.kernels import convolution, convolution_gradients, selective, state_space_step
    from rooftile.recurrent.kernels.selective import call

    conv: dict[str, Any] = {"SILU": True, "HAS_BIAS": True}
    steps = {"SOFTPLUS": True, "HAS_BIAS": True}

    def scan(N: int = 16, **own: int) -> dict[str, Any]:
        return call.by_tokens(5120, N, **own)

    both = {"HAS_D": True, "HAS_Z": True}

    return {
        "_conv": (convolution._conv, convolution.walk_constants(5376, 4, 128, True, True, False)),
        "_packed_conv": (convolution._conv, convolution.walk_constants(5376, 8, 128, True, True, True)),
        "_last_inputs": (convolution._last_inputs, convolution.constants_of(5376, 4, PACKED=True)),
        "_conv_step": (convolution._conv_step, convolution.constants_of(5376, 4, HAS_SLOTS=True, PDL=False, **conv)),
        "_ssd_step": (
            state_space_step._ssd_step,
            state_space_step.constants_of(80, 64, 128, 1, torch.device("cpu"), *[True] * 6),
        ),
        "_conv_gradients": (convolution_gradients._gradients, convolution.walk_constants(5376, 4, 128, True, True, False, True)),
        "_packed_conv_gradients": (
            convolution_gradients._gradients,
            convolution.walk_constants(5376, 8, 128, True, True, True, True),
        ),
        "_tail_gradients": (
            convolution_gradients._tail_gradients,
            convolution.walk_constants(5376, 4, 128, True, True, True, True),
        ),
        "_chunk_states": (call._chunk_states, scan(PACKED=True, **steps)),
        "_chunk_adjoints": (call._chunk_adjoints, scan(PACKED=True, TOKENS=call._TOKENS, TOTAL=True, HAS_Z=True, **steps)),
        "_scan": (
            call._scan,
            call.constants_of(5120, 16, 128, 4, CHUNK=call.CHUNK, HAS_FIRST=True, REVERSE=True, PACKED=True),
        ),
        "_outputs": (selective._outputs, scan(PACKED=True, **both, **steps)),
        "_wide_outputs": (selective._outputs, scan(32, PACKED=False, **both, **steps)),
        "_gradients": (selective._gradients, scan(PACKED=True, TOKENS=call.tokens_of_gradients(16), **both, **steps)),
        "_wide_gradients": (
            selective._gradients,
            scan(32, PACKED=False, TOKENS=call.tokens_of_gradients(32), **both, **steps),
        ),
        "_scan_step": (
            selective._scan_step,
            call.constants_of(5120, 16, 128, 4, BLOCK_N=16, HAS_SLOTS=True, **both, **steps),
        ),
    }


NAMES = [
    "_conv_gradients",
    "_packed_conv_gradients",
    "_tail_gradients",
    "_conv",
    "_packed_conv",
    "_last_inputs",
    "_conv_step",
    "_ssd_step",
    "_chunk_states",
    "_chunk_adjoints",
    "_scan",
    "_outputs",
    "_wide_outputs",
    "_gradients",
    "_wide_gradients",
    "_scan_step",
]


def compiled(name: str, sm: int, dtype: torch.dtype, state: torch.dtype, **own: bool) -> Any:
    """A kernel as it is launched for tensors that are aligned to 16 bytes, whose last axis is in one piece."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, constants = kernels()[name]
    constants = constants | own
    options = {word: constants[word] for word in ("num_warps",)}
    places = {(kernel.arg_names.index(word),): value for word, value in constants.items() if word in kernel.arg_names}
    signature: dict[str, Any] = {}
    even: list[tuple[int, ...]] = []
    for n, argument in enumerate(kernel.arg_names):
        stem = argument.rsplit("_", 1)[0]
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument.endswith("_ptr"):
            fp32 = WORDS[state] if argument == "state_ptr" else WORDS[dtype]
            wide = argument in IN_FP32 or (name in BY_TOKENS and argument in ("B_ptr", "C_ptr"))
            signature[argument] = "*fp32" if wide else {"cu_ptr": "*i32", "slots_ptr": "*i64"}.get(argument, fp32)
            even.append((n,))
        elif argument.endswith("_strides"):
            rank = RANKS.get(name, {}).get(stem, 3 if "step" in name else 2)
            whole = ("step" in name and stem not in ("D", "dt")) or name == "_scan_step"
            signature[argument] = ("i32",) * (rank - whole) + ("constexpr",) * whole
            if whole:
                places[(n, rank - 1)] = 1
            even += [(n, axis) for axis in range(rank - whole)]
        else:
            signature[argument] = "fp32" if argument in ("low", "high") else "i32"
    source = ASTSource(kernel, signature, places, {place: [["tt.divisibility", 16]] for place in even})
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


GRID = [
    (name, sm, dtype, state)
    for name in NAMES for sm in (80, 90) for dtype in WORDS for state in dict.fromkeys((torch.float32, dtype))
]  # fmt: skip


def _traits(case: tuple) -> tuple:
    """`make test` compiles every kernel for each chip, in 16 bits and in fp32, and every dtype with some kernel."""
    name, sm, dtype, state = case
    return (sm, name), (name, dtype == torch.float32), (sm, dtype), (name == "_ssd_step" and (dtype, state))


@pytest.mark.parametrize(("name", "sm", "dtype", "state"), swept(GRID, _traits), ids=str)
def test_kernels_compile_and_spill_nothing(name: str, sm: int, dtype: torch.dtype, state: torch.dtype) -> None:
    built = compiled(name, sm, dtype, state)
    # a thread of the scan's gradients holds five states of its channel, and two of 32 numbers, beside rates and sums of as many
    assert stack(built) <= max(ROOM, {"_gradients": 32, "_wide_gradients": 320}.get(name, 0))
    # a thread's numbers of a state come 16 bytes at once
    if name == "_ssd_step" and state == torch.float32:
        assert "ld.global.v4.b32" in built.asm["ptx"]
        assert "st.global.v4.b32" in built.asm["ptx"]
