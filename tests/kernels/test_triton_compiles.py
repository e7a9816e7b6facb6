"""Every Triton kernel configuration we ship compiles without a GPU, for Ampere, Hopper and Blackwell.

What is read off the machine code: that it fits the shared memory of its chip, that its hot loops keep everything in
registers, and that Hopper's run on wgmma. `python -m tests.kernels.test_triton_compiles` prints the table.
"""

from __future__ import annotations

import math
import re
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rooftile.exact.masks import CAUSAL, FULL, Chunk, Prefix, Window
from rooftile.exact.spec import Spec
from tests.grids import swept
from tests.kernels.recorded import accesses, innermost_loops, run

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from tests.kernels.newer import NEWER  # noqa: E402

# bytes of shared memory that a block may use
SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# bytes that the compiler may keep outside registers, by kind of problem: for the common ones a few words that live across a
# whole walk; more with every option at once, and for fp32, which has no matrix unit
STACK = {
    "full": 112, "causal": 96, "window": 96, "everything": 256, "blocks": 96, "partial": 96, "listed": 112, "bits": 128,
    "fp32": 512,
}  # fmt: skip
# those inside a hot loop: a word or two at D = 256
HOT_SPILLS = 10 if NEWER else 2

INTEGERS = {
    *("B", "H", "T", "S", "tiles", "wave", "left", "right", "prefix", "chunk", "threshold"),
    *("padded_T", "dq_tiles", "dkdv_tiles", "tiles_of_queries", "tiles_of_keys", "slots", "rows", "columns", "BIAS_B", "BIAS_H"),
}
# arguments that are tuples
TUPLES = {
    **dict.fromkeys(("q_strides", "k_strides", "v_strides", "do_strides"), ("i32",) * 3),
    "bias_strides": ("i32", "i32", "i32", "constexpr"),
    "alibi_strides": ("i32", "constexpr"),
    "list_numbers": ("i32",) * 5,
}
POINTERS = {
    "stats_ptr": "i64",
    "rests_ptr": "i64",
    "seed_ptr": "i64",
    "cu_q_ptr": "i32",
    "cu_k_ptr": "i32",
    "lse_ptr": "fp32",
    "dlse_ptr": "fp32",
    "delta_ptr": "fp32",
    "alibi_ptr": "fp32",
    "sinks_ptr": "fp32",
    # twice as wide as the inputs in 16 bits, and so the larger part of shared memory
    "bias_ptr": "fp32",
    "dbias_ptr": "fp32",
    "nan_flag_ptr": "i32",
    **dict.fromkeys(("counts_ptr", "indices_ptr", "key_counts_ptr", "entries_ptr", "bits_ptr"), "i32"),
}
KINDS: dict[str, dict[str, Any]] = {
    "full": {"mask": FULL},
    "causal": {"mask": CAUSAL},
    "window": {"mask": CAUSAL & Window(100), "softcap": 30.0, "has_sinks": True},
    "blocks": {"mask": Prefix(100) & Chunk(1000) & Window(500)},
    "listed": {"mask": CAUSAL, "block_size": (128, 128)},
    "partial": {"mask": CAUSAL, "partial": True, "wide_grads": True, "needs_lse": True},
    "bits": {"mask": FULL, "block_size": (64, 64), "has_bits": True, "layout": "packed"},
    "everything": {
        "mask": Window(100, 7) & Chunk(64) & Prefix(8),
        "softcap": 30.0,
        "dropout": 0.1,
        "has_bias": True,
        "bias_grad": True,
        "has_alibi": True,
        "has_sinks": True,
        "placed": True,
        "layout": "packed",
    },
}
SPECS = [
    ("bf16", dim, dim, kind) for dim in (64, 128, 256) for kind in KINDS
] + [
    ("fp16", 64, 64, "causal"),
    ("bf16", 192, 128, "causal"),
    ("bf16", 96, 96, "full"),
    ("bf16", 16, 16, "causal"),
    *(("fp32", dim, dim, kind) for dim in (64, 128, 256) for kind in ("causal", "everything")),
]  # fmt: skip


class Compiled(NamedTuple):
    """The properties of a kernel, read from its machine code."""

    kernel: str
    registers: int
    stack: int  # bytes
    shared: int  # bytes
    hot_spills: int  # loads and stores of local memory inside loops with matrix instructions
    matrix: str  # "wgmma", "mma.sync", "tcgen05.mma", or "" if none


