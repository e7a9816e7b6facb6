"""Launching a kernel with as little host time as it takes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from rooftile.backends.hopper.gluon import TensorDescriptor
from rooftile.hardware.quick import remember

# the release whose launch takes what is made for it here
QUICK = triton.__version__.split(".")[:2] == ["3", "6"]
if QUICK:
    from triton.backends.nvidia.driver import make_tensordesc_arg

Describe = Callable[[Tensor], TensorDescriptor]


class Launcher:
    """A kernel with its compile-time arguments, on one device.

    Triton's own launch looks at every argument to find the compiled kernel, and encodes every descriptor anew.
    Here the first launch goes that way. Later ones hand addresses to the compiled kernel, and descriptors encoded before: one
    depends on an address, sizes and strides only, and PyTorch gives out the same addresses again and again.

    The kernel takes first what `describe` describes, then tensors, then numbers, and is specialised on none of the numbers. Its
    tensors must be aligned to 16 bytes, unless the kernel is not specialised on that.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], device: torch.device, describe: tuple[Describe, ...] = ()):
        self._kernel = kernel
        self._constants = constants
        self._device = device.index
        self._describe = describe
        self._encoded: tuple[dict[tuple[Any, ...], list[Any]], ...] = tuple({} for _ in describe)
        # by the dtypes of what is described and of the tensors
        self._known: dict[tuple[torch.dtype, ...], tuple[Any, _Launch | None]] = {}
        self._rest = tuple(constants[name] for name in kernel.arg_names if name in constants)

    def __call__(
        self, grid: tuple[int, int, int], described: tuple[Tensor, ...], tensors: tuple[Tensor, ...], numbers: tuple[float, ...]
    ) -> None:
        dtypes = tuple([x.dtype for x in (*described, *tensors)])
        compiled, quick = self._known.get(dtypes, (None, None))
        if quick is None or _hooked():
            made = [describe(x) for describe, x in zip(self._describe, described, strict=True)]
            if compiled is not None:
                compiled[grid](*made, *tensors, *numbers, *self._rest)
                return
            compiled = self._kernel[grid](*made, *tensors, *numbers, **self._constants)
            self._known[dtypes] = compiled, _launch_of(compiled) if QUICK else None
            return
        words: list[Any] = []
        for n, x in enumerate(described):
            key = (x.data_ptr(), x.shape, x.stride())
            words += self._encoded[n].get(key) or self._encode(n, x, quick, self._encoded[n], key)
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        quick.launch(*grid, stream, *quick.fixed, *words, *[x.data_ptr() for x in tensors], *numbers, *self._rest)

    def _encode(self, n: int, x: Tensor, quick: _Launch, known: dict[Any, list[Any]], key: Any) -> list[Any]:
        """What the n-th described tensor is passed as, and from now on known by `key`."""
        words: list[Any] = make_tensordesc_arg(self._describe[n](x), quick.described_as[n])
        remember(known, key, words)
        return words

    def repeated(self, grid: tuple[int, int, int], numbers: tuple[float, ...]) -> Callable[[tuple[Tensor, ...]], None]:
        """The launch for tensors that never change their sizes, strides and dtypes, and of which the first are the described."""
        count = len(self._describe)
        encoded: tuple[dict[int, list[Any]], ...] = tuple({} for _ in self._describe)
        rest = (*numbers, *self._rest)
        quick: _Launch | None = None

        def launch(tensors: tuple[Tensor, ...]) -> None:
            nonlocal quick
            if quick is None or _hooked():
                self(grid, tensors[:count], tensors, numbers)
                quick = self._known[tuple([x.dtype for x in (*tensors[:count], *tensors)])][1]
                return
            addresses = [x.data_ptr() for x in tensors]
            words: list[Any] = []
            for n, known in enumerate(encoded):
                words += known.get(addresses[n]) or self._encode(n, tensors[n], quick, known, addresses[n])
            stream = torch._C._cuda_getCurrentRawStream(self._device)
            quick.launch(*grid, stream, *quick.fixed, *words, *addresses, *rest)

        return launch


def _hooked() -> bool:
    """Whether somebody, a profiler, has a hook in Triton's launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class _Launch(NamedTuple):
    """Triton's launch of a compiled kernel, for descriptors that are encoded already."""

    launch: Callable[..., None]
    fixed: tuple[Any, ...]  # what it takes between the stream and the arguments
    described_as: list[dict[str, Any]]  # how the kernel wants each descriptor


def _launch_of(compiled: Any) -> _Launch:
    about = compiled.metadata
    source = SimpleNamespace(fn=compiled.src.fn, constants={}, signature=expanded(compiled.src.signature))
    made = driver.active.launcher_cls(source, about._replace(tensordesc_meta=None))
    scratch = hooks = (None, None)
    fixed = (
        compiled.function, about.launch_cooperative_grid, about.launch_pdl, *scratch, compiled.packed_metadata, None, *hooks,
    )  # fmt: skip
    return _Launch(made.launch, fixed, about.tensordesc_meta)


def expanded(signature: dict[Any, Any]) -> dict[int, Any]:
    """A kernel's signature with what each descriptor is passed as: the encoded words, its sizes and its strides."""
    found: list[Any] = []
    for kind in signature.values():
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            rank = kind[kind.index("[") : kind.index("]")].count(",") + 1
            found += ["nvTmaDesc", *["i32"] * rank, *["i64"] * rank]
        else:
            found.append(kind)
    return dict(enumerate(found))
