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
from typing import Any

import pytest

from rooftile import approximate
from rooftile.launch import Kernel
from tests.grids import swept

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from tests.kernels.approximate_calls import BF16, CALLS, FP32, WIDE, Call, launches  # noqa: E402
from tests.kernels.recorded import SHARED, Recorded, compiled  # noqa: E402

# bytes outside of registers: at the edges of loops, and in the rare walk that sets NaN aside
STACK = {BF16: 1024, FP32: 1024}
# a call of each kind, and what has failed on a GPU
USUAL = {
    "routing bfloat16 4 4 128 50 causal": 90,
    "routing float32 4 1 64 50 full": 90,
    "reformer bfloat16 2 1 40 24 3 50 causal": 80,
    "hashes bfloat16 64 3 8": 90,
    "members bfloat16 600 50": 90,
    "selected bfloat16 10 2 64 64 64": 90,
    "chooses float32 16 1 192 False 32 16 64 16": 90,
    "chooses bfloat16 32 8 64 True 32 16 64 16": 80,
    "gates float16 64": 90,
    "decode bfloat16 5 10 2 64 64 32": 90,
    "pages bfloat16 4 2 64 16 64": 90,
}
GRID = [(str(call), sm) for call in (*CALLS, *WIDE) for sm in (80, 90)]
BY_NAME = {str(call): call for call in (*CALLS, *WIDE)}


def complaints(one: Recorded, sm: int) -> Iterator[str]:
    """What is wrong with a launch's machine code."""
    try:
        found = compiled(one, sm)
    except RuntimeError as error:
        yield f"{one.name} does not compile: {error}"
        return
    if found.shared > SHARED[sm]:
        yield f"{one.name} takes {found.shared} bytes of shared memory"
    shape = one.constants.get((one.fn.arg_names.index("SHAPE"),)) if "SHAPE" in one.fn.arg_names else None
    if getattr(shape, "REPAIR", False):
        # it runs for tiles that held a NaN
        return
    if found.hot_spills:
        yield f"{one.name} spills {found.hot_spills} times in its loop"
    if found.stack > STACK[BF16]:
        yield f"{one.name} has a stack of {found.stack} bytes"


@pytest.mark.parametrize(("name", "sm"), swept(GRID, lambda case: [case] * (USUAL.get(case[0]) == case[1])), ids=str)
def test_launches_compile_and_fit(name: str, sm: int) -> None:
    found = launches(BY_NAME[name], sm)
    assert found
    assert [said for one in found for said in complaints(one, sm)] == []


def test_usual_calls_launch_every_kernel() -> None:
    """What `make test` compiles has each kernel of the package."""
    due = set()
    for module in pkgutil.walk_packages(approximate.__path__, "rooftile.approximate."):
        due |= {of(x.fn) for x in vars(import_module(module.name)).values() if isinstance(x, Kernel)}
    found = {of(one.fn) for name, sm in USUAL.items() for one in launches(BY_NAME[name], sm)}
    assert found == due


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
                    jobs.setdefault((sm, one.key), (call, one.name, sm))
    print(f"{len(jobs)} kinds of launches", flush=True)  # noqa: T201
    count = 0
    with ProcessPoolExecutor(2) as workers:
        for sm, name, call, said in workers.map(_by_name, [(call, key, sm) for (sm, key), (call, _, _) in jobs.items()]):
            count += len(said)
            for line in said:
                print(f"sm{sm}, {call}: {line}", flush=True)  # noqa: T201
    return min(count, 1)


def _by_name(job: tuple[Call, str, int]) -> tuple[int, str, str, list[str]]:
    """In a worker: a kernel does not travel between processes, so the call is made again."""
    call, key, sm = job
    one = next(one for one in launches(call, sm) if one.key == key)
    return sm, one.name, str(call), list(complaints(one, sm))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
