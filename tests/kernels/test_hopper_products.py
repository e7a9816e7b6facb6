"""Hopper's products with quantised weights, without a GPU: machine code, shares of programs, the order of codes in registers."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.hopper import ptx as ptx_of  # noqa: E402
from rooftile.matmul import backends  # noqa: E402
from rooftile.matmul.definition import Product, exact_product  # noqa: E402
from rooftile.matmul.hopper import codes, counters, launch, schedule, widened  # noqa: E402
from rooftile.matmul.packing import pack  # noqa: E402
from rooftile.matmul.weight import Parts, dequantised  # noqa: E402
from rooftile.numerics import QuantisedRows, quantise_rows  # noqa: E402
from rooftile.numerics.activations import KINDS, gated_halves  # noqa: E402
from tests.grids import swept  # noqa: E402
from tests.kernels import emulated  # noqa: E402
from tests.kernels import hopper_machine_code as machine_code  # noqa: E402
from tests.kernels.test_hopper_compiles import NEWEST, ROOT  # noqa: E402
from tests.matmul.cases import FORMATS, QUANTISES_X, defined, weight_of  # noqa: E402

SHARED = 227 * 1024
WORDS = {
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
# N x K of an 8B model's layer, and sizes that no tile divides
SIZES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (77, 384), (4099, 1024), (16, 128)]


def described(box: tuple[int, int], dtype: torch.dtype) -> str:
    return f"tensordesc<{WORDS[dtype]}{list(box)},{launch.layout_of(box, dtype)!r}>"


def read(kernel: Any, constants: dict[str, Any], kinds: dict[str, str]) -> tuple[machine_code.Found, str]:
    """Compiles a kernel as it is launched for sizes that are multiples of 16; returns what its machine code has, and its PTX."""
    from triton.experimental.gluon._runtime import GluonASTSource

    constants = {name: value for name, value in constants.items() if name not in launch.LAUNCH}
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else kinds.get(name, "*fp32" if name.endswith("_ptr") else "i32")
        for name in names
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
    assert found.hot_spills == 0
    assert found.stack <= stack
    assert found.undefined == 0, "ptxas reads registers that nothing wrote"
    assert found.overwritten == 0, "ptxas overwrites in the loop what its products hold in registers"
    assert not found.serialised, "ptxas takes the matrix products one by one (a C75xx warning)"


@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "fixed-order"])
@pytest.mark.parametrize(
    ("name", "M"), [*itertools.product(["fp8"], [1, 16, 64, 128, 512]), ("fp8_tile", 256), ("int8", 64)]
)
def test_codes_times_codes(name: str, M: int, deterministic: bool) -> None:
    tile = launch.tile_of(M, 4096, name, deterministic)
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


def assert_waits(ptx: str, tile: schedule.Tile) -> None:
    """Every role waits for the kernel before, and reads nothing before that but tiles of the weight: one copy."""
    *roles, end = ptx.split("griddepcontrol.wait")
    assert len(roles) == schedule.WARPGROUPS + 1
    assert "ld.global" not in roles[0]
    assert "cp.async.bulk.tensor" not in roles[0]
    assert roles[-1].count("cp.async.bulk.tensor") == 1
    assert ptx.count("griddepcontrol.launch_dependents") == 1
    assert end.count("cp.async.bulk.tensor") == 2


def loop_of(ptx: str) -> str:
    """PTX from the first matrix product to the branch back."""
    start = ptx.index("wgmma.mma_async")
    return ptx[start : ptx.index("bra", ptx.index("mbarrier.arrive", start))]


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
    swept(((M, *case) for M in (1, 16, 32, 64, 256) for case in WIDENED), lambda case: (case[:2], case[1:])),
    ids=str,
)
def test_codes_times_16_bits(M: int, name: str, dtype: torch.dtype, group: int, zeros: bool) -> None:
    assert_widens(launch.tile_of(M, 28672, name, False), M, name, dtype, group, zeros, "")


@pytest.mark.parametrize(
    ("M", "name", "dtype", "group", "zeros", "gate"),
    swept(((M, *case) for M in (1, 32, 64, 256) for case in GATED), lambda case: (case[0], case[1:], (case[1], case[0] > 64))),
    ids=str,
)
def test_gates_in_a_product(M: int, name: str, dtype: torch.dtype, group: int, zeros: bool, gate: str) -> None:
    ptx = assert_widens(launch.gated_tile_of(M, name), M, name, dtype, group, zeros, gate)
    # the weight comes in two halves, before and after the kernel before has ended, and x in two of 128 bytes
    assert ptx.count("cp.async.bulk.tensor.2d") == 6
    assert ("ex2.approx" in ptx) == (gate != "relu")


def assert_widens(
    tile: schedule.Tile, M: int, name: str, dtype: torch.dtype, group: int, zeros: bool, gate: str
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
    _, constants = launch._kernel_of_widened(name, group, zeros, M > launch.ORDERS, gate, True, tile)
    found, ptx = read(widened.product_of_widened, constants, kinds)
    assert_fits(found, 64)
    kind = "bf16.bf16" if dtype == torch.bfloat16 else "f16.f16"
    assert (
        len(re.findall(rf"wgmma\.mma_async\.sync\.aligned\.m64n{tile.COLUMNS}k16\.f32\.{kind}", ptx)) == 8 * tile.blocks
    )
    # a thread reads 16 bytes of codes at once
    assert re.search(r"ld\.shared\.v4\.b32", ptx)
    # no exchange among lanes between codes and products
    assert "shfl" not in ptx[: ptx.index("wgmma.mma_async")].split("mbarrier.try_wait")[-1]
    return ptx


class Line:
    """The code of `schedule`, run by Python for one program."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, tiles: int, steps: int, programs: int, tile: schedule.Tile
    ) -> None:
        self.tiles, self.steps, self.programs = tiles, steps, programs
        self.BLOCKS, self.COLUMNS, self.partials, self.program = tile.blocks, tile.COLUMNS, 0, 0
        language = SimpleNamespace(
            program_id=lambda axis: self.program, num_programs=lambda axis: programs, minimum=min, int64=torch.int64
        )
        monkeypatch.setattr(schedule, "gl", language)
        monkeypatch.setattr(schedule, "ROWS", 64)
        monkeypatch.setattr(
            schedule, "Run", lambda tile, first, stop: SimpleNamespace(tile=tile, first=first, stop=stop)
        )

    def runs(self, program: int) -> list[Any]:
        self.program = program
        place, end = schedule.Product.bounds.fn(self)
        found = []
        while place < end:
            run = schedule.Product.run_at.fn(self, place, end)
            found.append(run)
            place += run.stop - run.first
        return found

    def program_of(self, step: int) -> int:
        return schedule.Product.program_of.fn(self, step)

    def partial(self, program: int, begins: int, tile_m: int, block: int) -> int:
        return int(schedule.Product.partial.fn(self, torch.tensor(program), begins, tile_m, block))


