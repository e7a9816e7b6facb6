"""The sizes of a call, its tiles, and what forward and backward both compute first: steps, C B^T, states of segments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.recurrent.kernels.copies import Box, copying, is_aligned, token_box
from rooftile.recurrent.kernels.parts import processors, readable
from rooftile.recurrent.kernels.state_space.states import _scan, _segment_sums
from rooftile.recurrent.kernels.state_space.tiles import _products, _steps
from rooftile.recurrent.linear.kernels.tiles import is_hopper
from rooftile.recurrent.rule import Given, Tensors
from rooftile.runtime.devices import capability, lack_of_gluon
from rooftile.runtime.launch import BoundedCache, Kernel, empties, kind_of

_start_steps, _start_products, _start_sums, _start_scan = map(Kernel, (_steps, _products, _segment_sums, _scan))
# tokens of a segment where a sequence is cut, numbers of a state that a program of the scan carries, heads of a program of steps
_SEGMENT, _SCANNED, STEPPED = 2048, 1024, 16
# sums of segments that the scan reads before it needs them
AHEAD = 4


class Launch(NamedTuple):
    """A kernel, its programs, the numbers behind its tensors, its constants, and the boxes in which it copies the first tensors."""

    kernel: Kernel
    grid: tuple[int, int, int]
    numbers: tuple[Any, ...]
    own: dict[str, Any]
    boxes: tuple[Box, ...] = ()

    def bound(self, copies: bool) -> Callable[..., None]:
        """Returns a launch that takes the tensors alone."""
        kernel = copying(self.kernel, self.boxes) if copies and self.boxes else self.kernel
        return kernel.bound(self.grid, self.numbers, self.own)


class Tile(NamedTuple):
    """Tokens and columns of a tile, warps and stages of the kernels that walk, and of the other kernels of the backward."""

    block: int
    columns: int
    warps: int
    stages: int
    # tokens whose pairs are summed at once
    rows: int = 64
    pair_warps: int = 8
    pair_stages: int = 1
    # numbers of a state in a tile
    of_state: int = 64
    map_warps: int = 8
    map_stages: int = 1


# the most that spills nothing, as compiled by Triton 3.6 for sm90 and sm80, but for the backward of bf16 on Hopper, which is faster
# with spills (tests/kernels/test_state_space_compiles.py counts them); the second of a pair is for more than 128 numbers of
# state. fp16 has not the range of sums over a long text, so its products are of tf32, as exact as fp16; bf16 has it
_FORWARD = {
    (torch.bfloat16, True): (Tile(64, 64, 4, 1), Tile(64, 32, 8, 2)),
    (torch.bfloat16, False): (Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
    (torch.float16, True): (Tile(32, 16, 8, 2), Tile(32, 16, 8, 2)),
    (torch.float16, False): (Tile(32, 16, 8, 2), Tile(32, 16, 8, 2)),
    (torch.float32, True): (Tile(16, 16, 8, 2), Tile(16, 16, 8, 2)),
    (torch.float32, False): (Tile(16, 16, 8, 2), Tile(16, 16, 8, 2)),
}
_BACKWARD = {
    (torch.bfloat16, True): (Tile(64, 64, 4, 3, 64, 4, 1, 64, 4, 3), Tile(32, 64, 8, 2, 32)),
    (torch.bfloat16, False): (Tile(32, 32, 8, 2, 32), Tile(32, 32, 8, 2, 32)),
    (torch.float16, True): (Tile(32, 16, 8, 2, 32), Tile(16, 16, 8, 2, 16)),
    (torch.float16, False): (Tile(32, 16, 8, 2, 32), Tile(16, 16, 8, 2, 16)),
    (torch.float32, True): (Tile(16, 16, 8, 2, 16), Tile(16, 16, 8, 2, 16)),
    (torch.float32, False): (Tile(16, 16, 8, 2, 16), Tile(16, 16, 8, 2, 16)),
}


# bf16 on Hopper with up to 128 numbers of state, tiles copied by the chip's copy engine: forward and backward
_COPIED = (Tile(64, 64, 4, 3), Tile(64, 64, 4, 3, 64, 4, 2, 64, 4, 3))


def tile_of(N: int, dtype: torch.dtype, hopper: bool, back: bool = False, copies: bool = False) -> Tile:
    """Returns the tile of a call with N numbers of state."""
    return _COPIED[back] if copies else (_BACKWARD if back else _FORWARD)[dtype, hopper][N > 128]


@cache
def constants_of(
    P: int, N: int, dtype: torch.dtype, hopper: bool, heads: int, groups: int, packed: bool, back: bool = False,
    copies: bool = False, **own: Any,
) -> dict[str, Any]:  # fmt: skip
    """Returns what every kernel may take; one dictionary for the same arguments: a launch is recognised by it."""
    tile = tile_of(N, dtype, hopper, back, copies)
    # a tile of z beside the others spills in four warps
    warps = 8 if own.get("GATED") else tile.warps
    return {
        "HEADS": heads, "SHARE": heads // groups, "P": P, "N": N, "PACKED": packed, "COPIES": copies, "BLOCK_H": STEPPED,
        "BLOCK": tile.block, "BLOCK_P": min(max(triton.next_power_of_2(P), 16), tile.columns),
        "BLOCK_N": max(triton.next_power_of_2(N), 16), "DOT": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32", "num_warps": warps, "num_stages": tile.stages,
    } | own  # fmt: skip


@cache
def some(kernel: Kernel, key: tuple[Any, ...], **own: Any) -> dict[str, Any]:
    """The constants that a kernel takes."""
    names = {*kernel.fn.arg_names, "num_warps", "num_stages"}
    return {name: value for name, value in constants_of(*key, **own).items() if name in names}


# sizes, constants and launches that calls of a kind share
_known = BoundedCache()


class Call:
    """The sizes of a call, and its steps, sums and products of B and C.

    Calls of one kind, whose tensors have the same sizes, strides and dtypes, share sizes and launches: the host's time for a call
    would else be longer than the kernels'.
    """

    def __init__(
        self, tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given, dy: Tensor | None = None
    ) -> None:
        x, self.dt, B, C, z = tokens
        assert x is not None
        assert self.dt is not None
        assert B is not None
        assert C is not None
        # the sums of exponents of segments
        self.decay: Tensor | None = None
        self.x, self.B, self.C = (readable(given) for given in (x, B, C))
        self.z = None if z is None else readable(z)
        # the gradient of the output where a backward is called
        self.dy = None if dy is None else readable(dy)
        self.A, self.D, self.bias = constants
        assert self.A is not None
        self.cu, self.options = x if cu is None else cu, options
        kind = (*kind_of(*tokens, *constants, state, cu, dy), *options)
        common = _known.get(kind)
        if common is None:
            common = _known[kind] = self._common(state, cu is not None)
        self.__dict__.update(common)

    def _common(self, state: Tensor, packed: bool) -> dict[str, Any]:
        """Returns what all calls of the kind have in common."""
        own = {*self.__dict__}
        x, back = self.x, self.dy is not None
        copied = [one for one in (self.x, self.B, self.C, self.dy) if one is not None]
        self.packed, self.T, (self.H, self.P) = packed, x.shape[-3], x.shape[-2:]
        self.G, self.N = self.B.shape[-2:]
        self.count = state.shape[0]
        hopper = is_hopper(x.device)
        # packed sequences end inside of tiles
        self.copies = hopper and x.dtype == torch.bfloat16 and self.N <= 128 and not packed and all(map(is_aligned, copied))
        self.key = self.P, self.N, x.dtype, hopper, self.H, self.G, packed, back, self.copies
        constants = constants_of(*self.key)
        self.tile = tile_of(self.N, x.dtype, hopper, back, self.copies)
        self.block: int = constants["BLOCK"]
        self.columns, self.numbers = constants["BLOCK_P"], constants["BLOCK_N"]
        self.parts: int = triton.cdiv(self.P, self.columns)
        self.size = self._segment()
        self.slots = self.T // self.size + self.count if packed else -(-self.T // self.size) * self.count
        self.chunks = self.size // self.block
        # whether each segment is a whole sequence
        self.whole = not packed and self.size >= self.T
        # objects that the first call makes, by name
        self.made: dict[Any, Any] = {}
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def once(self, name: Any, make: Callable[[], Any]) -> Any:
        """Returns what `make` returned at the first call of the kind."""
        found = self.made.get(name)
        if found is None:
            found = self.made[name] = make()
        return found

    def floats(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Makes an empty tensor; `name` has one shape and dtype in all calls of a kind."""
        found: Tensor = self.once(("empty", name), lambda: empties(shape, dtype, self.x.device))()
        return found

    def _segment(self) -> int:
        # a sequence is not cut if batch and heads alone give each processor two programs
        at_once = 2 * processors(self.x.device)
        if not self.packed and (self.count * self.H >= at_once or self.T <= _SEGMENT // 4):
            return max(-(-self.T // self.block), 1) * self.block
        size = _SEGMENT
        while size > 4 * self.block and self.T // size * self.H < 2 * at_once:
            size //= 2
        if self.packed:
            return size

        def chunks_in_turn(size: int) -> int:
            return -(-(-(-self.T // size) * self.count * self.H) // at_once) * size

        # the last turn of programs is as full as may be; of equal sizes the largest, which has the fewest states
        sizes = range(size, max(size // 2 // self.block, 1) * self.block - 1, -self.block)
        return min(sizes, key=chunks_in_turn)

    def strides(self, x: Tensor | None) -> tuple[int, int, int]:
        if x is None:
            return (0, 0, 0)
        return (0, x.stride(0), x.stride(1)) if self.packed else (x.stride(0), x.stride(1), x.stride(2))

    @property
    def skip(self) -> Tensor:
        """D, or a tensor in its place."""
        return self.A if self.D is None else self.D

    @property
    def skip_strides(self) -> tuple[int, int]:
        return self.skip.stride(0), self.skip.stride(1) if self.skip.ndim == 2 else 0

    def prepare(self) -> None:
        """Writes steps, sums of exponents, and C B^T."""
        self.prepare_steps()
        kept = self.x.dtype if self.x.dtype == torch.bfloat16 else torch.float32
        self.cb = self.floats("cb", self.slots, self.chunks, self.G, self.block, self.block, dtype=kept)
        self.start("products", (self.B, self.C, self.cb, self.cu), self._products)

    def prepare_steps(self) -> None:
        """Writes steps and sums of exponents."""
        self.steps = self.floats("steps", 2, self.H, self.slots, self.size)
        self.step, self.total = self.steps.unbind()
        self.start(
            "steps", (self.dt, self.A if self.bias is None else self.bias, self.A, self.step, self.total, self.cu), self._steps
        )

    def _steps(self) -> Launch:
        softplus, low, high = self.options
        own = some(_start_steps, self.key, SOFTPLUS=bool(softplus), BIAS=self.bias is not None)
        numbers = (self.strides(self.dt), *self.sizes, self.slots, float(low), float(high))
        return Launch(_start_steps, (self.slots * self.chunks, triton.cdiv(self.H, STEPPED), 1), numbers, own)

    def _products(self) -> Launch:
        numbers = (self.strides(self.B), self.strides(self.C), *self.sizes)
        own = some(_start_products, self.key, GROUPS=self.G)
        return Launch(_start_products, (self.slots, self.chunks, self.G), numbers, own)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.T, self.count, self.size

    def start(self, name: Any, tensors: tuple[Tensor, ...], make: Callable[[], Launch]) -> None:
        """Launches the kernel that `name` has in all calls of a kind, on tensors that follow each other in its signature."""
        self.once(name, lambda: make().bound(self.copies))(*tensors)

    def suits_warpgroups(self, y: Tensor) -> bool:
        """Whether the kernels of Hopper's warpgroups run: heads of 64, one number of D a head in a backward, y or its gradient."""
        found: bool = self.once(("warpgroups", y.dtype), lambda: (self._suits_warpgroups(y),))[0]
        return found

    def _suits_warpgroups(self, y: Tensor) -> bool:
        sizes = self.P == 64 and self.N in (64, 128) and self.steps.numel() < 1 << 31 and (self.D is None or self.D.ndim == 1)
        return self.copies and sizes and y.dtype == torch.bfloat16 and capability(y.device) == (9, 0) and not lack_of_gluon()

    def walked(self, v: Tensor, back: bool) -> tuple[Tensor, Tensor]:
        """Returns what a walk over states reads beside steps and sums."""
        return v, self.C if back else self.B

    def walked_strides(self, v: Tensor, back: bool) -> tuple[tuple[int, int, int], ...]:
        return tuple(map(self.strides, self.walked(v, back)))

    def starts(self, first: Tensor, v: Tensor, back: bool = False) -> Tensor:
        """Returns the state, or its gradient, with which the walk over each segment begins; `first` is each sequence's."""
        return first if self.whole else self._scanned(first, v, back, first, False)

    def end(self, first: Tensor, v: Tensor, back: bool = False) -> Tensor:
        """Returns the states behind the tokens, or the gradients of those before them, from the ones at the other end."""
        found = self.floats("end", *first.shape, dtype=first.dtype)
        self._scanned(first, v, back, found, True)
        return found

    def _scanned(self, first: Tensor, v: Tensor, back: bool, found: Tensor, end: bool) -> Tensor:
        part = self.floats("parts", self.slots, self.H, self.P, self.N)
        decay = self.decay = self.floats("decay", self.slots, self.H)
        tensors = (*self.walked(v, back), self.step, self.total, part, decay, self.cu)
        self.start(("sums", back, end), tensors, lambda: self._sums(v, back, end))
        self.start(("scan", back, end), (part, first, decay, found, self.cu), lambda: self._scan(back, end))
        return part

    def _sums(self, v: Tensor, back: bool, end: bool) -> Launch:
        numbers = (*self.walked_strides(v, back), *self.sizes, self.slots)
        tiles = token_box(self.block, self.columns), token_box(self.block, self.numbers)
        own = some(_start_sums, self.key, BACK=back, END=end)
        return Launch(_start_sums, (self.slots, self.H, self.parts), numbers, own, tiles)

    def _scan(self, back: bool, end: bool) -> Launch:
        size = self.P * self.N
        own = some(_start_scan, self.key, SIZE=size, BLOCK=_SCANNED, AHEAD=AHEAD, BACK=back, END=end)
        return Launch(_start_scan, (triton.cdiv(size, _SCANNED), self.count, self.H), self.sizes, own)
