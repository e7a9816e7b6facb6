"""A kernel is launched again as it was first: the same compiled form for the same kind of arguments, and no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from triton import knobs

from rooftile.runtime import launch
from rooftile.runtime.launch import FUSION, Kernel

CONSTANTS = {"SIZE": 16, "WIDE": True, "num_warps": 4}
GRID = (3, 1, 1)


class Jitted:
    """Stands in for a Triton function: compiles what it is given, and keeps what each form was launched with."""

    do_not_specialize = ("total",)

    def __init__(self, names: str = "x_ptr total stride WIDE SIZE", interpreted: bool = False) -> None:
        self.arg_names = tuple(names.split())
        self.fn = SimpleNamespace(__name__="stand_in")
        self.interpreted = interpreted
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid):
        def start(*arguments, **constants):
            self.compiled.append(Compiled(grid, arguments, constants))
            return None if self.interpreted else self.compiled[-1]

        return start


class Compiled:
    def __init__(self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.first, self.constants = (grid, *arguments), constants
        self.again: list[tuple[Any, ...]] = []

    def launch(self, x: int, y: int, z: int, stream: int, *words: Any) -> None:
        assert stream == 77
        self.again.append(((x, y, z), *words))


@pytest.fixture(autouse=True)
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches reach `Compiled.launch`; returns which descriptors were encoded."""
    found: list[str] = []

    def encode(described: str, as_what: dict[str, Any]) -> list[Any]:
        found.append(described)
        return [f"words of {described}", 1, 2]

    monkeypatch.setattr(launch, "_encoder", lambda: encode)
    monkeypatch.setattr(launch, "_repeat_of", lambda compiled: launch._Repeat(compiled.launch, ("fixed",), [{}]))
    monkeypatch.setattr(launch, "current_stream", lambda index: 77)
    return found


