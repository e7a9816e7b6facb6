"""Machine code of Hopper's products with quantised weights, read without a GPU."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.weights.hopper import codes, gated_codes, launch, many_rows, schedule, widened  # noqa: E402
from tests.grids import swept  # noqa: E402
from tests.kernels import hopper_machine_code as machine_code  # noqa: E402
from tests.kernels.newer import NEWER  # noqa: E402
from tests.kernels.test_hopper_compiles import NEWEST, ROOT  # noqa: E402

SHARED = 227 * 1024
# each of two warpgroups reads one word a step of 128 of K, and a few more are kept outside of the loop
READ_AGAIN, KEPT_OUTSIDE = (2, 32) if NEWER else (0, 0)
WORDS = {
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
}


def described(box: tuple[int, int], dtype: torch.dtype) -> str:
    return f"tensordesc<{WORDS[dtype]}{list(box)},{launch.layout_of(box, dtype)!r}>"


def read(kernel: Any, constants: dict[str, Any], kinds: dict[str, str]) -> tuple[machine_code.Found, str]:
    """Compiles a kernel as it is launched for sizes that are multiples of 16; returns what its machine code has, and its PTX."""
    from triton.experimental.gluon._runtime import GluonASTSource

    constants = {name: value for name, value in constants.items() if name not in launch.LAUNCH}
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else kinds.get(name, "*fp32" if name.endswith("_ptr") else "i32") for name in names
    }
    aligned = [n for n, name in enumerate(names) if name.endswith("_ptr") or name == "N"]
    source = GluonASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(n,): [["tt.divisibility", 16]] for n in aligned},
    )
    built, words = machine_code._build(source, launch.LAUNCH, anew=True)
    return machine_code._read(built, words, SimpleNamespace(kernel="product")), built.asm["ptx"]


def assert_fits(found: machine_code.Found, stack: int) -> None:
    assert found.shared <= SHARED
    assert found.hot_spills <= READ_AGAIN
    assert found.stack <= stack + KEPT_OUTSIDE
    assert found.undefined == 0, "ptxas reads registers that nothing wrote"
    assert found.overwritten == 0, "ptxas overwrites in the loop what its products hold in registers"
    assert not found.serialised, "ptxas takes the matrix products one by one (a C75xx warning)"


def _traits(M: int, name: str, rest: tuple) -> tuple:
    """Each number of rows, each format with all that belongs to it; codes of 8 bits and of fewer, for few rows and for many."""
    return M, (name, rest), (name in ("fp8", "fp8_tile", "int8", "w8", "mxfp8"), M > 64)


CODES = [*itertools.product(["fp8"], [1, 16, 64, 128, 512]), ("fp8_tile", 256), ("int8", 64)]


@pytest.mark.parametrize(
    ("name", "M", "deterministic"),
    swept([(*case, fixed) for case in CODES for fixed in (False, True)], lambda case: _traits(case[1], case[0], case[2:])),
)
def test_codes_times_codes(name: str, M: int, deterministic: bool) -> None:
    tile = launch.tile_of(M, 4096, 4096, name, deterministic)
    dtype = torch.int8 if name == "int8" else torch.float8_e4m3fn
    kinds = {"counters_ptr": "*i32", "bias_ptr": "*bf16", "partials_ptr": "*i32" if name == "int8" else "*fp32"}
    kinds |= {"w_desc": described((tile.block_n, 128), dtype), "x_desc": described((tile.block_m, 128), dtype)}
    _, constants = launch._kernel_of_codes(name, True, tile)
    found, ptx = read(codes.product_of_codes, constants, kinds | {"o_ptr": "*fp32"})
    # a few words at the end of a tile, where two sums of 128 columns go out
    assert_fits(found, 64)
    assert "cp.async.bulk.tensor.2d" in ptx
    assert_waits(ptx, tile)
    kind = r"s32\.s8\.s8" if name == "int8" else r"f32\.e4m3\.e4m3"
    instructions = re.findall(rf"wgmma\.mma_async\.sync\.aligned\.m64n{tile.COLUMNS}k32\.{kind}", ptx)
    # 128 of K in four instructions, per sum
    assert len(instructions) == 4 * tile.blocks
    # FP8 leaves the matrix units every 128 of K, so each product begins anew and is added in fp32
    assert (name == "int8") == (not re.findall(r"add(?:\.rn)?\.f32|fma\.rn\.f32", loop_of(ptx)))


def assert_waits(ptx: str, tile: schedule.ProductTile, copies: int = 1) -> None:
    """Every role waits for the kernel before, and reads nothing before that but tiles of the weight, in so many copies."""
    *roles, end = ptx.split("griddepcontrol.wait")
    assert len(roles) == schedule.WARPGROUPS + 1
    assert "ld.global" not in roles[0]
    assert "cp.async.bulk.tensor" not in roles[0]
    assert roles[-1].count("cp.async.bulk.tensor") == copies
    assert ptx.count("griddepcontrol.launch_dependents") == 1
    assert end.count("cp.async.bulk.tensor") == copies + 1


def loop_of(ptx: str) -> str:
    """PTX from the first matrix product to the branch back."""
    start = ptx.index("wgmma.mma_async")
    return ptx[start : ptx.index("bra", ptx.index("mbarrier.arrive", start))]


WEIGHT = (28672, 4096)


def weight_for(M: int) -> tuple[int, int]:
    """A weight (N, K) for which 32 rows of x are ordered by warpgroups, and 24 before the product."""
    return (4096, 1024) if M == 32 else WEIGHT


WIDENED = [
    ("int4", torch.bfloat16, 128, False),
    ("int4", torch.float16, 32, True),
    ("int4", torch.bfloat16, 0, True),
    ("w8", torch.bfloat16, 0, False),
    ("w8", torch.float16, 0, False),
    ("mxfp8", torch.bfloat16, 32, False),
    ("mxfp4", torch.bfloat16, 32, False),
    ("nvfp4", torch.bfloat16, 16, False),
    ("nvfp4", torch.float16, 16, False),
]
GATED = [
    ("int4", torch.bfloat16, 128, False, "silu"),
    ("int4", torch.float16, 32, True, "tanh"),
    ("w8", torch.bfloat16, 0, False, "silu"),
    ("mxfp8", torch.bfloat16, 32, False, "relu"),
    ("mxfp4", torch.bfloat16, 32, False, "silu"),
    ("nvfp4", torch.bfloat16, 16, False, "erf"),
]


@pytest.mark.parametrize(
    ("M", "name", "dtype", "group", "zeros"),
    swept(((M, *case) for M in (1, 16, 24, 32, 64, 256) for case in WIDENED), lambda case: _traits(case[0], case[1], case[2:])),
    ids=str,
)
def test_codes_times_16_bits(M: int, name: str, dtype: torch.dtype, group: int, zeros: bool) -> None:
    assert_widens(launch.tile_of(M, *weight_for(M), name, False), M, name, dtype, group, zeros, "")


@pytest.mark.parametrize(
    ("M", "name", "dtype", "group", "zeros", "gate"),
    swept(((M, *case) for M in (1, 24, 32, 64, 256) for case in GATED), lambda case: _traits(case[0], case[1], case[2:])),
    ids=str,
)
def test_gates_in_a_product(M: int, name: str, dtype: torch.dtype, group: int, zeros: bool, gate: str) -> None:
    ptx = assert_widens(launch.gated_tile_of(M, *weight_for(M), name), M, name, dtype, group, zeros, gate)
    # the weight comes in two halves, before and after the kernel before has ended, and x in two of 128 bytes
    assert ptx.count("cp.async.bulk.tensor.2d") == 6
    assert ("ex2.approx" in ptx) == (gate != "relu")


def assert_widens(
    tile: schedule.ProductTile, M: int, name: str, dtype: torch.dtype, group: int, zeros: bool, gate: str
) -> str:  # fmt: skip
    word, wide = WORDS[dtype], name in ("w8", "mxfp8")
    kinds = {
        "counters_ptr": "*i32",
        "bias_ptr": "*bf16",
        "scales_ptr": f"*{word}" if name in ("int4", "w8") else "*u8",
        "zeros_ptr": "*i8" if zeros else "*u8",
        "outer_ptr": "*fp32" if name == "nvfp4" else "*u8",
        "o_ptr": f"*{word}",
    }
    kinds |= {
        "w_desc": described((tile.block_n // 2 if gate else tile.block_n, 128 if wide else 64), torch.uint8),
        "x_desc": described((tile.block_m, 128), dtype),
    }
    ordered = not launch.orders_itself(M, *weight_for(M), 132)
    _, constants = launch._kernel_of_widened(name, group, zeros, ordered, gate, True, tile)
    found, ptx = read(widened.product_of_widened, constants, kinds)
    # a few more words where two sums of 128 columns are added and gated
    assert_fits(found, 96 if gate else 64)
    kind = "bf16.bf16" if dtype == torch.bfloat16 else "f16.f16"
    assert len(re.findall(rf"wgmma\.mma_async\.sync\.aligned\.m64n{tile.COLUMNS}k16\.f32\.{kind}", ptx)) == 8 * tile.blocks
    # a thread reads 16 bytes of codes at once
    assert re.search(r"ld\.shared\.v4\.b32", ptx)
    # no exchange among lanes between codes and products
    assert "shfl" not in ptx[: ptx.index("wgmma.mma_async")].split("mbarrier.try_wait")[-1]
    return ptx


@pytest.mark.parametrize(
    ("M", "gate"),
    # each gate, and tiles for one row, for few rows and for many
    swept(
        [(1, "silu"), (16, "tanh"), (32, "silu"), (64, "silu"), (64, "erf"), (256, "silu")],
        lambda case: (case[1], min(case[0], 16), case[0] > 64),
    ),
)
def test_gates_of_codes(M: int, gate: str) -> None:
    """FP8 products of both halves whose gated result leaves in FP8: two bytes at a time become codes, and no loop spills."""
    tile = launch.gated_tile_of(M, *WEIGHT, "fp8")
    e4m3 = torch.float8_e4m3fn
    kinds = {"counters_ptr": "*i32", "bias_ptr": "*bf16", "o_ptr": "*fp8e4nv"}
    kinds |= {"w_desc": described((tile.block_n // 2, 128), e4m3), "x_desc": described((tile.block_m, 128), e4m3)}
    _, constants = launch._kernel_of_gates(torch.bfloat16, gate, True, tile)
    found, ptx = read(gated_codes.product_of_gates, constants, kinds)
    assert_fits(found, 64)
    assert_waits(ptx, tile, copies=2)
    instructions = re.findall(rf"wgmma\.mma_async\.sync\.aligned\.m64n{tile.COLUMNS}k32\.f32\.e4m3\.e4m3", ptx)
    assert len(instructions) == 4 * tile.blocks
    # sums leave the matrix units every 128 of K
    assert re.findall(r"add(?:\.rn)?\.f32|fma\.rn\.f32", loop_of(ptx))
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "div.rn.f32" in ptx
    assert "ex2.approx" in ptx


@pytest.mark.skipif(not NEWEST.exists(), reason="Triton 3.9 could not be installed when this environment was made")
def test_newest_triton_compiles_them() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(NEWEST), str(ROOT))), "TRITON_DEFAULT_FP_FUSION": "1"}
    some = "(codes_times_codes and fp8-16-False) or (16_bits and (64-int4-torch.bfloat16-128 or 64-w8-torch.bfloat16))"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__, "-k", some],
        capture_output=True, text=True, env=environment, cwd=ROOT, check=False,
    )  # fmt: skip
    assert re.search(r"^3 passed", done.stdout, re.MULTILINE), done.stdout[-3000:]


@pytest.mark.parametrize("bias", [False, True])
def test_codes_of_many_rows(bias: bool) -> None:
    """INT8: products of one step run while those of the next begin, and results leave through the copy engine."""
    kinds = {"bias_ptr": "*bf16", "w_desc": described((256, 128), torch.int8), "x_desc": described((128, 128), torch.int8)}
    kinds["o_desc"] = described((64, 128), torch.bfloat16)
    _, constants = launch._kernel_of_many_rows(bias)
    found, ptx = read(many_rows.product_of_many_rows, constants, kinds)
    assert_fits(found, 0)
    # two warpgroups have two sums, and 128 of K are four instructions
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8") == 16
    assert len(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+2", ptx)) == 2
    # each role waits for the kernel before, and nothing is read until then
    roles = ptx.split("griddepcontrol.wait")
    assert len(roles) == 4
    assert "ld.global" not in roles[0]
    assert "cp.async.bulk.tensor" not in roles[0]
    assert "cp.async.bulk.tensor.2d.global.shared" in ptx
