"""Launches Triton and Gluon kernels with as little of the host's time as it takes, and lets an observer see every launch.

Triton's own launch binds all arguments to the kernel's signature to find what was compiled for such arguments, and encodes every
descriptor of the copy engine anew. A `Kernel` does that for the first launch of a kind only. The later ones hand addresses and
numbers to the compiled kernel, and descriptors that were encoded before: a descriptor depends on an address, sizes and strides,
and PyTorch gives out the same addresses again and again.

Private names of PyTorch and Triton that concern launching are used in this file only. Importing it does not import Triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

Grid = tuple[int, int, int]
# makes a descriptor for the copy engine
Describe = Callable[[Tensor], Any]

# the public ways to ask make objects, and cost as much host time as all else in a launch; a PyTorch without CUDA has neither
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)

# products and sums become one operation where a kernel does not say otherwise. Triton 3.9 warns where nothing is said, since its
# default changes in 3.10
FUSION = {"enable_fp_fusion": True}


_observers: list[Callable[[str], None]] = []


@contextmanager
def observe(callback: Callable[[str], None]) -> Iterator[None]:
    """Calls `callback` with the kernel's name at every launch inside the `with` block, on all threads and in the interpreter too.

    Example:
        >>> names = []
        >>> with observe(names.append):
        ...     rt.attention(q, k, v)
    """
    _observers.append(callback)
    try:
        yield
    finally:
        _observers.remove(callback)


class BoundedCache(dict[Any, Any]):
    """A dictionary that is emptied when a new key finds it full: a growing KV cache has a new length at each step."""

    def __init__(self, capacity: int = 1024) -> None:
        super().__init__()
        self.capacity = capacity

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= self.capacity and key not in self:
            self.clear()
        super().__setitem__(key, value)


class Kernel:
    """A Triton or Gluon kernel that can be launched again in little of the host's time.

    Its arguments are given in the kernel's order. The first `len(describe)` of them are tensors that the kernel takes as
    descriptors of the copy engine, each made by the function at its place in `describe`. Compile-time arguments come last.
    `constants` is one and the same dictionary, never changed, for the same constants: it is recognised by its identity.

    Example:
        >>> kernel = Kernel(add)
        >>> kernel((programs, 1, 1), (x, o, n), constants)
    """

    def __init__(self, fn: Any, describe: tuple[Describe, ...] = ()) -> None:
        self.fn = fn
        self.name: str = fn.fn.__name__
        self._describe = describe
        # an encoded descriptor, by the tensor's address, sizes, strides and dtype
        self._encoded = tuple(BoundedCache() for _ in describe)
        # how a kind of launch is repeated, by all that Triton specialises on
        self._known = BoundedCache()
        free = getattr(fn, "do_not_specialize", None) or ()
        self._free = frozenset(n for n, name in enumerate(fn.arg_names) if name in free)

    def __call__(self, grid: Grid, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Launches on the device of the first argument and on its current stream."""
        with device_of(arguments[0]):
            self._launch(grid, arguments, constants)

    def bound(self, grid: Grid, numbers: tuple[Any, ...], constants: dict[str, Any]) -> Callable[..., None]:
        """A launch that takes the tensors alone; numbers, and tuples of numbers, follow the tensors in the kernel's signature.

        The tensors of all its calls have the same sizes, strides, dtypes and device, and the same alignment to 16 bytes. The
        current device is theirs (see `on_device`).
        """
        repeat: _Repeat | None = None
        index = -1
        rest = (*numbers, *self._ordered(constants))
        count = len(self._describe)
        # encoded descriptors by the addresses of all described tensors, and each by its own
        known, encoded = BoundedCache(), [BoundedCache() for _ in self._describe]

        def launch(*tensors: Tensor) -> None:
            nonlocal repeat, index
            if repeat is None or _observers or _hooked():
                repeat, index = self._launch(grid, (*tensors, *numbers), constants), tensors[0].get_device()
                return
            start, fixed, _ = repeat
            # an address is taken as it is; of a tensor the launch asks where it lies
            addresses = [x.data_ptr() for x in tensors]
            if not count:
                start(*grid, current_stream(index), *fixed, *addresses, *rest)
                return
            place = tuple(addresses[:count])
            words = known.get(place) or encode(place, tensors, repeat)
            start(*grid, current_stream(index), *fixed, *words, *addresses[count:], *rest)

        def encode(place: tuple[int, ...], tensors: tuple[Tensor, ...], repeat: _Repeat) -> list[Any]:
            words: list[Any] = []
            for n, address in enumerate(place):
                words += encoded[n].get(address) or self._encode(n, tensors[n], repeat, encoded[n], address)
            if repeat.described_as is not None:
                known[place] = words
            return words

        return launch

    def _launch(self, grid: Grid, arguments: tuple[Any, ...], constants: dict[str, Any]) -> _Repeat | None:
        """Launches on the current device; returns how to do it again, None if it cannot be done faster."""
        for callback in _observers:
            callback(self.name)
        count = len(self._describe)
        index = arguments[0].get_device()
        # a compiled kernel is loaded into a device
        key: list[Any] = [id(constants), index, *[x.dtype for x in arguments[:count]]]
        words: list[Any] = []
        word: Any
        for n, x in enumerate(arguments[count:], count):
            if isinstance(x, Tensor):
                word = x.data_ptr()
                key += x.dtype, word % 16 == 0
            elif isinstance(x, int):
                # a number that the kernel is not specialised on counts by whether it needs 64 bits
                word = x
                key.append(abs(x) >> 31 > 0 if n in self._free else x)
            elif isinstance(x, tuple):
                word = x
                # Triton specialises on the numbers of a tuple, whatever the kernel says of the argument
                key.append(x)
            else:
                word = x
                key.append(float)
            words.append(word)
        kind = tuple(key)
        repeat, *_ = self._known.get(kind) or (None,)
        if repeat is None or _hooked():
            return self._launch_by_triton(kind, grid, arguments, constants)
        described: list[Any] = []
        for n, x in enumerate(arguments[:count]):
            place = (x.data_ptr(), x.shape, x.stride(), x.dtype)
            described += self._encoded[n].get(place) or self._encode(n, x, repeat, self._encoded[n], place)
        repeat.launch(*grid, current_stream(index), *repeat.fixed, *described, *words, *self._known[kind][1])
        return repeat

    def _launch_by_triton(
        self, kind: tuple[Any, ...], grid: Grid, arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> _Repeat | None:
        made = [describe(x) for describe, x in zip(self._describe, arguments, strict=False)]
        compiled = self.fn[grid](*made, *arguments[len(made) :], **(FUSION | constants))
        # Triton's interpreter compiles nothing
        if compiled is not None and kind not in self._known:
            # the constants are kept, so that no others get their id
            self._known[kind] = _repeat_of(compiled), self._ordered(constants), constants
        return self._known[kind][0] if compiled is not None else None

    def _ordered(self, constants: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(constants[name] for name in self.fn.arg_names if name in constants)

    def _encode(self, n: int, x: Tensor, repeat: _Repeat, known: BoundedCache, key: Any) -> list[Any]:
        """The words that the launch takes for the n-th described tensor; they are remembered under `key`."""
        made = self._describe[n](x)
        if repeat.described_as is None:
            # it holds the tensor
            return [made]
        words: list[Any] = _encoder()(made, repeat.described_as[n])
        known[key] = words
        return words


class _Repeat(NamedTuple):
    """How a compiled kernel is launched again."""

    launch: Callable[..., None]  # takes the grid, the stream, `fixed` and the arguments
    fixed: tuple[Any, ...]
    described_as: list[dict[str, Any]] | None  # how the kernel wants each descriptor encoded; None: Triton encodes them


def _repeat_of(compiled: Any) -> _Repeat:
    """Triton 3.6 on NVIDIA: past all of Triton's Python. Elsewhere: by Triton, without looking the compiled kernel up."""
    about = compiled.metadata
    if not _is_triton_3_6() or about.target.backend != "cuda" or about.global_scratch_size or about.profile_scratch_size:

        def launch(x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
            compiled[x, y, z](*arguments, stream=stream)

        return _Repeat(launch, (), None)
    made = compiled.run
    if about.tensordesc_meta:
        from triton.runtime import driver

        source = SimpleNamespace(fn=compiled.src.fn, constants={}, signature=expanded(compiled.src.signature))
        made = driver.active.launcher_cls(source, about._replace(tensordesc_meta=None))
    scratch = hooks = (None, None)
    fixed = (
        compiled.function, about.launch_cooperative_grid, about.launch_pdl, *scratch, compiled.packed_metadata, None, *hooks,
    )  # fmt: skip
    return _Repeat(made.launch, fixed, about.tensordesc_meta or [])


def expanded(signature: dict[Any, Any]) -> dict[int, Any]:
    """A kernel's signature with each descriptor replaced by what the launch takes for it: encoded words, sizes, strides."""
    found: list[Any] = []
    for kind in signature.values():
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            rank = kind[kind.index("[") : kind.index("]")].count(",") + 1
            found += ["nvTmaDesc", *["i32"] * rank, *["i64"] * rank]
        else:
            found.append(kind)
    return dict(enumerate(found))


@cache
def _is_triton_3_6() -> bool:
    import triton

    return triton.__version__.split(".")[:2] == ["3", "6"]


@cache
def _encoder() -> Callable[[Any, dict[str, Any]], list[Any]]:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg


@cache
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime


def _hooked() -> bool:
    """Whether somebody, a profiler, has a hook in Triton's launches."""
    runtime = _runtime()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def kind_of(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Everything about tensors that a bound launch depends on: a plan that was made for some runs on all of the same kind."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in tensors])


_HERE = nullcontext()


def device_of(x: Tensor) -> AbstractContextManager[object]:
    """Makes x's device the current one: Triton launches on the current device, which need not be the tensors'."""
    if x.is_cuda and x.get_device() != _current_device():
        return torch.cuda.device(x.device)
    return _HERE


def on_device(run: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`run` on `device`, whichever device is current when it is called."""
    if device.type != "cuda":
        return run
    index = device.index

    def guarded(*arguments: Any) -> Any:
        if _current_device() == index:
            return run(*arguments)
        with torch.cuda.device(index):
            return run(*arguments)

    return guarded


def empties(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Makes empty contiguous tensors of one shape on the current device, which is to be `device`.

    On CUDA it allocates as code written by torch.compile does, past the dispatcher: in half the time of torch.empty.
    """
    allocate = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if device.type != "cuda" or allocate is None:
        return partial(torch.empty, shape, dtype=dtype, device=device)
    strides = tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))
    return partial(allocate, shape, strides, dtype)
