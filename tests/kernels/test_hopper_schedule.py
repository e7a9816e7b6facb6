"""How programs share Hopper's products: every step in one run, sums in an order that rows do not change, counters."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.weights.hopper import counters, launch, schedule  # noqa: E402

# N x K of an 8B model's layer, and sizes that no tile divides
SIZES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (77, 384), (4099, 1024), (16, 128)]


class Line:
    """The code of `schedule`, run by Python for one program."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, sizes: launch.ProductSizes, programs: int, tile: schedule.ProductTile
    ) -> None:
        self.tiles, self.steps, self.spread, self.programs = sizes.tiles, sizes.steps, sizes.spread, programs
        self.BLOCKS, self.COLUMNS, self.partials, self.program = tile.blocks, tile.COLUMNS, 0, 0
        language = SimpleNamespace(
            program_id=lambda axis: self.program, num_programs=lambda axis: programs, minimum=min, int64=torch.int64
        )
        monkeypatch.setattr(schedule, "gl", language)
        monkeypatch.setattr(schedule, "ROWS", 64)
        names = ("tile", "tile_n", "tile_m", "first", "stop")
        monkeypatch.setattr(schedule, "Run", lambda *given: SimpleNamespace(**dict(zip(names, given, strict=True))))

    def runs(self, program: int) -> list[Any]:
        self.program = program
        place, end = schedule.TiledProduct.bounds.fn(self)
        found = []
        while place < end:
            run = schedule.TiledProduct.run_at.fn(self, place, end)
            found.append(run)
            place += run.stop - run.first
        return found

    def program_of(self, step: int) -> int:
        return schedule.TiledProduct.program_of.fn(self, step)

    def partial(self, program: int, begins: int, tile_m: int, block: int) -> int:
        return int(schedule.TiledProduct.partial.fn(self, torch.tensor(program), begins, tile_m, block))


@pytest.mark.parametrize("fixed", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("processors", [132, 7])
@pytest.mark.parametrize("M", [1, 64, 500])
@pytest.mark.parametrize("name", ["fp8", "int4", "w8"])
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_programs_share_all_steps(
    N: int, K: int, name: str, M: int, processors: int, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of each tile is in one run; those who add a tile know who has a part of it, and where."""
    tile = launch.tile_of(M, N, K, name, fixed, processors)
    sizes = launch.sizes_of(tile, M, N, K, fixed)
    tiles, steps = sizes.tiles, sizes.steps
    rows = -(-M // tile.block_m)
    assert sizes.spread == (1 if fixed else rows)
    programs = launch.programs_of(sizes, processors, 1 if fixed else M)
    assert 1 <= programs <= processors
    line = Line(monkeypatch, sizes, programs, tile)
    parts: dict[int, list[tuple[int, Any]]] = {n: [] for n in range(tiles)}
    for program in range(programs):
        for run in line.runs(program):
            assert run.stop > run.first
            parts[run.tile].append((program, run))
    walked = rows // sizes.spread
    places = [
        (run.tile_n, tile_m) for shared in parts.values() for tile_m in range(shared[0][1].tile_m, rows, sizes.spread)
        for _, run in shared[:1]
    ]  # fmt: skip
    assert sorted(places) == [(n, m) for n in range(-(-N // tile.block_n)) for m in range(rows)]
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
                for tile_m in range(run.tile_m, rows, sizes.spread):
                    place = line.partial(program, int(run.first == 0), tile_m, tile.blocks - 1)
                    assert place not in written
                    written.add(place)
                    assert place + 64 * tile.COLUMNS <= walked * programs * 2 * tile.block_n * tile.block_m
    longest = max(sum(run.stop - run.first for run in line.runs(program)) for program in range(programs))
    assert longest <= -(-tiles * steps // programs)


def test_steps_times_programs_are_a_number_of_32_bits() -> None:
    tile = launch.tile_of(2048, 1 << 20, 65536, "int4", False)
    sizes = launch.sizes_of(tile, 2048, 1 << 20, 65536, False)
    assert sizes.spread == 1
    assert sizes.tiles * sizes.steps * 132 < 2**31


@pytest.mark.parametrize("name", ["fp8", "fp8_tile", "int8", "int4", "w8", "nvfp4"])
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_the_order_of_sums_does_not_follow_from_rows(N: int, K: int, name: str) -> None:
    found = set()
    for M in (1, 2, 16, 63, 64, 65, 128, 256, 512):
        tile = launch.tile_of(M, N, K, name, True)
        sizes = launch.sizes_of(tile, M, N, K, True)
        found.add((tile.block_n, launch.programs_of(sizes, 132, 1)))
    assert len(found) == 1


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