def launches(spec: Spec) -> list[tuple[Any, dict[str, Any], Any]]:
    """(kernel, constants, tile) of every launch that a forward and a backward of this spec make."""
    from rooftile.exact.backends.triton import flash_bwd_bias, flash_bwd_kv, flash_bwd_q, flash_bwd_repair, flash_fwd, tiles
    from rooftile.exact.backends.triton.call import constants_of

    known = constants_of(spec)
    found = [
        (flash_fwd._forward, {"SPEC": known.forward_spec}, tiles.forward_tile(spec)),
        (flash_bwd_q._backward_q, {}, tiles.backward_q_tile(spec)),
    ]
    for walk in tiles.backward_kv_walks(spec):
        found.append((flash_bwd_kv._backward_kv, {"WALK": walk}, walk.tile))
    if spec.device == "sm90" and spec.mask in (CAUSAL, FULL) and spec.dtype.itemsize == 2 and not spec.has_bits:
        # what sets right the gradients of the Hopper kernels
        constants = flash_bwd_repair.constants(spec)
        repair = flash_bwd_repair._repair if spec.block_size is None else flash_bwd_repair._repair_listed
        found.append((repair, constants, constants["WALK"].tile))
    if spec.bias_grad:
        bias = {"ONE_ROW": False, "ONE_COLUMN": False}
        found.append((flash_bwd_bias._backward_bias, bias, tiles.backward_bias_tile(spec)))
    return [(kernel, {"SPEC": known.spec, "TILE": tile, **own}, tile) for kernel, own, tile in found]


def compiled(kernel: Any, constants: dict[str, Any], tile: Any, dtype: str, sm: int) -> Compiled:
    """A kernel's machine code for a chip, read with the tools that Triton carries."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: _type(name, constants, dtype) for name in names}
    if "lists" in names:
        signature["lists"] = ("i32",) * 8
    elif "entries_ptr" in names:
        # and the three numbers of the lists of keys
        signature["list_numbers"] = ("i32",) * 8
    aligned = [(n,) for n, name in enumerate(names) if name.endswith("_ptr") or name == "padded_T"]
    aligned += [
        (n, i) for n, name in enumerate(names) if name in TUPLES for i, kind in enumerate(TUPLES[name]) if kind != "constexpr"
    ]
    # a stride of one is compiled in, and then a bias is copied to shared memory ahead of its use
    units = {(n, len(TUPLES[name]) - 1): 1 for n, name in enumerate(names) if "constexpr" in TUPLES.get(name, ())}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items() if name in names} | units,
        attrs={place: [["tt.divisibility", 16]] for place in aligned},
    )
    # launches leave num_stages to Triton: every loop names its own
    options = {"num_warps": tile.num_warps}
    built = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = run(tools / "cuobjdump", "--dump-resource-usage", file.name)
        registers, stack = (int(n) for n in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
        # without a stack nothing spills
        code = run(tools / "nvdisasm", "-c", file.name) if stack else ""
    matrix = next((word for word in ("tcgen05.mma", "wgmma", "mma.sync") if word in built.asm["ptx"]), "")
    return Compiled(kernel.__name__, registers, stack, built.metadata.shared, _hot_spills(code), matrix)


def _type(name: str, constants: dict[str, Any], dtype: str) -> str | tuple[str, ...]:
    if name in constants:
        return "constexpr"
    if name in TUPLES:
        return TUPLES[name]
    if name.endswith("_ptr"):
        # parts of attention have outputs and gradients in fp32
        partial = math.inf == constants["SPEC"].FAR and name in ("o_ptr", "dq_ptr", "dk_ptr", "dv_ptr")
        return "*" + ("fp32" if partial else POINTERS.get(name, dtype))
    return "i32" if name in INTEGERS else "fp32"


def _hot_spills(code: str) -> int:
    """Accesses to local memory in innermost loops that hold exponentials and matrix products, the second walk's aside."""
    # the walk with care comes last in the code and is rare
    return accesses([body for body in innermost_loops(code) if any("MUFU.EX2" in x for x in body)][:2])


def _spec(dtype: str, dim: int, dim_v: int, kind: str, sm: int) -> Spec:
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    return Spec(dtype=torch_dtype, dim=dim, dim_v=dim_v, scale=dim**-0.5, needs_grad=True, device=f"sm{sm}", **KINDS[kind])


