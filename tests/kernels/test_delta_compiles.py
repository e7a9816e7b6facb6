"""The gated delta rule's kernels compile for the chips that they are for, without one; in bf16 those that SPILLED names spill.

In fp16 the forward's walk spills a little, and in fp32 the exact products of 128 columns do not fit into registers.
"""

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
# bytes that are more than none: on Ampere each warp of a walk holds a whole factor of a product, beside the state and outputs;
# the gradients of pairs hold four matrices of a chunk's pairs
SPILLED = {
    ("walk", 80): 128,
    ("walk_back", 80): 192,
    ("pair_gradients", 80): 48,
    ("pair_gradients", 90): 8,
    ("query_gradients", 90): 8,
}
# bytes of the forward in fp16, whose products are of tf32 and whose tiles take twice the registers
IN_FP16 = {"walk": 48}
WORDS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
FORWARD = ("prepare", "invert", "walk")
BACKWARD = ("walk_back", "pair_gradients", "query_gradients", "key_gradients")
KERNELS = (*FORWARD, *BACKWARD, "step")
GIVEN = {f"{name}_ptr" for name in ("q", "k", "v", "y", "beta", "dq", "dk", "dv", "dy", "dbeta")}
# X, P, V', the states between chunks, and the gradients of these are in bf16, or in fp32
BETWEEN = {f"{name}_ptr" for name in ("x", "pairs", "new", "states", "dr", "dstates", "by_key", "by_both")}


def _signature(kernel, name: str, constants: dict, dtype: torch.dtype) -> dict:
    signature = {}
    for argument in kernel.arg_names:
        pointer = WORDS[dtype] if argument in GIVEN else "*fp32"
        if argument in BETWEEN:
            pointer = "*bf16" if dtype == torch.bfloat16 else "*fp32"
        if argument == "beta_ptr" and name not in ("prepare", "step"):
            pointer = "*fp32"
        pointer = {"total_ptr": "*fp64", "cu_ptr": "*i32", "slots_ptr": "*i64"}.get(argument, pointer)
        other = "fp32" if argument == "scale" else "i32"
        signature[argument] = "constexpr" if argument in constants else pointer if argument.endswith("_ptr") else other
        if argument.endswith("_strides"):
            signature[argument] = ("i32",) * (3 if name != "step" else 4 if argument == "state_strides" else 2)
    return signature


def compiled(name: str, sm: int, dtype: torch.dtype, dim: int, *, group: int = 1, packed: bool = False, outputs: bool = True):
    """Compiles a kernel as it is launched for tensors that are aligned to 16 bytes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rooftile.recurrent.kernels import delta
    from rooftile.recurrent.kernels.delta import call, walks

    kernel = next(getattr(module, f"_{name}") for module in (call, walks, delta) if hasattr(module, f"_{name}"))
    walking = {"OUTPUTS": outputs, "KEEPS": not outputs}, {"HAS_LAST": True, "KEEPS": True}
    own = {"walk": walking[0], "walk_back": walking[1], "step": {"QK_NORM": True, "SLOTS": True}}.get(name)
    if own is None:
        own = {} if name == "pair_gradients" else {"QK_NORM": True}
    if name != "step":
        own |= {"PACKED": packed}
    constants = dict(call.INVERTING if name == "invert" else call.constants_of(name, 4, group, dim, dim, dtype, sm >= 90, **own))
    options = {word: constants.pop(word) for word in ("num_warps", "num_stages")}
    places = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    even: list[tuple[int, ...]] = [(n,) for n, argument in enumerate(kernel.arg_names) if argument.endswith("_ptr")]
    if name != "step":
        wide = ("q_strides", "k_strides", "v_strides")
        even += [(n, axis) for n, argument in enumerate(kernel.arg_names) if argument in wide for axis in range(3)]
    source = ASTSource(
        kernel, _signature(kernel, name, constants, dtype), places, {place: [["tt.divisibility", 16]] for place in even}
    )
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


GRID = [(name, sm, dtype, dim) for name in KERNELS for sm in (80, 90) for dtype in WORDS for dim in (64, 128)]


def _traits(case: tuple) -> tuple:
    name, sm, dtype, dim = case
    # the packed calls below have both chips at 128
    return (dtype == torch.bfloat16 and (name, sm)), (dtype == torch.bfloat16 and (name, dim)), (sm, dtype)


@pytest.mark.parametrize(("name", "sm", "dtype", "dim"), swept(GRID, _traits), ids=str)
def test_kernels_compile(name: str, sm: int, dtype: torch.dtype, dim: int) -> None:
    built = compiled(name, sm, dtype, dim)
    assert built.metadata.shared <= (227 if sm == 90 else 163) * 1024
    if dtype == torch.bfloat16:
        assert stack(built) <= max(ROOM, SPILLED.get((name, sm), 0))
    if dtype == torch.float16 and name not in BACKWARD:
        assert stack(built) <= max(ROOM, IN_FP16.get(name, 0))
    if dtype == torch.bfloat16 and name != "step":
        # products run on the matrix units; one warp is no group of warps for Hopper's
        assert re.search(r"wgmma" if sm >= 90 and name != "invert" else r"mma\.sync", built.asm["ptx"])


@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
@pytest.mark.parametrize("sm", [80, 90])
def test_packed_groups_spill_no_more(sm: int, name: str) -> None:
    assert stack(compiled(name, sm, torch.bfloat16, 128, group=2, packed=True)) <= max(ROOM, SPILLED.get((name, sm), 0))


def test_the_walk_that_leaves_states_spills_nothing() -> None:
    assert stack(compiled("walk", 90, torch.bfloat16, 128, outputs=False)) <= ROOM