def aligned(dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.zeros(64, dtype=dtype)
    assert x.data_ptr() % 16 == 0
    return x


def launched(*calls: tuple[Any, ...]) -> Jitted:
    jitted = Jitted()
    kernel = Kernel(jitted)
    for grid, arguments, constants in calls:
        kernel(grid, arguments, constants)
    return jitted


def test_the_second_launch_hands_addresses_and_constants_to_what_was_compiled() -> None:
    x, y = aligned(), aligned()
    jitted = launched((GRID, (x, 5, 64), CONSTANTS), ((7, 1, 1), (y, 9, 64), CONSTANTS))
    (compiled,) = jitted.compiled
    assert compiled.first == (GRID, x, 5, 64)
    # products are fused with sums, whatever Triton's version does by itself
    assert compiled.constants == FUSION | CONSTANTS
    # in the kernel's order; options of the compiler are none of its arguments
    assert compiled.again == [((7, 1, 1), "fixed", y.data_ptr(), 9, 64, True, 16)]


@pytest.mark.parametrize(
    ("arguments", "constants"),
    [
        ((aligned(torch.bfloat16), 5, 64), CONSTANTS),
        ((torch.zeros(65)[1:], 5, 64), CONSTANTS),
        ((aligned(), 5, 48), CONSTANTS),
        ((aligned(), 2**31, 64), CONSTANTS),
        ((aligned(), 5, 64.0), CONSTANTS),
        ((aligned(), 5, 64), CONSTANTS | {"SIZE": 32}),
    ],
    ids=["dtype", "alignment", "a number that counts", "a number of 64 bits", "a fraction", "constants"],
)
def test_another_kind_of_arguments_is_compiled_anew(arguments, constants) -> None:
    jitted = launched((GRID, (aligned(), 5, 64), CONSTANTS), (GRID, arguments, constants))
    assert len(jitted.compiled) == 2
    assert jitted.compiled[0].again == []


def test_a_fraction_is_not_specialised_on() -> None:
    jitted = launched((GRID, (aligned(), 5, 0.5), CONSTANTS), (GRID, (aligned(), 5, 0.25), CONSTANTS))
    assert len(jitted.compiled) == 1


def test_constants_that_are_gone_lend_nobody_their_name() -> None:
    """Dictionaries are recognised by their id, so the known ones are kept alive."""
    jitted = Jitted()
    kernel = Kernel(jitted)
    for size in range(50):
        kernel(GRID, (aligned(), 5, 64), {"SIZE": size, "WIDE": True})
    assert [compiled.constants["SIZE"] for compiled in jitted.compiled] == list(range(50))


@pytest.mark.parametrize("bound", [False, True])
def test_an_interpreted_kernel_is_run_each_time(bound: bool) -> None:
    jitted = Jitted(interpreted=True)
    kernel = Kernel(jitted)
    again = kernel.bound(GRID, (5, 64), CONSTANTS)
    for _ in range(3):
        if bound:
            again(aligned())
        else:
            kernel(GRID, (aligned(), 5, 64), CONSTANTS)
    assert len(jitted.compiled) == 3


def described() -> tuple[Jitted, Kernel]:
    jitted = Jitted("x_desc x_ptr n_ptr scale WIDE SIZE")
    return jitted, Kernel(jitted, (lambda x: str(x.data_ptr()),))


@pytest.mark.parametrize("bound", [False, True])
def test_a_descriptor_is_encoded_once_for_each_address(encoded: list[str], bound: bool) -> None:
    jitted, kernel = described()
    again = kernel.bound(GRID, (0.5,), CONSTANTS)
    n = torch.zeros(2, dtype=torch.int32)

    def start(x: Tensor) -> None:
        if bound:
            again(x, x, n)
        else:
            kernel(GRID, (x, x, n, 0.5), CONSTANTS)

    x, y = torch.zeros(4, 4), torch.zeros(4, 4)
    start(x)
    (compiled,) = jitted.compiled
    assert compiled.first == (GRID, str(x.data_ptr()), x, n, 0.5)
    for z in (x, y, x, y):
        start(z)
    assert compiled.again == [
        (GRID, "fixed", f"words of {z.data_ptr()}", 1, 2, z.data_ptr(), n.data_ptr(), 0.5, True, 16) for z in (x, y, x, y)
    ]
    assert encoded == [str(x.data_ptr()), str(y.data_ptr())]
    assert len(jitted.compiled) == 1


def test_an_address_has_another_descriptor_for_another_shape(encoded: list[str]) -> None:
    _, kernel = described()
    x, n = torch.zeros(4, 4), torch.zeros(2, dtype=torch.int32)
    for described_as in (x, x, x.view(2, 8), x.t(), x):
        kernel(GRID, (described_as, x, n, 0.5), CONSTANTS)
    assert len(encoded) == 3


def test_the_dtype_of_what_is_only_described_counts() -> None:
    jitted, kernel = described()
    x, n = torch.zeros(4, 4), torch.zeros(2, dtype=torch.int32)
    for dtype in (torch.float16, torch.bfloat16, torch.float16):
        kernel(GRID, (x.to(dtype), x, n, 0.5), CONSTANTS)
    assert len(jitted.compiled) == 2


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_that_hooks_launches_sees_them(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    """Its hooks are called by Triton's own launch."""
    jitted, kernel = described()
    x, n = torch.zeros(4, 4), torch.zeros(2, dtype=torch.int32)
    again = kernel.bound(GRID, (0.5,), CONSTANTS)
    again(x, x, n)
    monkeypatch.setattr(getattr(knobs.runtime, hook), "calls", [print])
    again(x, x, n)
    kernel(GRID, (x, x, n, 0.5), CONSTANTS)
    assert len(jitted.compiled) == 3
    assert [compiled.again for compiled in jitted.compiled] == [[], [], []]


@pytest.mark.parametrize("interpreted", [False, True])
def test_an_observer_is_told_of_every_launch(interpreted: bool) -> None:
    jitted = Jitted(interpreted=interpreted)
    kernel = Kernel(jitted)
    again = kernel.bound(GRID, (5, 64), CONSTANTS)
    names: list[str] = []
    for _ in range(2):
        again(aligned())
    with launch.observe(names.append):
        for _ in range(2):
            again(aligned())
            kernel(GRID, (aligned(), 5, 64), CONSTANTS)
    again(aligned())
    assert names == ["stand_in"] * 4
    assert sum(1 + len(compiled.again) for compiled in jitted.compiled) == 7


def test_an_observer_that_fails_leaves() -> None:
    with pytest.raises(ZeroDivisionError), launch.observe(lambda name: 1 / 0):
        launched((GRID, (aligned(), 5, 64), CONSTANTS))
    assert launch._observers == []


def test_elsewhere_triton_itself_repeats_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under other releases of Triton, and on other makers' chips: descriptors are made anew, and hooks are Triton's business."""
    monkeypatch.undo()
    monkeypatch.setattr(launch, "_is_triton_3_6", lambda: False)
    monkeypatch.setattr(launch, "current_stream", lambda index: 77)
    seen: list[Any] = []

    class Triton(Compiled):
        metadata = None

        def __getitem__(self, grid):
            return lambda *arguments, stream: seen.append((grid, *arguments, stream))

    jitted, kernel = described()
    monkeypatch.setitem(globals(), "Compiled", Triton)
    x, n = torch.zeros(4, 4), torch.zeros(2, dtype=torch.int32)
    again = kernel.bound(GRID, (0.5,), CONSTANTS)
    for _ in range(3):
        again(x, x, n)
    kernel(GRID, (x, x, n, 0.5), CONSTANTS)
    assert len(jitted.compiled) == 1
    assert seen == [(GRID, str(x.data_ptr()), x.data_ptr(), n.data_ptr(), 0.5, True, 16, 77)] * 3


@pytest.mark.skipif(not launch._is_triton_3_6(), reason="only Triton 3.6 takes encoded descriptors")
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_descriptor_is_expanded_as_triton_expands_it(rank: int) -> None:
    """Triton writes a launch in C for each signature: the one for descriptors and the one for their parts are the same."""
    from triton.backends.nvidia.driver import make_launcher

    box = ", ".join(["64"] * rank)
    kind = f"tensordesc<bf16[{box}],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank={rank})>"
    signature = {"x_desc": kind, "x_ptr": "*bf16", "y_desc": kind, "n": "i32", "scale": "fp32", "D": "constexpr"}
    parts = launch.expanded(signature)
    assert [part for part in parts.values() if part == "nvTmaDesc"] == ["nvTmaDesc"] * 2
    assert len(parts) == 4 + 2 * (1 + 2 * rank)
    assert make_launcher({}, parts, None) == make_launcher({}, signature, [{}, {}])
