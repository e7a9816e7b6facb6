"""Runs the Gluon kernels of products in Python: roles are threads, shared memory and registers are tensors on a CPU.

What is run is the kernels' own code, so their places, masks, barriers and the order of their sums are. Layouts are not: every
tensor is whole. Inline PTX that decodes weights is interpreted.
"""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from rooftile.numerics.activations import ACTIVATIONS, KINDS
from rooftile.weights.hopper import codes, gated_codes, launch, many_rows, schedule, two_four, widened

# the formulas of `rooftile.numerics.activated`
ACTIVATED = {KINDS[name]: activation for name, activation in ACTIVATIONS.items()}
# a role that waits longer than this waits for ever
PATIENCE_S = 30


class Held(torch.Tensor):
    """A tensor in registers, or a number."""

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Held:
        return held(self.as_subclass(Tensor).view(dtype) if bitcast else self.as_subclass(Tensor).to(dtype))

    def __iadd__(self, other: Any) -> Held:
        # names that stand for one tensor do not change together
        return self + other


def held(x: Any, dtype: torch.dtype = torch.int32) -> Held:
    return (x if isinstance(x, Tensor) else torch.tensor(x, dtype=dtype)).as_subclass(Held)


class Pointer:
    """A place in memory, or places."""

    def __init__(self, memory: Tensor, place: Any = 0) -> None:
        self.memory, self.place = memory, place
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.place + more)


def flat(x: Tensor) -> Pointer:
    assert x.is_contiguous()
    return Pointer(x.view(-1))