@pytest.mark.skipif(not NEWEST.exists(), reason="Triton 3.9 could not be installed when this environment was made")
def test_newest_triton_compiles_them() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(NEWEST), str(ROOT))), "TRITON_DEFAULT_FP_FUSION": "1"}
    some = "(codes_times_codes and any-order and fp8-16) or (16_bits and (64-int4-torch.bfloat16-128 or 64-w8-torch.bfloat16))"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__, "-k", some],
        capture_output=True, text=True, env=environment, cwd=ROOT, check=False,
    )  # fmt: skip
    assert re.search(r"^3 passed", done.stdout, re.MULTILINE), done.stdout[-3000:]


@pytest.mark.parametrize("processors", [132, 7])
@pytest.mark.parametrize("M", [1, 64, 512])
@pytest.mark.parametrize("name", ["fp8", "int4", "w8"])
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_programs_share_all_steps(
    N: int, K: int, name: str, M: int, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of each tile is in one run; those who add a tile know who has a part of it, and where."""
    tile = launch.tile_of(M, N, name, False)
    tiles, steps = -(-N // tile.block_n), -(-K // 128)
    programs = launch.programs_of(tiles, steps, processors, M, name == "fp8" and M == 64)
    assert 1 <= programs <= processors
    line = Line(monkeypatch, tiles, steps, programs, tile)
    parts: dict[int, list[tuple[int, Any]]] = {n: [] for n in range(tiles)}
    for program in range(programs):
        for run in line.runs(program):
            assert run.stop > run.first
            parts[run.tile].append((program, run))
    written = set()
    for n, shared in parts.items():
        assert [(run.first, run.stop) for _, run in shared] == [
            (first, stop) for first, stop in itertools.pairwise([*(run.first for _, run in shared), steps])
        ]
        first, last = line.program_of(n * steps), line.program_of(n * steps + steps - 1)
        assert [program for program, _ in shared] == list(range(first, last + 1))
        if len(shared) > 1:
            assert tiles % programs, "no memory for partials is given"
            for program, run in shared:
                # `whole_sum` reads the first program's second partial and the others' first
                assert (run.first == 0) == (program == first)
                place = line.partial(program, int(run.first == 0), 1, tile.blocks - 1)
                assert place not in written
                written.add(place)
                assert place + 64 * tile.COLUMNS <= 2 * programs * 2 * tile.block_n * tile.block_m
    longest = max(sum(run.stop - run.first for run in line.runs(program)) for program in range(programs))
    assert longest <= -(-tiles * steps // programs)


@pytest.mark.parametrize("name", ["fp8", "fp8_tile", "int8", "int4", "w8", "nvfp4"])
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_the_order_of_sums_does_not_follow_from_rows(N: int, K: int, name: str) -> None:
    found = set()
    for M in (1, 2, 16, 63, 64, 65, 128, 256, 512):
        tile = launch.tile_of(M, N, name, True)
        product = Product(name, K, N, K, torch.bfloat16, True)
        tiles, steps = -(-product.N // tile.block_n), -(-K // 128)
        found.add((tile.block_n, launch.programs_of(tiles, steps, 132, 1)))
    assert len(found) == 1


def decoded(name: str, packed: torch.Tensor, scales: torch.Tensor, shifts: torch.Tensor | None = None) -> torch.Tensor:
    """The numbers that a thread makes of bytes (rows, bytes), in its own order: a row for a row, (rows, 128)."""
    bf16, dtype, wide = scales.dtype == torch.bfloat16, scales.dtype, name in ("w8", "mxfp8")
    if wide:
        text, constraints, dtypes = ptx_of.bytes_text(name, bf16), "=&r,=&r,r,r,r", dtype
    elif shifts is None:
        text, constraints, dtypes = ptx_of.e2m1_text(bf16), "=&r,=&r,=&r,=&r,r,r,r", (dtype, dtype)
    else:
        text, constraints, dtypes = ptx_of.nibbles_text(bf16), "=&r,=&r,=&r,=&r,r,r,r,r,r", (dtype, dtype)
    given = [packed, *(x.expand(packed.shape) for x in (scales, shifts) if x is not None)]
    found = emulated.interpreted(text, constraints, given, dtypes, True, 4)
    rows = packed.shape[0]
    # as `widened._weights` has it
    if wide:
        return found.reshape(rows, 4, 8, 2, 2).permute(0, 2, 3, 1, 4).reshape(rows, 128)
    return torch.stack(found, -1).reshape(rows, 4, 4, 2, 2, 2).permute(0, 2, 3, 5, 1, 4).reshape(rows, 128)


def test_x_is_put_in_the_order_of_codes() -> None:
    """The sum over K does not change, if x is put in the order in which threads hold their codes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-9, 9, (5, 128), generator=generator).float()
    one = torch.ones(1).bfloat16()
    w = torch.randint(0, 16, (64, 128), generator=generator)
    held = decoded("int4", pack(w), one, torch.full((1,), 136.0).bfloat16())
    assert torch.equal(widened.in_order.fn(x, False) @ held.float().T, x @ (w.float() - 8).T)
    w = torch.randint(-128, 128, (64, 128), generator=generator)
    held = decoded("w8", w.to(torch.int8).view(torch.uint8), one)
    assert torch.equal(widened.in_order.fn(x, True) @ held.float().T, x @ w.float().T)
    number = torch.arange(128).float()[None]
    place = {(4 * w + 2 * a + v) * 8 + 2 * q + e: 32 * q + 8 * w + 4 * e + 2 * a + v
             for q in range(4) for w in range(4) for a in range(2) for v in range(2) for e in range(2)}  # fmt: skip
    assert widened.in_order.fn(number, False)[0].tolist() == [place[n] for n in range(128)]
    place = {(2 * w + a) * 8 + 2 * q + e: 32 * q + 4 * w + 2 * e + a
             for q in range(4) for w in range(8) for a in range(2) for e in range(2)}  # fmt: skip
    assert widened.in_order.fn(number, True)[0].tolist() == [place[n] for n in range(128)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_become_exact_numbers_that_are_scaled_with_one_rounding(dtype: torch.dtype) -> None:
    """All codes of each format, under many scales, as (code - zero) scale in fp32, rounded."""
    scales = torch.rand(1000, 1, generator=torch.Generator().manual_seed(0)).to(dtype)
    back = torch.argsort(widened.in_order.fn(torch.arange(128).float()[None], False)[0])
    nibbles = torch.arange(128) % 16
    packed = pack(nibbles)[None].expand(1000, -1)
    for zero in range(-8, 8):
        shift = torch.tensor([zero + (136.0 if dtype == torch.bfloat16 else 1032.0)]).to(dtype)
        due = ((nibbles.float() - 8 - zero) * scales.float()).to(dtype)
        assert torch.equal(decoded("int4", packed, scales, shift)[:, back], due)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    due = (torch.cat((numbers, -numbers))[nibbles] * scales.float()).to(dtype)
    assert torch.equal(decoded("mxfp4", packed, scales)[:, back], due)
    back = torch.argsort(widened.in_order.fn(torch.arange(128).float()[None], True)[0])
    for half in (0, 128):
        codes_ = torch.arange(half, half + 128).to(torch.uint8)
        found = decoded("w8", codes_[None].expand(1000, -1), scales)[:, back]
        assert torch.equal(found, (codes_.view(torch.int8).float() * scales.float()).to(dtype))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_powers_of_two_from_the_smallest_to_the_largest(name: str) -> None:
    """Numbers of bf16 times each power of two, with those that are subnormal or infinite."""
    exponents = torch.arange(255, dtype=torch.uint8)[:, None]
    bits = torch.where(exponents == 0, 64, exponents.int() << 7)
    wide = name == "mxfp8"
    # no code of NaN
    codes_ = torch.arange(128).to(torch.uint8) % 127 if wide else pack(torch.arange(128) % 16)
    back = torch.argsort(widened.in_order.fn(torch.arange(128).float()[None], wide)[0])
    found = decoded(name, codes_[None].expand(255, -1), bits.to(torch.int16).view(torch.bfloat16))[:, back]
    packed = codes_.view(torch.float8_e4m3fn) if wide else codes_
    parts = Parts(packed[None].expand(255, -1), exponents.expand(-1, 4), None, None, None)
    assert torch.equal(found, dequantised(parts, name, 32, (255, 128), torch.bfloat16))


def asked(name: str, M: int, N: int = 512, K: int = 1024, dtype: torch.dtype = torch.bfloat16) -> backends.Call:
    weight = weight_of(name, N, K)
    product = Product(weight.format, weight.group, N, K, dtype, False)
    return backends.Call(torch.zeros(M, K, dtype=dtype), None, weight.parts, None, product)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_taken(name: str) -> None:
    assert not list(launch.refusals(asked(name, 16)))


def test_refusals_say_what_came_and_what_is_there() -> None:
    assert list(launch.refusals(asked("fp8", 513))) == ["513 rows; has up to 512"]
    assert not list(
        launch.refusals(asked("fp8", 513)._replace(product=asked("fp8", 1).product._replace(deterministic=True)))
    )
    assert next(launch.refusals(asked("fp8", 1, K=131))).startswith("K is 131; has multiples of 16")
    assert list(launch.refusals(asked("int8", 1, N=8))) == ["N is 8; has 16 and more"]
    assert "both in bfloat16" in next(launch.refusals(asked("int4", 1, dtype=torch.float16)))
    assert "both in bfloat16" in next(launch.refusals(asked("w8", 1, dtype=torch.float32)))
    assert list(launch.refusals(asked("mxfp4", 1, dtype=torch.float16))) == ["x in torch.float16; mxfp4 has bfloat16"]
    assert not list(launch.refusals(asked("nvfp4", 1, dtype=torch.float16)))
    assert next(launch.refusals(asked("nvfp4", 1, dtype=torch.float32))).endswith("has bfloat16 and float16")


def test_other_devices_are_refused() -> None:
    assert "needs 9.0" in next(backends._hopper_refusals(asked("fp8", 1), (8, 9)))
    assert next(backends.refusals("hopper", asked("fp8", 1))).startswith("tensors are on cpu")


@pytest.mark.parametrize(
    ("name", "M", "fixed"),
    [("fp8", 3, False), ("int8", 1100, True), ("int4", 7, False), ("int4", 130, True), ("w8", 7, False), ("nvfp4", 513, True)],
)
def test_launches(name: str, M: int, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments stand in the kernels' order, and many rows are multiplied by so many at a time."""
    calls: list[Any] = []
    monkeypatch.setattr(launch, "Kernel", lambda kernel, describe: lambda *launched: calls.append((kernel, *launched)))
    monkeypatch.setattr(launch, "processors_of", lambda device: 132)
    monkeypatch.setattr(launch, "is_capturing", lambda: False)
    monkeypatch.setattr(launch.counters, "zeros", lambda count, device: torch.zeros(count, dtype=torch.int32))
    monkeypatch.setattr(launch, "in_order", lambda x, wide: x.contiguous())
    launch._kernel_of_codes.cache_clear()
    launch._kernel_of_widened.cache_clear()
    weight, bias = weight_of(name, 768, 1024), torch.randn(768).bfloat16()
    product = Product(weight.format, weight.group, 768, 1024, torch.bfloat16, fixed)
    x, scales = torch.zeros(M, 1024, dtype=torch.bfloat16), torch.ones(M, 1)
    if name in QUANTISES_X:
        x = x.to(weight.codes.dtype)
    o = launch.multiply(x, scales if name in QUANTISES_X else None, weight.parts, bias, product)
    launch._kernel_of_codes.cache_clear()
    launch._kernel_of_widened.cache_clear()
    assert o.shape == (M, 768)
    assert [call[2][call[0].arg_names.index("M")] for call in calls] == [min(512, M - n) for n in range(0, M, 512)]
    for n, (kernel, grid, arguments, constants) in enumerate(calls):
        names = [name for name in kernel.arg_names if name not in constants]
        given = dict(zip(names, arguments, strict=True))
        assert set(constants) == {*kernel.arg_names} - set(names) | set(launch.LAUNCH)
        assert given["N"] == 768
        assert given["w_desc"].data_ptr() == weight.codes.data_ptr()
        if name == "nvfp4":
            assert given["outer_ptr"] is weight.outer
        assert given["bias_ptr"] is bias
        assert given["o_ptr"].data_ptr() == o[512 * n :].data_ptr()
        assert given["steps"] == 8
        tile = constants["T"]
        assert given["tiles"] == -(-768 // tile.block_n)
        assert 1 <= grid[0] <= 132
        shared = given["tiles"] % grid[0] != 0
        assert (given["partials_ptr"].numel() > 1) == shared
        if shared:
            rows = -(-given["M"] // tile.block_m)
            assert given["counters_ptr"].numel() == rows * given["tiles"] * tile.blocks


def test_no_two_products_of_graphs_share_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    device, captures = torch.device("cpu"), [False]
    monkeypatch.setattr(counters, "is_capturing", lambda: captures[0])
    monkeypatch.setattr(counters, "current_stream", lambda index: 0)
    for name in ("_OF_STREAM", "_RESERVES", "_LEFT"):
        monkeypatch.setattr(counters, name, {})
    monkeypatch.setattr(counters, "RESERVE", 1000)
    monkeypatch.setattr(counters, "FIRST", 16)
    captures[0] = True
    assert counters.zeros(5, device).tolist() == [0] * 5
    captures[0] = False
    of_stream = counters.zeros(7, device)
    assert counters.zeros(16, device).data_ptr() == of_stream.data_ptr()
    assert counters.zeros(17, device).shape == (17,)
    captures[0] = True
    taken = [counters.zeros(count, device) for count in (1, 400, 7, 384)]
    places = sorted((x.data_ptr(), x.numel() * 4) for x in taken)
    assert all(first + size <= second for (first, size), (second, _) in itertools.pairwise(places))
    assert all(x.data_ptr() % 16 == taken[0].data_ptr() % 16 for x in taken)
    # more than is left
    assert counters.zeros(400, device).shape == (400,)
    captures[0] = False
    counters.zeros(1, device)
    assert len(counters._RESERVES[None]) == 2, "graphs hold the first, so it stays"


@contextmanager
def emulation(monkeypatch: pytest.MonkeyPatch, processors: int) -> Iterator[None]:
    """Launches run in Python, on so many processors; all counters are zero before and after."""
    with monkeypatch.context() as patched:
        patched.setattr(launch, "Kernel", emulated.emulate(patched))
        # the kernels are those that the emulator has changed
        patched.setattr(launch, "product_of_codes", codes.product_of_codes)
        patched.setattr(launch, "product_of_widened", widened.product_of_widened)
        patched.setattr(launch, "processors_of", lambda device: processors)
        # in a graph the ring fills before x is there
        patched.setattr(launch, "is_capturing", lambda: processors == 11)
        count = torch.zeros(10_000, dtype=torch.int32)
        patched.setattr(launch.counters, "zeros", lambda count_, device: count[:count_])
        patched.setattr(launch, "in_order", lambda x, wide: widened.in_order(x.reshape(-1, 128), wide).reshape(x.shape))
        patched.setattr(launch, "_kernel_of_codes", launch._kernel_of_codes.__wrapped__)
        patched.setattr(launch, "_kernel_of_widened", launch._kernel_of_widened.__wrapped__)
        yield
    assert not count.any(), "counters are left at zero"


@pytest.mark.parametrize("fixed", [False, True], ids=["any-order", "fixed-order"])
@pytest.mark.parametrize("processors", [3, 11])
@pytest.mark.parametrize("M", [1, 13, 64, 70, 257])
@pytest.mark.parametrize("name", FORMATS)
def test_emulated_products(name: str, M: int, processors: int, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own code, run by Python, says what the definition says."""
    N, K = 301, 640
    if (M > 64) and processors == 3:
        pytest.skip("the same as few rows, and slow")
    weight, bias = weight_of(name, N, K), torch.randn(N).bfloat16()
    if name == "nvfp4" and fixed:
        # parts of one product have outer scales of their own
        weight = replace(weight, outer=weight.outer * torch.linspace(0.5, 2, N)[:, None])
    x = torch.randn(M, K).bfloat16()
    rows = quantise_rows(x, weight.format) if name in QUANTISES_X else None
    with emulation(monkeypatch, processors):
        product = Product(weight.format, weight.group, N, K, torch.float32, fixed)
        if rows is None:
            found = launch.multiply(x, None, weight.parts, bias, product)
        else:
            found = launch.multiply(rows.codes, rows.scales, weight.parts, bias, product)
    wide = QuantisedRows(rows.codes, rows.scales, rows.format, torch.float32) if rows else None
    due = defined(wide or x, weight, bias, exact=True)
    if name == "int8":
        due = (exact_product(rows.codes, weight.codes).float() * rows.scales * weight.scales.T + bias.float()).double()
    if name == "nvfp4":
        # the outer scale multiplies sums, so weights are not rounded
        due = x.double() @ weight.dequantise(torch.float64).T + bias.double()
    torch.testing.assert_close(found.double(), due, rtol=3e-6, atol=3e-6 * float(due.abs().max()))


@pytest.mark.parametrize("processors", [3, 11])
@pytest.mark.parametrize(("M", "activation"), [(1, "silu"), (13, "gelu"), (64, "gelu_pytorch_tanh"), (130, "relu")])
@pytest.mark.parametrize("name", ["w8", "int4, 32, zeros", "mxfp4", "nvfp4"])
def test_emulated_gates(name: str, M: int, activation: str, processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both halves of a sum are added by one program, whoever finishes last, and each is rounded before it is gated."""
    F, K = 304, 640
    weight, bias = weight_of(name, 2 * F, K), torch.randn(2 * F).bfloat16()
    if name == "nvfp4":
        weight = replace(weight, outer=weight.outer * torch.linspace(0.5, 2, 2 * F)[:, None])
    x = torch.randn(M, K).bfloat16()
    with emulation(monkeypatch, processors):
        product = Product(weight.format, weight.group, 2 * F, K, torch.bfloat16, False)
        found = launch.multiply_gated(x, weight.parts, bias, KINDS[activation], product)
    w = weight.dequantise(torch.float64 if name == "nvfp4" else torch.bfloat16).double()
    due = gated_halves((x.double() @ w.T + bias.double()).bfloat16(), activation)
    # where a half falls between two numbers of bf16 it may be rounded to the other
    torch.testing.assert_close(found, due, rtol=2e-2, atol=2e-2)
    assert (found == due).float().mean() > 0.97
