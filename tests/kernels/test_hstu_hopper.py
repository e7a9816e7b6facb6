"""HSTU attention's Hopper kernels: run in Python against the definition, and compiled without a GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

import rooftile as rt  # noqa: E402
from rooftile.exact.backends.hopper.device import mask as device_mask  # noqa: E402
from rooftile.exact.backends.hopper.device import mma, nan_fallback, scheduler, softmax  # noqa: E402
from rooftile.exact.backends.hopper.flash_bwd import parts  # noqa: E402
from rooftile.exact.backends.hopper.flash_fwd import store  # noqa: E402
from rooftile.exact.backends.hopper.tiles import padded  # noqa: E402
from rooftile.exact.backends.hopper.tma import layout  # noqa: E402
from rooftile.recommend import hstu_attention  # noqa: E402
from rooftile.recommend.hstu.hopper import gradients_of_keys, gradients_of_rows, launch, outputs, users  # noqa: E402
from rooftile.recommend.hstu.problem import Problem, Users  # noqa: E402
from tests.kernels import emulated, hopper_machine_code  # noqa: E402
from tests.kernels.emulated import Held, held  # noqa: E402
from tests.kernels.emulated_copies import Box, Buffer, record, tma_load, tma_store  # noqa: E402
from tests.kernels.recorded import SHARED  # noqa: E402
from tests.recommend.hstu_cases import own_pairs  # noqa: E402

MODULES = (
    device_mask, mma, nan_fallback, scheduler, softmax, parts, store, users, outputs, gradients_of_keys, gradients_of_rows
)  # fmt: skip
NUMBERS = ("left", "right", "prefix", "chunk", "LEFT", "RIGHT", "PREFIX", "CHUNK")


class Slots(emulated.Slots):
    """A ring whose slots may also hold a work tile."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.works: dict[int, Any] = {}

    def wait_full(self, fill: int, wait: bool = True) -> None:
        if wait:
            super().wait_full(int(fill))


def publish(ring: Slots, fill: int, work: Any) -> None:
    ring.wait_empty(fill)
    with ring.changed:
        ring.works[fill], ring.due[fill] = work, 0
        ring.changed.notify_all()


def consume(ring: Slots, fill: int) -> Any:
    ring.wait_full(fill)
    ring.release(fill)
    return ring.works[fill]


class Bounds(SimpleNamespace):
    """`scheduler.MaskBounds` in Python."""

    def __init__(self, *given: Any) -> None:
        super().__init__(**dict(zip(NUMBERS, given, strict=True)))
        self.SLOPED = self.RIGHT and not (self.LEFT or self.CHUNK)

    def first_key(self, i: Any) -> Any:
        return device_mask.first_key(i, self.left, self.chunk, self.LEFT, self.CHUNK)

    def last_key(self, i: Any, S: Any) -> Any:
        return device_mask.last_key(
            i, S, self.right, self.prefix, self.chunk, self.RIGHT, self.PREFIX, self.CHUNK
        )  # fmt: skip

    def first_position(self, j: Any) -> Any:
        return device_mask.first_position(j, self.right, self.prefix, self.chunk, self.RIGHT, self.PREFIX, self.CHUNK)

    def last_position(self, j: Any) -> Any:
        return device_mask.last_position(j, self.left, self.chunk, self.LEFT, self.CHUNK)


class Config(SimpleNamespace):
    """`KernelConfig` and `BackwardConfig` in Python: layouts are none."""

    def __init__(self, **fields: Any) -> None:
        plain = {"ROWS": 64, "HEADS_PER_TILE": 1, "LIST_T": 0, "s_layout": None, "o_layout": None, "a_layout": None}
        super().__init__(**plain | {"acc_layout": None, "p_layout": None} | fields)

    def key_block(self, ring: Slots, fill: int) -> Buffer:
        return ring.buffer(fill).reshape([self.KEYS, self.D])

    def value_block(self, ring: Slots, fill: int) -> Buffer:
        return ring.buffer(fill).reshape([self.KEYS, self.DV])

    def query_head(self, row: Any, work: Any) -> Any:
        return work.h


