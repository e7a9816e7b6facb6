"""Runs Gluon kernels whose tiles have four axes in Python, with the parts of `emulated`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from rooftile.recurrent.kernels import copies_hopper
from rooftile.recurrent.kernels.copies import axes_of
from tests.kernels import emulated
from tests.kernels.emulated import Shared, Slots, flat, held


def record(*names: str) -> Any:
    """Returns what makes a record of plain values in place of Gluon's."""
    return lambda *given: SimpleNamespace(**dict(zip(names, given, strict=True)))


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

    def slice(self, start: int, length: int, dim: int) -> Buffer:
        return Buffer(self.x.narrow(dim, start, length))


def emulate_copies(
    monkeypatch: pytest.MonkeyPatch,
    modules: tuple[Any, ...],
    functions: tuple[Any, ...],
    cached: tuple[Any, ...],
    **names: Any,
) -> Iterator[None]:
    """Replaces Gluon in `modules`, and the launches of `functions`, which `cached` remember; sets names."""
    current = SimpleNamespace(program=(0, 0, 0))
    none = lambda *about, **more: None  # noqa: E731
    language = SimpleNamespace(
        program_id=lambda axis: held(current.program[axis]), load=emulated.load, store=emulated.store,
        minimum=lambda a, b: held(torch.minimum(torch.as_tensor(a), torch.as_tensor(b))),
        arange=lambda start, stop, layout: held(torch.arange(start, stop, dtype=torch.int32)),
        expand_dims=lambda x, dim: x.unsqueeze(dim), convert_layout=lambda x, layout: x, exp2=lambda x: held(torch.exp2(x)),
        where=lambda where, a, b: held(torch.where(where, a, b)), sum=lambda x, dim: held(x.sum(dim)),
        zeros=lambda shape, dtype, layout: held(torch.zeros(shape, dtype=dtype)),
        allocate_shared_memory=lambda dtype, shape, layout: Buffer(torch.full(shape, float("nan"), dtype=dtype)),
        warp_specialize=emulated.specialise, int64=torch.int64, float32=torch.float32, static_range=range, constexpr=None,
        SliceLayout=none, DotOperandLayout=none, NVMMASharedLayout=SimpleNamespace(get_default_for=none),
    )  # fmt: skip
    kernels = {fn: fn.fn for fn in functions}
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                monkeypatch.setattr(module, name, value.fn)
        for name, value in {
            "gl": language, "ring": Slots, "Ring": None, "mbarrier": SimpleNamespace(expect=emulated.expect),
            "tma_load": tma_load, "tma_store": tma_store,
            "tma_store_wait": none, "wait_for_store": none, "barrier": none, "fence_async_shared": none,
            "warpgroup_mma": emulated.mma, "warpgroup_mma_wait": emulated.wait, "CHUNK": 64, "PIECE": 32, "accumulator": none,
            **names,
        }.items():  # fmt: skip
            monkeypatch.setattr(module, name, value, raising=False)

    class Emulated:
        def __init__(self, kernel: Any, describe: tuple[Any, ...]) -> None:
            self.run, self.boxes = kernels[kernel], [one.keywords.get("box", 64) for one in describe]

        def __call__(self, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
            made = [Box(x, box) for x, box in zip(arguments, self.boxes, strict=False)]
            rest = [flat(x) if isinstance(x, Tensor) else x for x in arguments[len(made) :]]
            given = {name: value for name, value in constants.items() if name != "num_warps"}
            programs = list(product(*map(range, grid)))
            for current.program in random.Random(0).sample(programs, len(programs)):
                self.run(*made, *rest, **given)

        def bound(self, grid: tuple[int, int, int], numbers: tuple[Any, ...], constants: dict[str, Any]) -> Any:
            return lambda *tensors: self(grid, (*tensors, *numbers), constants)

    monkeypatch.setattr(copies_hopper, "Kernel", Emulated)
    for made in cached:
        made.cache_clear()
    yield
    for made in cached:
        made.cache_clear()


def compiled_copies(kernel: Any, launched: Any, constants: dict[str, Any], **kinds: Any) -> Any:
    """Compiles a Gluon kernel for Hopper as `launched` starts it; `kinds` are what numbers are, if not 32 bits."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    constants = {word: value for word, value in constants.items() if word in kernel.arg_names}
    x = torch.empty(2, 128, 80, 128, dtype=torch.bfloat16)
    described = [make(torch.empty(2, 4, 8)) if "count" in make.keywords else make(x) for make in launched._describe]
    signature: dict[str, Any] = {}
    for word in kernel.arg_names:
        if word.endswith("_desc"):
            box = described[len(signature)]
            kind = "fp32" if len(box.block_shape) == 1 else "bf16"
            signature[word] = f"tensordesc<{kind}{list(box.block_shape)},{box.layout!r}>"
        elif word.endswith("_ptr"):
            signature[word] = "*fp32"
        else:
            signature[word] = "constexpr" if word in constants else kinds.get(word, "i32")
    places = {(kernel.arg_names.index(word),): value for word, value in constants.items()}
    even = {(n,): [["tt.divisibility", 16]] for n, word in enumerate(kernel.arg_names) if word.endswith("_ptr")}
    source = GluonASTSource(kernel, signature, places, even)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
