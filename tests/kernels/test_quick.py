"""A kernel that is started again: the same compiled form for the same kind of arguments, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile.hardware.quick import Quick


class Kernel:
    """As Triton has them: compiles what it has not seen, and says with what each form was started."""

    arg_names = ("x_ptr", "total", "stride", "WIDE", "SIZE")
    do_not_specialize = ("total",)

    def __init__(self, interpreted: bool = False) -> None:
        self.interpreted = interpreted
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid):
        def start(*arguments, **constants):
            if self.interpreted:
                self.compiled.append(Compiled(arguments, constants))
                return None
            self.compiled.append(Compiled(arguments, constants))
            return self.compiled[-1]

        return start


class Compiled:
    def __init__(self, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.arguments, self.constants = arguments, constants
        self.again: list[tuple[Any, ...]] = []

    def __getitem__(self, grid):
        return lambda *words: self.again.append((grid, *words))


CONSTANTS = {"SIZE": 16, "WIDE": True, "num_warps": 4}


def started(*calls: tuple[Any, ...]) -> Kernel:
    kernel = Kernel()
    start = Quick(kernel)
    for grid, arguments, constants in calls:
        start(grid, arguments, constants)
    return kernel


def aligned(dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.zeros(64, dtype=dtype)
    assert x.data_ptr() % 16 == 0
    return x


def test_the_second_start_hands_addresses_and_constants_to_what_was_compiled() -> None:
    x, y = aligned(), aligned()
    kernel = started(((3, 1, 1), (x, 5, 64), CONSTANTS), ((7, 1, 1), (y, 9, 64), CONSTANTS))
    (compiled,) = kernel.compiled
    assert compiled.arguments == (x, 5, 64)
    assert compiled.constants == CONSTANTS
    # in the kernel's order; options of the compiler are none of its arguments
    assert compiled.again == [((7, 1, 1), y.data_ptr(), 9, 64, True, 16)]


@pytest.mark.parametrize(
    ("arguments", "constants"),
    [
        ((aligned(torch.bfloat16), 5, 64), CONSTANTS),
        ((torch.zeros(65)[1:], 5, 64), CONSTANTS),
        ((aligned(), 5, 48), CONSTANTS),
        ((aligned(), 2**31, 64), CONSTANTS),
        ((aligned(), 5, 64), CONSTANTS | {"SIZE": 32}),
    ],
    ids=["dtype", "alignment", "a number that counts", "a number of 64 bits", "constants"],
)
def test_another_kind_of_arguments_is_compiled_anew(arguments, constants) -> None:
    kernel = started(((1, 1, 1), (aligned(), 5, 64), CONSTANTS), ((1, 1, 1), arguments, constants))
    assert len(kernel.compiled) == 2
    assert kernel.compiled[0].again == []


def test_constants_that_are_gone_lend_nobody_their_name() -> None:
    """Dictionaries are told apart by their id, so the known ones are kept alive."""
    kernel = Kernel()
    start = Quick(kernel)
    for size in range(50):
        start((1, 1, 1), (aligned(), 5, 64), {"SIZE": size, "WIDE": True})
    assert [compiled.constants["SIZE"] for compiled in kernel.compiled] == list(range(50))


def test_an_interpreted_kernel_is_run_each_time() -> None:
    kernel = Kernel(interpreted=True)
    start = Quick(kernel)
    for _ in range(3):
        start((1, 1, 1), (aligned(), 5, 64), CONSTANTS)
    assert len(kernel.compiled) == 3
