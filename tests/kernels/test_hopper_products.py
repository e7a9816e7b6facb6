"""Hopper's products with quantised weights, without a GPU: machine code, shares of programs, the order of codes in registers."""

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

from rooftile.matmul import backends  # noqa: E402
from rooftile.matmul.definition import Product, exact_product  # noqa: E402
from rooftile.matmul.hopper import codes, counters, launch, nibbles, schedule  # noqa: E402
from rooftile.matmul.packing import pack  # noqa: E402
from rooftile.numerics import QuantisedRows, quantise_rows  # noqa: E402
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
    tile = launch.tile_of(M, name, deterministic)
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
    assert len(roles) == tile.WARPGROUPS + 1
    assert "ld.global" not in roles[0]
    assert "cp.async.bulk.tensor" not in roles[0]
    assert roles[-1].count("cp.async.bulk.tensor") == 1
    assert ptx.count("griddepcontrol.launch_dependents") == 1
    assert end.count("cp.async.bulk.tensor") == 2


def loop_of(ptx: str) -> str:
    """PTX from the first matrix product to the branch back."""
    start = ptx.index("wgmma.mma_async")
    return ptx[start : ptx.index("bra", ptx.index("mbarrier.arrive", start))]


@pytest.mark.parametrize("M", [1, 16, 32, 64, 256])
@pytest.mark.parametrize(
    ("dtype", "group", "zeros"), [(torch.bfloat16, 128, False), (torch.float16, 32, True), (torch.bfloat16, 0, True)]
)
def test_weights_of_4_bits(M: int, dtype: torch.dtype, group: int, zeros: bool) -> None:
    tile = launch.tile_of(M, "int4", False)
    word = WORDS[dtype]
    kinds = {
        "counters_ptr": "*i32",
        "bias_ptr": "*bf16",
        "scales_ptr": f"*{word}",
        "zeros_ptr": "*i8",
        "o_ptr": f"*{word}",
    }
    kinds |= {"w_desc": described((tile.block_n, 64), torch.uint8), "x_desc": described((tile.block_m, 128), dtype)}
    _, constants = launch._kernel_of_nibbles(group, zeros, M > launch.ORDERS, True, tile)
    found, ptx = read(nibbles.product_of_nibbles, constants, kinds)
    assert_fits(found, 64)
    kind = "bf16.bf16" if dtype == torch.bfloat16 else "f16.f16"
    assert (
        len(re.findall(rf"wgmma\.mma_async\.sync\.aligned\.m64n{tile.COLUMNS}k16\.f32\.{kind}", ptx)) == 8 * tile.blocks
    )
    # a thread reads its 32 codes of a row at once
    assert re.search(r"ld\.shared\.v4\.b32", ptx)
    # no exchange among lanes between codes and products
    assert "shfl" not in ptx[: ptx.index("wgmma.mma_async")].split("mbarrier.try_wait")[-1]


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
    some = "(codes_times_codes and any-order and fp8-16) or (4_bits and dtype2 and 64)"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__, "-k", some],
        capture_output=True, text=True, env=environment, cwd=ROOT, check=False,
    )  # fmt: skip
    assert re.search(r"^2 passed", done.stdout, re.MULTILINE), done.stdout[-3000:]