def load(pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Held:
    place = torch.as_tensor(pointer.place)
    there = torch.ones_like(place, dtype=torch.bool) if mask is None else torch.as_tensor(mask).broadcast_to(place.shape)
    found = torch.full(place.shape, other, dtype=pointer.memory.dtype)
    found[there] = pointer.memory[place[there].long()]
    return held(found)


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    place = torch.as_tensor(pointer.place)
    value = torch.as_tensor(value, dtype=pointer.memory.dtype).broadcast_to(place.shape).as_subclass(Tensor)
    there = torch.ones_like(place, dtype=torch.bool) if mask is None else torch.as_tensor(mask).broadcast_to(place.shape)
    pointer.memory[place[there].long()] = value[there]


def given_codes(x: Tensor, scale: Tensor, largest: float) -> Held:
    """`numerics.row_kernels.given_codes`."""
    codes = (x / scale).as_subclass(Tensor).clamp(-largest, largest)
    return held(torch.where(x.isfinite().as_subclass(Tensor), codes, torch.nan))


def atomic_add(pointer: Pointer, more: int) -> Held:
    before = load(pointer).clone()
    store(pointer, before + more)
    return held(before)


class Shared:
    """Shared memory."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.dtype, self.shape = x, x.dtype, x.shape

    def index(self, i: Any) -> Shared:
        return Shared(self.x[int(i)])

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.x.narrow(dim, start, length))

    def permute(self, dims: tuple[int, ...]) -> Shared:
        return Shared(self.x.permute(dims))

    def load(self, layout: Any) -> Held:
        return held(self.x.clone())

    def store(self, x: Tensor) -> None:
        self.x.copy_(x)


class Descriptor:
    """A matrix as the copy engine takes it."""

    def __init__(self, x: Tensor, box: tuple[int, int]) -> None:
        assert x.stride(-1) == 1
        assert x.data_ptr() % 16 == 0
        assert x.shape[0] == 1 or x.stride(0) * x.element_size() % 16 == 0
        self.x, self.dtype, self.layout = x, x.dtype, None
        self.block_type = SimpleNamespace(shape=list(box), nbytes=box[0] * box[1] * x.element_size())


class Slots:
    """A ring: whether each fill has come, and how often it was given back."""

    def __init__(self, buffers: Shared, stages: int, consumers: int, producers: int = 1) -> None:
        self.buffers, self.stages, self.consumers = buffers, stages, consumers
        self.changed = threading.Condition()
        self.due: dict[int, int] = {}
        self.given_back: dict[int, int] = {}

    def buffer(self, fill: int) -> Shared:
        return self.buffers.index(fill % self.stages)

    def _wait(self, why: str, ready: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(ready, PATIENCE_S), why

    def wait_empty(self, fill: int) -> None:
        before = fill - self.stages
        self._wait(f"slot of {fill} never empty", lambda: before < 0 or self.given_back.get(before) == self.consumers)

    def wait_full(self, fill: int) -> None:
        self._wait(f"fill {fill} never comes", lambda: self.due.get(fill) == 0)

    def full_barrier(self, fill: int) -> Any:
        return SimpleNamespace(ring=self, fill=fill)

    def release(self, fill: int) -> None:
        with self.changed:
            self.given_back[fill] = self.given_back.get(fill, 0) + 1
            assert self.given_back[fill] <= self.consumers
            self.changed.notify_all()


def expect(barrier: Any, nbytes: int) -> None:
    with barrier.ring.changed:
        barrier.ring.due[barrier.fill] = nbytes


def tma_load(desc: Descriptor, place: list[Any], barrier: Any, to: Shared) -> None:
    rows, columns = desc.block_type.shape
    m, k = (int(x) for x in place)
    part = desc.x[m : m + rows, k : k + columns]
    to.x.view(torch.uint8).zero_()
    to.x[: part.shape[0], : part.shape[1]] = part
    with barrier.ring.changed:
        barrier.ring.due[barrier.fill] -= desc.block_type.nbytes
        assert barrier.ring.due[barrier.fill] >= 0
        barrier.ring.changed.notify_all()


def tma_store(desc: Descriptor, place: list[Any], part: Shared) -> None:
    m, n = (int(x) for x in place)
    rows, columns = desc.block_type.shape
    to = desc.x[m : m + rows, n : n + columns]
    to.copy_(part.x[: to.shape[0], : to.shape[1]])


def mma(a: Any, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Held:
    left = a.x if isinstance(a, Shared) else a
    product = left.double().as_subclass(Tensor) @ b.x.double()
    return held((product + acc.double().as_subclass(Tensor) if use_acc else product).to(acc.dtype))


def wait(count: int, deps: tuple[Any, ...]) -> Any:
    return deps[0] if len(deps) == 1 else deps


def interpreted(text: Any, constraints: Any, arguments: list[Tensor], dtype: Any, is_pure: bool, pack: int) -> Any:
    """Runs PTX on numbers of 8, 16 and 32 bits (..., n), `pack` neighbours at a time, as many to a register as fit."""
    text, constraints = (each if isinstance(each, str) else each.value for each in (text, constraints))
    results = constraints.count("=")
    registers: dict[str, Tensor] = {}
    for x in arguments:
        x = x.as_subclass(Tensor).unflatten(-1, (-1, pack)).contiguous()
        for word in x.view(torch.int32).unbind(-1):
            registers[f"${results + len(registers)}"] = word.to(torch.int64) & 0xFFFFFFFF
    assert results + len(registers) == len(constraints.split(","))
    for line in text.strip("{} ").split(";"):
        if line.strip() and not line.strip().startswith(".reg"):
            step(line.strip(), registers)
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    # results have 16 bits
    each = pack // 2
    assert results == each * len(kinds)
    words = [(registers[f"${n}"] - (registers[f"${n}"] >> 31 << 32)).to(torch.int32) for n in range(results)]
    numbers = [held(torch.stack(words[each * n : each * (n + 1)], -1).view(kind).flatten(-2)) for n, kind in enumerate(kinds)]
    return tuple(numbers) if isinstance(dtype, tuple) else numbers[0]


def step(line: str, registers: dict[str, Tensor]) -> None:
    """Runs one instruction."""
    name, rest = line.split(" ", 1)
    to, *given = (each.strip() for each in rest.split(","))
    a, *others = (registers[each] if each in registers else torch.tensor(int(each, 0)) for each in given)
    kind, dtype = name.split(".")[0], {"bf16x2": torch.bfloat16, "f16x2": torch.float16}.get(name.split(".")[-1])
    if dtype is not None:
        assert name.startswith(("sub.rn.", "mul.rn."))
        a, b = (torch.stack((x & 0xFFFF, x >> 16), -1).to(torch.uint16).view(dtype) for x in (a, others[0]))
        bits = (a - b if kind == "sub" else a * b).view(torch.uint16).to(torch.int64)
        found = bits[..., 0] | bits[..., 1] << 16
    elif kind == "lop3":
        b, c, table = others[0], others[1], int(others[2])
        found = torch.zeros_like(a | b | c)
        for n in range(8):
            if table >> n & 1:
                found |= (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
    elif kind == "mov":
        found = a
    elif kind == "prmt":
        # a byte of the eight of a and b for each of four; none repeats a sign
        eight, taken = a | others[0] << 32, others[1]
        assert not (taken & 0x8888).any()
        found = sum(((eight >> ((taken >> 4 * n & 7) * 8)) & 0xFF) << 8 * n for n in range(4))
    else:
        found = {
            "shl": torch.bitwise_left_shift,
            "shr": torch.bitwise_right_shift,
            "and": torch.bitwise_and,
            "or": torch.bitwise_or,
        }[kind](a, others[0])
    registers[to] = found & 0xFFFFFFFF


def specialise(roles: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    failed: list[BaseException] = []

    def run(role: Any, arguments: tuple[Any, ...]) -> None:
        try:
            role(*arguments)
        # whatever stops a role is raised below
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=role) for role in roles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


class Product:
    """`schedule.TiledProduct` in Python."""

    def __init__(self, o, bias, partials, counters, M, N, tiles, steps, spread, BIAS, T) -> None:
        self.o, self.bias, self.partials, self.counters, self.BIAS = o, bias, partials, counters, BIAS
        self.M, self.N, self.tiles, self.steps, self.spread = M, N, tiles, steps, spread
        self.WARPGROUPS, self.BLOCKS_N, self.COLUMNS, self.BLOCKS_M = schedule.WARPGROUPS, T.BLOCKS_N, T.COLUMNS, T.BLOCKS_M
        self.BLOCKS, self.BLOCK_N, self.BLOCK_M, self.STAGES = T.blocks, T.block_n, T.block_m, T.STAGES


for _name in ("tiles_of_rows", "bounds", "run_at", "program_of", "partial"):
    setattr(Product, _name, getattr(schedule.TiledProduct, _name).fn)


class Grid:
    """`many_rows.Grid` in Python."""

    def __init__(self, rows: Any, columns: Any, steps: Any) -> None:
        self.rows, self.columns, self.steps = rows, columns, steps

    place = many_rows.Grid.place.fn


def emulate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns what stands for `launch.Kernel`: it runs the programs of a launch one after the other, in a random order."""
    current = SimpleNamespace(program=0, programs=1)
    language = SimpleNamespace(
        program_id=lambda axis: held(current.program), num_programs=lambda axis: current.programs, load=load, store=store,
        atomic_add=atomic_add, minimum=lambda a, b: held(torch.minimum(torch.as_tensor(a), torch.as_tensor(b))),
        arange=lambda start, stop, layout: held(torch.arange(start, stop, dtype=torch.int32)),
        expand_dims=lambda x, dim: x.unsqueeze(dim), convert_layout=lambda x, layout: x,
        join=lambda a, b: torch.stack((a, b), -1),
        zeros=lambda shape, dtype, layout: held(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, value, dtype, layout: held(torch.full(shape, value, dtype=dtype)),
        allocate_shared_memory=lambda dtype, shape, layout: Shared(torch.zeros(shape).to(dtype)),
        warp_specialize=specialise, inline_asm_elementwise=interpreted, int16=torch.int16, int32=torch.int32, int64=torch.int64,
        where=lambda where, a, b: held(torch.where(where, a, b)),
        int8=torch.int8, float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16, uint8=torch.uint8, constexpr=None,
        **dict.fromkeys(("SliceLayout", "BlockedLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "DotOperandLayout"),
                        lambda *about, **more: None),
    )  # fmt: skip
    for module in (schedule, codes, widened, gated_codes, two_four, many_rows):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                monkeypatch.setattr(module, name, value.fn)
        for name, value in {
            "gl": language, "TiledProduct": Product, "STEP": 128, "ROWS": 64, "tma_load": tma_load,
            "ring": Slots, "mbarrier": SimpleNamespace(expect=expect), "warpgroup_mma": mma, "warpgroup_mma_wait": wait,
            "LARGEST": 448.0, "given_codes": given_codes,
            "activated": lambda x, kind: held(ACTIVATED[kind](x.as_subclass(Tensor))),
            "fence_async_shared": lambda: None, "wait_for_input": lambda: None, "let_next_begin": lambda: None,
            "barrier": lambda: None, "_layout_of_codes": lambda format: None, "_layout_of_scales": lambda format: None,
            "_layout_of_spread": lambda format: None,
            **dict.fromkeys(("_layout_of_repeated", "_layout_of_values", "_layout_of_places"), lambda: None),
            "VALUES": 64, "WORDS": 4, "range": lambda *about: map(held, range(*map(int, about))),
        }.items():  # fmt: skip
            monkeypatch.setattr(module, name, value, raising=False)
    for name, value in {
        "tma_store": tma_store, "tma_store_wait": lambda count: None, "Grid": Grid, "BLOCK_M": 128, "BLOCK_N": 256,
        "COLUMNS": 128, "GROUP": 8, "STAGES": 3,
    }.items():  # fmt: skip
        monkeypatch.setattr(many_rows, name, value)
    names = ("tile", "tile_n", "tile_m", "first", "stop")
    monkeypatch.setattr(schedule, "Run", lambda *given: SimpleNamespace(**dict(zip(names, given, strict=True))))

    class Emulated:
        def __init__(self, kernel: Any, describe: tuple[Any, ...]) -> None:
            self.run, self.boxes = kernel, [each.keywords["box"] for each in describe]

        def __call__(self, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
            made: list[Any] = [Descriptor(x, box) for x, box in zip(arguments, self.boxes, strict=False)]
            made += [flat(x) if isinstance(x, Tensor) else x for x in arguments[len(made) :]]
            given = {name: value for name, value in constants.items() if name not in launch.LAUNCH}
            current.programs = grid[0]
            for current.program in random.Random(0).sample(range(grid[0]), grid[0]):
                self.run(*made, **given)

    return Emulated
