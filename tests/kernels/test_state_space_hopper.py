"""The walk over pairs of heads on Hopper, run in Python: against the definition, and what it leaves to the other kernels."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile import recurrent as rec

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.recurrent.kernels.state_space import launch_hopper, outputs_hopper  # noqa: E402
from rooftile.recurrent.kernels.state_space.call import Call  # noqa: E402
from rooftile.recurrent.kernels.state_space.copies import axes_of  # noqa: E402
from tests.kernels import emulated  # noqa: E402
from tests.kernels.emulated import Shared, Slots, flat, held  # noqa: E402

pytestmark = pytest.mark.usefixtures("_emulated")


class Box:
    """A tensor as the copy engine takes it, or a line of numbers."""

    def __init__(self, x: Tensor, box: Any) -> None:
        if isinstance(box, int):
            self.x, box = x.view(-1), [box]
        else:
            shape, strides, box = axes_of(x, box)
            assert all(stride * x.element_size() % 16 == 0 for stride in strides[:-1])
            self.x = x.as_strided(shape, strides, x.storage_offset())
        assert x.data_ptr() % 16 == 0
        self.box, self.dtype, self.layout = box, x.dtype, None
        self.block_type = SimpleNamespace(nbytes=torch.Size(box).numel() * x.element_size())

    def part(self, place: list[Any]) -> Tensor:
        """The part of a box that is there."""
        return self.x[tuple(slice(int(n), int(n) + size) for n, size in zip(place, self.box, strict=True))]


def tma_load(box: Box, place: list[Any], barrier: Any, to: Shared) -> None:
    part = box.part(place)
    to.x.zero_()
    to.x[tuple(slice(0, n) for n in part.shape)] = part
    with barrier.ring.changed:
        barrier.ring.due[barrier.fill] -= box.block_type.nbytes
        assert barrier.ring.due[barrier.fill] >= 0
        barrier.ring.changed.notify_all()


def tma_store(box: Box, place: list[Any], output: Shared) -> None:
    part = box.part(place)
    part.copy_(output.x[tuple(slice(0, n) for n in part.shape)])


class Buffer(Shared):
    """Shared memory whose boxes are taken as matrices."""

    def index(self, i: Any) -> Buffer:
        return Buffer(self.x[int(i)])

    def reshape(self, shape: list[int]) -> Buffer:
        return Buffer(self.x.view(shape))

    def permute(self, dims: tuple[int, ...]) -> Buffer:
        return Buffer(self.x.permute(dims))


@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    current = SimpleNamespace(program=0)
    none = lambda *about, **more: None  # noqa: E731
    language = SimpleNamespace(
        program_id=lambda axis: held(current.program), load=emulated.load, store=emulated.store,
        minimum=lambda a, b: held(torch.minimum(torch.as_tensor(a), torch.as_tensor(b))),
        arange=lambda start, stop, layout: held(torch.arange(start, stop, dtype=torch.int32)),
        expand_dims=lambda x, dim: x.unsqueeze(dim), convert_layout=lambda x, layout: x, exp2=lambda x: held(torch.exp2(x)),
        where=lambda where, a, b: held(torch.where(where, a, b)),
        zeros=lambda shape, dtype, layout: held(torch.zeros(shape, dtype=dtype)),
        allocate_shared_memory=lambda dtype, shape, layout: Buffer(torch.full(shape, float("nan"), dtype=dtype)),
        warp_specialize=emulated.specialise, int64=torch.int64, float32=torch.float32, static_range=range, constexpr=None,
        SliceLayout=none, DotOperandLayout=none, NVMMASharedLayout=SimpleNamespace(get_default_for=none),
    )  # fmt: skip
    for name, value in {
        "gl": language, "ring": Slots, "Ring": None, "mbarrier": SimpleNamespace(expect=emulated.expect), "tma_load": tma_load,
        "tma_store": tma_store, "tma_store_wait": none, "wait_for_store": none, "barrier": none, "fence_async_shared": none,
        "warpgroup_mma": emulated.mma, "warpgroup_mma_wait": emulated.wait, "CHUNK": 64, "_accumulator": none,
        "Shape": lambda N, SKIP: SimpleNamespace(N=N, SKIP=SKIP), "_load": outputs_hopper._load.fn,
        "_walk": outputs_hopper._walk.fn,
    }.items():  # fmt: skip
        monkeypatch.setattr(outputs_hopper, name, value)
    kernel, described = outputs_hopper._outputs_of_pairs.fn, launch_hopper._kernel

    def started(N: int) -> Any:
        boxes = [*(each.keywords["box"] for each in described(N)._describe[:-1]), 64]

        def start(grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
            made = [Box(x, box) for x, box in zip(arguments, boxes, strict=False)]
            rest = [flat(x) if isinstance(x, Tensor) else x for x in arguments[len(made) :]]
            given = {name: value for name, value in constants.items() if name != "num_warps"}
            for current.program in random.Random(0).sample(range(grid[0]), grid[0]):
                kernel(*made, *rest, **given)

        return start

    monkeypatch.setattr(launch_hopper, "_kernel", started)


def prepared(call: Call, tokens: tuple[Tensor, ...], rates: Tensor) -> None:
    """Steps, sums of exponents and C B^T, as the kernels before this one write them."""
    _, dt, B, C = tokens
    batch, T, H = dt.shape
    segments, chunks = call.slots // batch, call.chunks

    def cut(x: Tensor) -> Tensor:
        padded = torch.zeros(batch, segments * call.size, *x.shape[2:])
        padded[:, :T] = x.float()
        return padded.view(call.slots, chunks, 64, *x.shape[2:])

    step = cut(torch.nn.functional.softplus(dt.float()))
    step.view(batch, -1, H)[:, T:] = 0
    total = (step.double() * rates.double() * torch.log2(torch.tensor(torch.e, dtype=torch.float64))).cumsum(2).float()
    call.steps = torch.stack([x.permute(3, 0, 1, 2).reshape(H, call.slots, call.size) for x in (step, total)]).contiguous()
    call.cb = torch.einsum("sctgn,scugn->scgtu", cut(C), cut(B)).to(torch.bfloat16).contiguous()


@pytest.mark.parametrize(("batch", "T", "N", "G", "size"), [(2, 130, 128, 2, 64), (1, 200, 64, 1, 128), (3, 61, 128, 1, 64)])
def test_the_walk_equals_the_definition(batch: int, T: int, N: int, G: int, size: int) -> None:
    torch.manual_seed(0)
    H, P = 4, 64
    x, dt, B, C = (torch.randn(batch, T, *rest).bfloat16() for rest in ((H, P), (H,), (G, N), (G, N)))
    A, D, state = -torch.rand(H) * 4, torch.randn(H), torch.randn(batch, H, P, N)
    call = Call((x, dt, B, C, None), (A, D, None), state, None, (True, 0.0, float("inf")))
    assert call.copies
    # segments of the test's own
    call.size, call.slots, call.chunks, call.whole = size, -(-T // size) * batch, size // 64, size >= T
    prepared(call, (x, dt, B, C), A)

    def defined(until: int) -> tuple[Tensor, Tensor]:
        tokens = [each[:, :until].double() for each in (x, dt)], [each[:, :until].double() for each in (B, C)]
        found = rec.ssd(*tokens[0], A.double(), *tokens[1], D=D.double(), state=state.double(), backend="eager")
        return found[0], found[1].float()

    starts = state if call.whole else torch.stack([defined(t)[1] if t else state for t in range(0, T, size)], 1).flatten(0, 1)
    y, last = torch.full_like(x, float("nan")), torch.full_like(state, float("nan"))
    launch_hopper.write_outputs(call, starts.contiguous(), y, last)
    due, due_last = defined(T)
    assert (y.double() - due).norm() <= 8e-3 * due.norm()
    assert (last - due_last).norm() <= 8e-3 * due_last.norm()


def test_nothing_is_read_or_written_outside_of_a_sequence() -> None:
    """A sequence whose last chunk is not full leaves the next one's rows alone."""
    T, H, N = 70, 2, 64
    x, B, C = (torch.full((2, T, *rest), 1.0).bfloat16() for rest in ((H, 64), (1, N), (1, N)))
    x[1] = float("nan")
    dt, A, state = torch.ones(2, T, H), -torch.ones(H), torch.zeros(2, H, 64, N)
    call = Call((x, dt, B, C, None), (A, None, None), state, None, (True, 0.0, float("inf")))
    prepared(call, (x, dt, B, C), A)
    y, last = torch.empty_like(x), torch.empty_like(state)
    launch_hopper.write_outputs(call, state, y, last)
    assert y[0].isfinite().all()
    assert last[0].isfinite().all()
    assert y[1].isnan().all()