@pytest.mark.parametrize("processors", [132, 7])
@pytest.mark.parametrize("M", [1, 64, 512])
@pytest.mark.parametrize("name", ["fp8", "int4"])
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_programs_share_all_steps(
    N: int, K: int, name: str, M: int, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of each tile is in one run; those who add a tile know who has a part of it, and where."""
    tile = launch.tile_of(M, name, False)
    tiles, steps = -(-N // tile.block_n), -(-K // 128)
    programs = launch.programs_of(tiles, steps, processors, M)
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


@pytest.mark.parametrize("name", ["fp8", "fp8_tile", "int8", "int4"])
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_the_order_of_sums_does_not_follow_from_rows(N: int, K: int, name: str) -> None:
    found = set()
    for M in (1, 2, 16, 63, 64, 65, 128, 256, 512):
        tile = launch.tile_of(M, name, True)
        product = Product(name, K, N, K, torch.bfloat16, True)
        tiles, steps = -(-product.N // tile.block_n), -(-K // 128)
        found.add((tile.block_n, launch.programs_of(tiles, steps, 132, 1)))
    assert len(found) == 1


def nibbles_as_numbers(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`ptx.nibbles_text` on bytes (..., 64): low and high halves, bytes 0 and 2 of four before 1 and 3."""
    four = packed.unflatten(-1, (-1, 4))[..., [0, 2, 1, 3]].flatten(-2)
    return (four & 15).float() - 8, (four >> 4).float() - 8


def test_x_is_put_in_the_order_of_codes() -> None:
    """The sum over K does not change, if x is put in the order in which threads hold their codes."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randint(0, 16, (64, 128), generator=generator)
    x = torch.randint(-9, 9, (5, 128), generator=generator).float()
    low, high = nibbles_as_numbers(pack(w))
    # as `nibbles._weights` has it
    held = torch.stack((low, high), -1).reshape(64, 4, 4, 2, 2, 2).permute(0, 2, 3, 5, 1, 4).reshape(64, 128)
    assert torch.equal(nibbles.in_order.fn(x) @ held.T, x @ (w.float() - 8).T)
    number = torch.arange(128).float()[None]
    place = {(4 * w + 2 * a + v) * 8 + 2 * q + e: 32 * q + 8 * w + 4 * e + 2 * a + v
             for q in range(4) for w in range(4) for a in range(2) for v in range(2) for e in range(2)}  # fmt: skip
    assert nibbles.in_order.fn(number)[0].tolist() == [place[n] for n in range(128)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_code_less_its_shift_is_exact(dtype: torch.dtype) -> None:
    """Both numbers of the subtraction are exact in 16 bits, and so is their difference, which is scaled with one rounding."""
    digits, excess = (0x4300, 136.0) if dtype == torch.bfloat16 else (0x6400, 1032.0)
    codes_ = torch.arange(16, dtype=torch.int16)
    held = (codes_ | digits).view(dtype)
    scale = torch.rand(1000, generator=torch.Generator().manual_seed(0)).to(dtype)[:, None]
    for zero in range(-8, 8):
        shift = torch.tensor(excess + zero).to(dtype)
        assert shift.float() == excess + zero
        less = held - shift
        assert torch.equal(less.float(), codes_.float() - 8 - zero)
        assert torch.equal(less * scale, ((codes_.float() - 8 - zero) * scale.float()).to(dtype))


def asked(name: str, M: int, N: int = 512, K: int = 1024, dtype: torch.dtype = torch.bfloat16) -> backends.Call:
    weight = weight_of(name, N, K)
    product = Product(weight.format, weight.group, N, K, dtype, False)
    return backends.Call(torch.zeros(M, K, dtype=dtype), None, weight.parts, None, product)


@pytest.mark.parametrize("name", FORMATS)
def test_refusals(name: str) -> None:
    reasons = list(launch.refusals(asked(name, 16)))
    assert bool(reasons) == (name in ("w8", "mxfp8", "mxfp4", "nvfp4"))


def test_refusals_say_what_came_and_what_is_there() -> None:
    assert list(launch.refusals(asked("fp8", 513))) == ["513 rows; has up to 512"]
    assert not list(
        launch.refusals(asked("fp8", 513)._replace(product=asked("fp8", 1).product._replace(deterministic=True)))
    )
    assert next(launch.refusals(asked("fp8", 1, K=131))).startswith("K is 131; has multiples of 16")
    assert list(launch.refusals(asked("int8", 1, N=8))) == ["N is 8; has 16 and more"]
    assert "both in bfloat16" in next(launch.refusals(asked("int4", 1, dtype=torch.float16)))
    assert "both in bfloat16" in next(launch.refusals(asked("int4", 1, dtype=torch.float32)))


def test_other_devices_are_refused() -> None:
    assert "needs 9.0" in next(backends._hopper_refusals(asked("fp8", 1), (8, 9)))
    assert next(backends.refusals("hopper", asked("fp8", 1))).startswith("tensors are on cpu")


@pytest.mark.parametrize(
    ("name", "M", "fixed"), [("fp8", 3, False), ("int8", 1100, True), ("int4", 7, False), ("int4", 130, True)]
)
def test_launches(name: str, M: int, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments stand in the kernels' order, and many rows are multiplied by so many at a time."""
    calls: list[Any] = []
    monkeypatch.setattr(launch, "Kernel", lambda kernel, describe: lambda *launched: calls.append((kernel, *launched)))
    monkeypatch.setattr(launch, "processors_of", lambda device: 132)
    monkeypatch.setattr(launch, "is_capturing", lambda: False)
    monkeypatch.setattr(launch.counters, "zeros", lambda count, device: torch.zeros(count, dtype=torch.int32))
    monkeypatch.setattr(launch, "in_order", lambda x: x.contiguous())
    launch._kernel_of_codes.cache_clear()
    launch._kernel_of_nibbles.cache_clear()
    weight, bias = weight_of(name, 768, 1024), torch.randn(768).bfloat16()
    product = Product(weight.format, weight.group, 768, 1024, torch.bfloat16, fixed)
    x, scales = torch.zeros(M, 1024, dtype=torch.bfloat16), torch.ones(M, 1)
    if name != "int4":
        x = x.to(weight.codes.dtype)
    o = launch.multiply(x, None if name == "int4" else scales, weight.parts, bias, product)
    launch._kernel_of_codes.cache_clear()
    launch._kernel_of_nibbles.cache_clear()
    assert o.shape == (M, 768)
    assert [call[2][call[0].arg_names.index("M")] for call in calls] == [min(512, M - n) for n in range(0, M, 512)]
    for n, (kernel, grid, arguments, constants) in enumerate(calls):
        names = [name for name in kernel.arg_names if name not in constants]
        given = dict(zip(names, arguments, strict=True))
        assert set(constants) == {*kernel.arg_names} - set(names) | set(launch.LAUNCH)
        assert given["N"] == 768
        assert given["w_desc"] is weight.codes
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


@pytest.mark.parametrize("fixed", [False, True], ids=["any-order", "fixed-order"])
@pytest.mark.parametrize("processors", [3, 11])
@pytest.mark.parametrize("M", [1, 13, 64, 70, 257])
@pytest.mark.parametrize("name", ["fp8", "fp8_tile", "int8", "int4", "int4, 32, zeros", "int4, 64"])
def test_emulated_products(name: str, M: int, processors: int, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own code, run by Python, says what the definition says."""
    N, K = 301, 640
    if (M > 64) and processors == 3:
        pytest.skip("the same as few rows, and slow")
    weight, bias = weight_of(name, N, K), torch.randn(N).bfloat16()
    x = torch.randn(M, K).bfloat16()
    rows = quantise_rows(x, weight.format) if name in QUANTISES_X else None
    with monkeypatch.context() as patched:
        patched.setattr(launch, "Kernel", emulated.emulate(patched))
        # the kernels are those that the emulator has changed
        patched.setattr(launch, "product_of_codes", codes.product_of_codes)
        patched.setattr(launch, "product_of_nibbles", nibbles.product_of_nibbles)
        patched.setattr(launch, "processors_of", lambda device: processors)
        # in a graph the ring fills before x is there
        patched.setattr(launch, "is_capturing", lambda: M % 2 == 1)
        count = torch.zeros(10_000, dtype=torch.int32)
        patched.setattr(launch.counters, "zeros", lambda count_, device: count[:count_])
        patched.setattr(launch, "in_order", lambda x: nibbles.in_order(x.reshape(-1, 128)).reshape(x.shape))
        patched.setattr(launch, "_kernel_of_codes", launch._kernel_of_codes.__wrapped__)
        patched.setattr(launch, "_kernel_of_nibbles", launch._kernel_of_nibbles.__wrapped__)
        product = Product(weight.format, weight.group, N, K, torch.float32, fixed)
        if rows is None:
            found = launch.multiply(x, None, weight.parts, bias, product)
        else:
            found = launch.multiply(rows.codes, rows.scales, weight.parts, bias, product)
    assert not count.any(), "counters are left at zero"
    wide = QuantisedRows(rows.codes, rows.scales, rows.format, torch.float32) if rows else None
    due = defined(wide or x, weight, bias, exact=True)
    if name == "int8":
        due = (exact_product(rows.codes, weight.codes).float() * rows.scales * weight.scales.T + bias.float()).double()
    torch.testing.assert_close(found.double(), due, rtol=3e-6, atol=3e-6 * float(due.abs().max()))