ARITHMETIC: dict[str, Any] = {
    "min": torch.fmin, "ex2": torch.exp2, "add": torch.add, "mul": torch.mul, "rcp": torch.reciprocal
}  # fmt: skip


def asm(text: Any, constraints: str, arguments: list[Tensor], dtype: Any, is_pure: bool, pack: int) -> Held:
    """Runs PTX of fp32 arithmetic on neighbours in pairs."""
    assert pack == 2
    first, second = arguments[0].as_subclass(Tensor).unflatten(-1, (-1, 2)).unbind(-1)
    registers = {"$2": first, "$3": second}
    known = {"0f427C0000": 63.0, "0f3F800000": 1.0}
    for line in text.value.strip("{} ").split(";"):
        if line.strip() and not line.strip().startswith(".reg"):
            name, rest = line.strip().split(" ", 1)
            to, *given = (each.strip() for each in rest.split(","))
            operands = [registers[each] if each in registers else torch.tensor(known[each]) for each in given]
            registers[to] = ARITHMETIC[name.split(".")[0]](*operands)
    return held(torch.stack((registers["$0"], registers["$1"]), -1).flatten(-2))


def integer(x: Any) -> Tensor:
    return torch.as_tensor(x)


@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    current = SimpleNamespace(program=0, programs=1)
    none = lambda *about, **more: None  # noqa: E731
    gl = SimpleNamespace(
        program_id=lambda axis: held(current.program), num_programs=lambda axis: current.programs, load=emulated.load,
        store=emulated.store, atomic_add=lambda pointer, more, sem="": emulated.atomic_add(pointer, more),
        minimum=lambda a, b: held(torch.minimum(integer(a), integer(b))),
        maximum=lambda a, b: held(torch.maximum(integer(a), integer(b))),
        where=lambda where, a, b: held(torch.where(integer(where), integer(a), integer(b))),
        arange=lambda start, stop, layout: held(torch.arange(start, stop, dtype=torch.int32)),
        expand_dims=lambda x, dim: x.unsqueeze(dim), convert_layout=lambda x, layout: x,
        sum=lambda x, dim: held(x.sum(dim)), max=lambda x, dim: held(x.max(dim).values),
        associative_scan=lambda x, dim, f: held(x.cumsum(dim)),
        zeros=lambda shape, dtype, layout: held(torch.zeros(shape, dtype=dtype)),
        allocate_shared_memory=lambda dtype, shape, layout: Buffer(torch.full(shape, float("nan")).to(dtype)),
        warp_specialize=emulated.specialise, inline_asm_elementwise=asm, static_range=range, constexpr=None, int32=torch.int32,
        int64=torch.int64, float32=torch.float32, bfloat16=torch.bfloat16,
        **dict.fromkeys(("SliceLayout", "BlockedLayout", "DotOperandLayout", "SwizzledSharedLayout"), none),
    )  # fmt: skip
    names: dict[str, Any] = {
        "gl": gl, "ring": Slots, "Ring": None, "mbarrier": SimpleNamespace(expect=emulated.expect), "tma_load": tma_load,
        "tma_store": tma_store, "warpgroup_mma": emulated.mma, "warpgroup_mma_wait": emulated.wait, "publish": publish,
        "publish_end": lambda ring, fill: publish(ring, fill, SimpleNamespace(is_valid=0, t=0, last_block=0, T=0, S=0)),
        "consume": consume, "MaskBounds": Bounds, "KernelConfig": Config, "BackwardConfig": Config,
        "UserTensors": record("cu", "targets", "TARGETS"),
        "WorkTile": record(
            "is_valid", "b", "h", "t", "T", "S", "q_start", "k_start", "padded_start", "first_block", "last_block"
        ),
        "mma_qk": lambda a, b, DIM, layout: emulated.mma(a, b.permute((1, 0)), torch.zeros(()), use_acc=False),
        "pack_16bit": lambda p, dtype: held(p.bfloat16()), "unpack_16bit": lambda p, dtype, layout: p,
        "hide_from_ptxas": lambda x: x, "num_mmas": lambda DIM: 1, "TILE_ROWS": 128, "WG_ROWS": 64, "BLOCK": 64,
        "NUM_CONSUMERS": 2, "PING_PONG_BARRIER": 9, "WORK_TILE_WORDS": 16, "LOG2E": 1.4426950408889634, "FAR": 1 << 29,
        "MOST_SORTED": 32,
        **dict.fromkeys(("tma_store_wait", "wait_for_store", "fence_async_shared", "named_barrier"), none),
    }  # fmt: skip
    for module in MODULES:
        for name, value in list(vars(module).items()):
            if name in names:
                monkeypatch.setattr(module, name, names[name])
            elif isinstance(value, JITFunction):
                monkeypatch.setattr(module, name, value.fn)

    class Emulated:
        def __init__(self, kernel: Any, describe: tuple[Any, ...]) -> None:
            self.run, self.boxes = kernel, [one.keywords["box"] for one in describe]

        def __call__(self, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
            made = [Described(x, box) for x, box in zip(arguments, self.boxes, strict=False)]
            rest = [emulated.flat(x) if isinstance(x, Tensor) else x for x in arguments[len(made) :]]
            given = {name: value for name, value in constants.items() if name != "num_warps"}
            current.programs = grid[0]
            for current.program in random.Random(0).sample(range(grid[0]), grid[0]):
                self.run(*made, *rest, **given)

    for name in ("hstu_forward", "hstu_gradients_of_keys", "hstu_gradients_of_rows"):
        monkeypatch.setattr(launch, name, getattr(launch, name).fn)
    monkeypatch.setattr(launch, "Kernel", Emulated)
    monkeypatch.setattr(launch, "processors", lambda device: 3)
    monkeypatch.setattr(launch, "counter", lambda device: torch.zeros(2, dtype=torch.int32))
    launch._kernel.cache_clear()
    yield
    launch._kernel.cache_clear()


class Described(Box):
    """Rows of a packed tensor as boxes of (1, head, row, element)."""

    def __init__(self, x: Tensor, box: tuple[int, int, int]) -> None:
        assert x.data_ptr() % 16 == 0
        self.x, self.box, self.dtype, self.layout = x.permute(1, 0, 2)[None], (1, *box), x.dtype, None
        self.shape = [held(n) for n in self.x.shape]
        self.block_type = SimpleNamespace(nbytes=torch.Size(box).numel() * x.element_size())


MASKS = {
    "causal": rt.CAUSAL, "full": rt.FULL, "window": rt.CAUSAL & rt.Window(70), "both sides": rt.Window(30, 50),
    "prefix": rt.Prefix(90), "chunk": rt.CAUSAL & rt.Chunk(96),
}  # fmt: skip


def drawn(lengths: tuple[int, ...], D: int) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    total = sum(lengths)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return [torch.randn(total, 2, D).bfloat16() for _ in range(4)], cu


def check(mask: str, lengths: tuple[int, ...], D: int, targets: tuple[int, ...] | None = None) -> None:
    """Compares outputs and gradients with the definition's, without targets' pairs with themselves."""
    (q, k, v, dy), cu = drawn(lengths, D)
    scale = None if D == 128 else 1 / 300
    problem = Problem(0.3, scale, MASKS[mask], 0, 0)
    flag = torch.zeros(1, dtype=torch.int32)
    given = Users(cu, None if targets is None else torch.tensor(targets, dtype=torch.int32))
    found = [launch.forward(q, k, v, given, problem, flag), *launch.backward(dy, q, k, v, given, problem, flag)]
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    words = {} if targets is None else {"targets": given.targets}
    y = hstu_attention(*leaves, cu, alpha=0.3, mask=MASKS[mask], scale=scale, backend="eager", **words)
    if targets is not None:
        y = y - own_pairs(*leaves, cu, targets, 0.3, scale)
    due = [y, *torch.autograd.grad(y, leaves, dy.double())]
    for one, exact in zip(found, due, strict=True):
        assert (one.double() - exact).norm() <= 6e-3 * exact.norm()
    assert not flag.item()


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize(("D", "lengths"), [(128, (130, 0, 1, 300)), (64, (70, 260))])
@pytest.mark.parametrize("mask", MASKS)
def test_outputs_and_gradients(mask: str, lengths: tuple[int, ...], D: int) -> None:
    check(mask, lengths, D)


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("mask", ["causal", "prefix"])
def test_targets(mask: str) -> None:
    """Targets that begin inside a tile, fill some, and are all that a user has."""
    check(mask, (130, 0, 200, 300), 128, (7, 0, 200, 140))


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("row", [0, 1, 2, 3])
def test_a_hidden_nan_sets_the_flag(row: int) -> None:
    """A weight of zero does not hide it: what is behind the mask, or the next user's, in any input."""
    (q, k, v, dy), cu = drawn((100, 60), 64)
    given, flag, problem = Users(cu), torch.zeros(1, dtype=torch.int32), Problem(0.3, None, rt.CAUSAL, 0, 0)
    (q, k, v, dy)[row][90:110] = torch.nan
    y = launch.forward(q, k, v, given, problem, flag)
    assert flag.item() or torch.equal(y[:90].isnan().any(), torch.tensor(False))
    launch.backward(dy, q, k, v, given, problem, flag)
    assert flag.item()


def compiled(kernel: Any, D: int, mask: rt.Mask, targets: bool, tile: Any) -> hopper_machine_code.Found:
    """A kernel's machine code, as `launch` starts it."""
    bounds = (mask.left is not None, mask.right is not None, mask.prefix is not None, bool(mask.chunks))
    constants = {word: x for word, x in launch._constants(D, bounds, targets, tile).items() if word != "num_warps"}

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.endswith("_desc"):
            box = (1, 1, tile.KEYS if name in ("k_desc", "v_desc") and hasattr(tile, "KEYS") else 64, padded(D))
            return f"tensordesc<bf16{list(box)},{layout(box, torch.bfloat16)!r}>"
        if name.endswith("_ptr"):
            return "*i32" if name in ("cu_ptr", "targets_ptr", "nan_flag_ptr", "counter_ptr") else "*bf16"
        return "fp32" if name in ("alpha", "scale") else "i32"

    names = kernel.arg_names
    source = GluonASTSource(
        kernel, {name: kind(name) for name in names}, {(names.index(word),): x for word, x in constants.items()},
        {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if name.endswith("_ptr")},
    )  # fmt: skip
    built, words = hopper_machine_code._build(source, {"num_warps": 4}, anew=True)
    return hopper_machine_code._read(built, words, SimpleNamespace(kernel="flash_bwd"))


@pytest.mark.parametrize(
    ("name", "D", "mask", "targets"),
    [
        ("hstu_forward", 128, rt.CAUSAL, True), ("hstu_forward", 64, rt.Window(9, 9) & rt.Chunk(8) & rt.Prefix(5), False),
        ("hstu_gradients_of_keys", 128, rt.CAUSAL, True), ("hstu_gradients_of_keys", 64, rt.CAUSAL, False),
        ("hstu_gradients_of_rows", 128, rt.CAUSAL, True),
    ],
)  # fmt: skip
def test_kernels_fit_the_chip_and_keep_their_loops_in_registers(name: str, D: int, mask: rt.Mask, targets: bool) -> None:
    tiles = {"hstu_forward": launch.FORWARD, "hstu_gradients_of_keys": launch.KEYS, "hstu_gradients_of_rows": launch.QUERIES}
    found = compiled(getattr(launch, name), D, mask, targets, tiles[name][D > 64])
    assert found.shared <= SHARED[90]
    assert found.products > 0
    assert not found.serialised, "ptxas takes the matrix products one by one (a C75xx warning)"
    # a word or two in the loop under a mask, as in the softmax backward
    assert found.hot_spills <= (4 if name == "hstu_gradients_of_keys" else 0)
    assert (found.undefined, found.overwritten) == (0, 0)
