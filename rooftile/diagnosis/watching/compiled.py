"""The kernels that torch.compile has generated: which tensors they read and write, while the program runs them.

Inductor writes a Python module for each compiled graph, whose functions call kernels by their names in that module. The names of
a kernel's arguments say how it uses them: in_ptr0, out_ptr0, in_out_ptr0.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from rooftile.diagnosis.counts.arithmetic import POINTWISE, REDUCING

NAMESPACE = "inductor"
PREFIXES = ("cpp_fused_", "triton_")
# a kernel from a template of products, whose FLOPs its name does not tell
TEMPLATE = "triton_tem_"
# the parameters of a kernel in C++ and in Triton
SIGNATURE = {"cpp": r"\bkernel\(([^)]*)\)", "triton": r"def {name}\(([^)]*)\)"}


class GeneratedKernel(NamedTuple):
    """One generated kernel. Its sizes are compiled in: it runs on tensors of the same shapes only."""

    name: str
    run: Callable[..., Any]
    uses: tuple[str, ...]  # for each argument "in", "out", "in_out", or "" for a number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def touched(self, args: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors that a call reads, and the tensors that it writes."""
        given = [(use, x) for use, x in zip(self.uses, args, strict=False) if isinstance(x, Tensor)]
        return [x for use, x in given if use != "out"], [x for use, x in given if use != "in"]

    def arithmetic(self, args: Sequence[Any]) -> tuple[int | None, int | None]:
        """FLOPs and special functions of the operators in its name, each once for every element of its largest tensor.

        None for a kernel from a template.
        """
        if self.name.startswith(TEMPLATE):
            return None, None
        size = max((x.numel() for x in args if isinstance(x, Tensor)), default=0)
        counts = [POINTWISE.get(op) or REDUCING[op] for op in operators_of(self.name)]
        return sum(per.flops for per in counts) * size, sum(per.special for per in counts) * size


def operators_of(name: str) -> list[str]:
    """The operators in the name of a kernel that have a count, such as gelu and native_layer_norm."""
    words = name.split("_")
    found, start = [], 0
    while start < len(words):
        for stop in range(len(words), start, -1):
            for op in ("_".join(words[start:stop]), "_" + "_".join(words[start:stop])):
                if op in POINTWISE or op in REDUCING:
                    found.append(op)
                    start = stop - 1
                    break
            else:
                continue
            break
        start += 1
    return found


@contextmanager
def watched_kernels(seen: Callable[[GeneratedKernel, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Calls `seen` in place of each generated kernel within the block; it runs the kernel itself."""
    put_back: list[tuple[ModuleType, str, Any]] = []
    try:
        for module in _graphs():
            for name, thing in list(vars(module).items()):
                if name.startswith(PREFIXES) and (kernel := _kernel(module, name, thing)) is not None:
                    put_back.append((module, name, thing))
                    setattr(module, name, _Replaced(kernel, seen))
        yield
    finally:
        for module, name, thing in put_back:
            setattr(module, name, thing)


class _Replaced:
    """Stands where the kernel stood: C++ kernels are called, Triton's have a method."""

    def __init__(self, kernel: GeneratedKernel, seen: Callable[[GeneratedKernel, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._kernel, self._seen = kernel, seen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._seen(self._kernel, args, kwargs)

    run = __call__


def _graphs() -> list[ModuleType]:
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    modules = {id(module): module for module in getattr(cache, "modules", ())}
    return [module for module in modules.values() if hasattr(module, "call")]


def _kernel(module: ModuleType, name: str, thing: Any) -> GeneratedKernel | None:
    """A kernel with the uses of its arguments; None if the module's text does not have them."""
    language = "cpp" if name.startswith("cpp") else "triton"
    text = Path(module.__file__ or "").read_text()
    at = re.search(rf"^{name} = ", text, re.MULTILINE)
    if at is None:
        return None
    signature = re.compile(SIGNATURE[language].format(name=name)).search(text, at.end())
    if signature is None:
        return None
    run = thing if language == "cpp" else thing.run
    return GeneratedKernel(name, run, tuple(_use(words) for words in signature[1].split(",")))


def _use(parameter: str) -> str:
    found = re.search(r"\b(in_out|in|out)_ptr\d+", parameter)
    return found[1] if found else ""
