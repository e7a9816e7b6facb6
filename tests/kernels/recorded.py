"""Records the launches of a call without a GPU, and compiles each as Triton would for the very arguments that it was given.

A signature that is written by hand has the specialisations that its author thought of. Triton compiles a kernel anew for an
integer of one, for a multiple of sixteen, for a pointer that is not aligned: here Triton itself decides, from the arguments of a
launch.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rooftile.exact.ops import attention
from rooftile.runtime import devices, launch
from rooftile.runtime.launch import BoundedCache

# bytes that a program may have
SHARED = {80: 163 * 1024, 90: 227 * 1024}
_TOOLS = "backends/nvidia/bin"


class Recorded(NamedTuple):
    """A launch as the compiler sees it."""

    name: str
    fn: Any
    options: dict[str, Any]  # the compiler's, such as num_warps
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]

    @property
    def key(self) -> str:
        """Equal for launches that run the same compiled kernel."""
        return repr(self._replace(fn=None))


class Compiled(NamedTuple):
    """The properties of a kernel, read from its machine code."""

    registers: int
    stack: int  # bytes
    shared: int  # bytes
    hot_spills: int  # loads and stores of local memory inside innermost loops with matrix instructions
    matrix: str  # "wgmma", "mma.sync", or "" if none


@contextmanager
def recorded(sm: int) -> Iterator[dict[str, Recorded]]:
    """Inside the block CPU tensors pass for those of a GPU, and launches of kernels are kept instead of made; each kind once.

    Results of kernels are not computed: what they would have written is zero.
    """
    found: dict[str, Recorded] = {}

    def keep(self: launch.Kernel, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        made = [describe(x) for describe, x in zip(self._describe, arguments, strict=False)]
        one = _as_compiled(self.fn, (*made, *arguments[len(made) :]), constants, sm)
        found.setdefault(one.key, one)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.Kernel, "_launch", keep)
        patch.setattr(launch, "_hooked", lambda: True)
        patch.setattr(launch, "_current_device", lambda: 0)
        patch.setattr(torch.Tensor, "is_cuda", property(lambda x: True), raising=False)
        patch.setattr(torch.Tensor, "get_device", lambda x: 0)
        patch.setattr(torch.Tensor, "pin_memory", lambda x: x)
        for device in (torch.device("cpu"), torch.device("cuda"), torch.device("cuda", 0)):
            patch.setitem(devices._KNOWN, device, f"sm{sm}")
        for name in ("empty", "empty_like"):
            patch.setattr(torch, name, getattr(torch, name.replace("empty", "zeros")))
        patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
        # calls that are prepared for this GPU must not run on tensors of the CPU, nor the other way round
        patch.setattr(attention, "_PREPARED", BoundedCache())
        yield found


def _as_compiled(fn: Any, arguments: tuple[Any, ...], constants: dict[str, Any], sm: int) -> Recorded:
    backend, binder = _binder(fn, sm)
    words = launch.FUSION | constants | {"debug": False}
    bound, specialisation, options = binder(*arguments, **words)
    _, signature, constexprs, attributes = fn._pack_args(backend, words, bound, specialisation, options)
    return Recorded(fn.fn.__name__, fn, options, signature, constexprs, attributes)


@cache
def _binder(fn: Any, sm: int) -> tuple[Any, Any]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", sm, 32))
    return backend, create_function_from_signature(fn.signature, fn.params, backend)


def compiled(one: Recorded, sm: int) -> Compiled:
    """A launch's machine code for a chip, read with the tools that Triton carries."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(one.fn, one.signature, one.constants, one.attributes)
    built = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=one.options)
    tools = Path(triton.__file__).parent / _TOOLS
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = run(tools / "cuobjdump", "--dump-resource-usage", file.name)
        registers, stack = (int(n) for n in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
        # without a stack nothing spills
        code = run(tools / "nvdisasm", "-c", file.name) if stack else ""
    matrix = next((word for word in ("wgmma", "mma.sync") if word in built.asm["ptx"]), "")
    return Compiled(registers, stack, built.metadata.shared, hot_spills(code), matrix)


def run(*command: Any) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout


def hot_spills(code: str) -> int:
    """Accesses to local memory in the first innermost loop with products; a walk that sets NaN aside comes later, and is rare."""
    hot = [body for body in innermost_loops(code) if any("MMA" in x or "FFMA" in x for x in body)][:1]
    return accesses(hot)


def innermost_loops(code: str) -> list[list[str]]:
    """The instructions of each loop that has no other inside."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    spans = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            lines.append(instruction[1])
            back = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction[1])
            if back and back[1] in labels:
                spans.append((labels[back[1]], len(lines)))
    inner = [(a, b) for a, b in spans if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)]
    return [lines[a:b] for a, b in inner]


def accesses(loops: list[list[str]]) -> int:
    """Accesses to local memory, which holds what registers do not."""
    return sum(bool(re.search(r"\b(LDL|STL)", x)) for body in loops for x in body)
