"""All kernels of approximate attention compile without a GPU, as launches on one would ask, and fit the chip.

A call of Python's runs on CPU tensors that pass for a GPU's, so its launches have the specialisations, tiles and warps that they
have there. `python -m tests.kernels.test_approximate_compiles [word ...]` compiles every call, or those with a word in their
name, for both chips: about an hour on two cores.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from typing import Any

import pytest

from rooftile import approximate
from rooftile.runtime.launch import Kernel
from tests.grids import swept

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from tests.kernels.approximate_calls import CALLS, WIDE, Call, launches  # noqa: E402
from tests.kernels.recorded import SHARED, Recorded, compiled  # noqa: E402

# bytes outside of registers, at the edges of loops and in the rare walk that sets NaN aside, and accesses to them in a loop
STACK, HOT_SPILLS = {"16-bit": 1024, "fp32": 4096}, {"16-bit": 8, "fp32": 512}
# a call of each kind, and what has failed on a GPU
USUAL = {
    "routing bfloat16 4 4 128 50 causal": 90,
    "routing float32 4 1 64 50 full": 90,
    "reformer bfloat16 2 1 40 24 3 50 causal": 80,
    "hashes bfloat16 64 3 8": 90,
    "members bfloat16 600 50": 90,
    "selected bfloat16 10 2 64 64 64": 90,
    "selected float32 16 1 192 128 64": 90,
    "chooses float32 16 1 192 False 32 16 64 16": 90,
    "chooses bfloat16 32 8 64 True 32 16 64 16": 80,
    "chooses bfloat16 2 2 64 False 16 2 40 16": 90,
    "in_pages bfloat16 16 1 128 16": 90,
    "gates float16 64": 90,
    "decode bfloat16 5 10 2 64 64 32": 90,
    "pages bfloat16 4 2 64 16 64": 90,
}
GRID = [(str(call), sm) for call in (*CALLS, *WIDE) for sm in (80, 90)]
BY_NAME = {str(call): call for call in (*CALLS, *WIDE)}


def complaints(one: Recorded, sm: int, spills: bool = True) -> Iterator[str]:
    """Says what is wrong with a launch's machine code, also what it spills."""
    try:
        found = compiled(one, sm)
    except (RuntimeError, triton.compiler.CompilationError) as error:
        yield f"{one.name} does not compile: {error}"
        return
    if found.shared > SHARED[sm]:
        yield f"{one.name} takes {found.shared} bytes of shared memory"
    shape = one.constants.get((one.fn.arg_names.index("SHAPE"),)) if "SHAPE" in one.fn.arg_names else None
    if not spills or getattr(shape, "REPAIR", False):
        # it runs for tiles that held a NaN
        return
    # products of fp32 are no matrix instructions, and unrolled
    kind = "fp32" if one.signature.get("q_ptr") == "*fp32" else "16-bit"
    if found.hot_spills > HOT_SPILLS[kind]:
        yield f"{one.name} spills {found.hot_spills} times in its loop"
    if found.stack > STACK[kind]:
        yield f"{one.name} has a stack of {found.stack} bytes"


@pytest.mark.parametrize(("name", "sm"), swept(GRID, lambda case: [case] * (USUAL.get(case[0]) == case[1])), ids=str)
def test_launches_compile_and_fit(name: str, sm: int) -> None:
    found = launches(BY_NAME[name], sm)
    assert found
    # other calls run as well where registers do not suffice; the program lists them
    spills = USUAL.get(name) == sm
    assert [said for one in found for said in complaints(one, sm, spills)] == []


def test_usual_calls_launch_every_kernel() -> None:
    """Each kernel of the package is in one of the calls that `make test` compiles."""
    due = set()
    for module in pkgutil.walk_packages(approximate.__path__, "rooftile.approximate."):
        due |= {of(x.fn) for x in vars(import_module(module.name)).values() if isinstance(x, Kernel)}
    found = {of(one.fn) for name, sm in USUAL.items() for one in launches(BY_NAME[name], sm)}
    # norms have kernels of another package
    assert {name for name in found if not name.startswith("rooftile.fused.")} == due


def of(fn: Any) -> str:
    """A kernel's name in full."""
    return f"{fn.fn.__module__}.{fn.fn.__name__}"


def main(words: list[str]) -> int:
    """Prints what is wrong with any launch, each kind of launch once."""
    jobs = {}
    for call in (*CALLS, *WIDE):
        if not words or any(word in str(call) for word in words):
            for sm in (90, 80):
                for one in launches(call, sm):
                    jobs.setdefault((sm, one.key), call)
    print(f"{len(jobs)} kinds of launches", flush=True)  # noqa: T201
    count = 0
    # a fork would have the locks of PyTorch's threads, and not the threads
    with ProcessPoolExecutor(2, get_context("spawn")) as workers:
        for said in workers.map(_complaints_by_key, [(call, sm, key) for (sm, key), call in jobs.items()]):
            count += len(said)
            for line in said:
                print(line, flush=True)  # noqa: T201
    return min(count, 1)


def _complaints_by_key(job: tuple[Call, int, str]) -> list[str]:
    """In a worker: a kernel does not travel between processes, so the call is made again."""
    call, sm, key = job
    one = next(one for one in launches(call, sm) if one.key == key)
    return [f"sm{sm}, {call}: {line}" for line in complaints(one, sm)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