# `make test` compiles these, which have each dtype, kind of problem and chip
USUAL = [
    (80, "fp16", 64, 64, "causal"),
    (80, "bf16", 64, 64, "blocks"),
    (90, "bf16", 128, 128, "full"),
    (90, "bf16", 64, 64, "everything"),
    (90, "fp32", 64, 64, "causal"),
    (100, "bf16", 64, 64, "window"),
    (90, "bf16", 128, 128, "listed"),
    (90, "bf16", 128, 128, "partial"),
    (80, "bf16", 64, 64, "bits"),
    # every causal backward on Hopper launches the same repair kernel
    (90, "bf16", 128, 128, "causal"),
    (90, "bf16", 96, 96, "full"),
]
GRID = [(sm, *spec) for sm in (80, 90, 100) for spec in SPECS]


@pytest.mark.parametrize(("sm", "dtype", "dim", "dim_v", "kind"), swept(GRID, lambda case: [case] * (case in USUAL)), ids=str)
def test_configuration_compiles_within_its_chip(sm, dtype, dim, dim_v, kind):
    for kernel, constants, tile in launches(_spec(dtype, dim, dim_v, kind, sm)):
        found = compiled(kernel, constants, tile, dtype, sm)
        assert found.shared <= SHARED[sm], found
        if "SECOND_WALK" in constants:
            # a repair is rare, and only begun where there is something to repair
            continue
        if dtype == "fp32":
            # ptxas holds itself to 128 registers for some kernels with every option
            assert found.stack <= STACK["fp32"] * (2 if kind == "everything" else 1), found
            continue
        assert found.stack <= STACK[kind], found
        assert found.hot_spills <= HOT_SPILLS or kind == "everything", found
        if sm == 90:
            assert found.matrix == "wgmma", found


# options that a call may combine; a dtype or a head dim besides
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"mask": CAUSAL},
    "window": {"mask": Window(100, 7) & Chunk(64)},
    "softcap": {"softcap": 30.0},
    "bias": {"has_bias": True, "bias_grad": True},
    "alibi": {"has_alibi": True},
    "sinks": {"has_sinks": True},
    "dropout": {"dropout": 0.1},
    "packed": {"layout": "packed"},
    "groups": {"group": 4},
}
# their needs add up: all at once at each width, and the bias, whose kernels need most, with each of the others
ALL = tuple(name for name in OPTIONS if name not in ("causal", "packed"))
COMBINED = [
    *((sm, kind, *dims, ALL) for sm in (80, 89, 90) for kind in ("bf16", "fp32") for dims in ((64, 64), (192, 128), (256, 256))),
    *((sm, "bf16", 256, 256, ("bias", name)) for sm in (80, 89, 90) for name in OPTIONS if name != "bias"),
]
# the bias's own kernel once asked for more than these chips have
WIDEST = [(90, "bf16", 256, 256, ("bias", "alibi")), (89, "bf16", 256, 256, ("bias", "sinks"))]


@pytest.mark.parametrize(
    ("sm", "dtype", "dim", "dim_v", "names"), swept(COMBINED, lambda case: [case] * (case in WIDEST)), ids=str
)
def test_options_together_fit_every_chip(sm, dtype, dim, dim_v, names):
    together = {name: value for option in names for name, value in OPTIONS[option].items()}
    spec = replace(_spec(dtype, dim, dim_v, "full", sm), **together)
    for kernel, constants, tile in launches(spec):
        found = _shared(kernel, tuple(constants.items()), tile, dtype, sm)
        assert found <= SHARED[sm], f"{kernel.__name__} with {tile} takes {found} bytes"


@cache
def _shared(kernel: Any, constants: tuple[tuple[str, Any], ...], tile: Any, dtype: str, sm: int) -> int:
    """The shared memory of a configuration, which many pairs of options have in common."""
    return compiled(kernel, dict(constants), tile, dtype, sm).shared


def test_ampere_tiles_fit_consumer_chips():
    """sm86, sm89 and sm120 have 99 KiB where sm80 has 163; they take the same tiles."""
    for kernel, constants, tile in launches(_spec("bf16", 256, 256, "causal", 86)):
        assert compiled(kernel, constants, tile, "bf16", 86).shared <= SHARED[86]


if __name__ == "__main__":
    for sm in (80, 90, 100):
        for dtype, dim, dim_v, kind in SPECS:
            for kernel, constants, tile in launches(_spec(dtype, dim, dim_v, kind, sm)):
                print(f"sm{sm}", dtype, dim, dim_v, kind, tuple(tile), *compiled(kernel, constants, tile, dtype, sm))  # noqa: T201
