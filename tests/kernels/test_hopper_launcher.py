"""The quick launch of the Hopper kernels hands over what Triton's own launch would."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.backends.hopper import launcher

pytestmark = pytest.mark.skipif(not launcher.QUICK, reason="under this Triton kernels are launched as everybody does")


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_descriptor_is_expanded_as_triton_expands_it(rank: int) -> None:
    """Triton writes a launch in C for each signature: the one for descriptors and the one for their parts are the same."""
    from triton.backends.nvidia.driver import make_launcher

    box = ", ".join(["64"] * rank)
    described = f"tensordesc<bf16[{box}],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank={rank})>"
    signature = {"x_desc": described, "x_ptr": "*bf16", "y_desc": described, "n": "i32", "scale": "fp32", "D": "constexpr"}
    parts = launcher.expanded(signature)
    assert [kind for kind in parts.values() if kind == "nvTmaDesc"] == ["nvTmaDesc"] * 2
    assert len(parts) == 4 + 2 * (1 + 2 * rank)
    assert make_launcher({}, parts, None) == make_launcher({}, signature, [{}, {}])


def test_what_is_remembered_does_not_grow() -> None:
    from rooftile.hardware.quick import remember

    known: dict[int, int] = {}
    for n in range(5000):
        remember(known, n, n)
        assert known[n] == n
        assert len(known) <= 1024


class Kernel:
    """Stands in for a Gluon kernel: notes its usual launches."""

    arg_names = ("x_desc", "x_ptr", "n_ptr", "scale", "D")

    def __init__(self) -> None:
        self.usual: list[tuple[object, ...]] = []

    def __getitem__(self, grid):
        def launch(*arguments, **constants) -> str:
            self.usual.append((grid, *arguments, constants))
            return "compiled"

        return launch


@pytest.fixture
def ready(monkeypatch):
    """A kernel, its launcher, what was launched quickly, and which tensors were encoded."""
    quick: list[tuple[object, ...]] = []
    encoded: list[int] = []

    def encode(described, as_what):
        encoded.append(described)
        return [f"words of {described}", 1, 2]

    made = launcher._Launch(lambda *words: quick.append(words), ("fixed",), [{}])
    monkeypatch.setattr(launcher, "make_tensordesc_arg", encode)
    monkeypatch.setattr(launcher, "_launch_of", lambda compiled: made)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    kernel = Kernel()
    found = launcher.Launcher(kernel, {"D": 64, "num_warps": 4}, torch.device("cuda", 0), (lambda x: x.data_ptr(),))
    return kernel, found, quick, encoded


@pytest.mark.parametrize("again", [False, True])
def test_the_first_launch_is_tritons_and_the_next_hand_over_addresses(ready, again: bool) -> None:
    kernel, found, quick, encoded = ready
    repeated = found.repeated((3, 1, 1), (0.5,))
    n = torch.zeros(2, dtype=torch.int32)

    def launch(x: torch.Tensor) -> None:
        if again:
            repeated((x, n))
        else:
            found((3, 1, 1), (x,), (x, n), (0.5,))

    x, y = torch.zeros(4, 4), torch.zeros(4, 4)
    launch(x)
    ((grid, described, *arguments, constants),) = kernel.usual
    assert (grid, described, constants) == ((3, 1, 1), x.data_ptr(), {"D": 64, "num_warps": 4})
    assert arguments[0] is x
    for z in (x, y, x, y):
        launch(z)
    due = [
        (3, 1, 1, 77, "fixed", f"words of {z.data_ptr()}", 1, 2, z.data_ptr(), n.data_ptr(), 0.5, 64) for z in (x, y, x, y)
    ]
    assert quick == due
    assert encoded == [x.data_ptr(), y.data_ptr()], "an address is encoded once"
    assert len(kernel.usual) == 1


def test_other_dtypes_are_another_kernel(ready) -> None:
    kernel, found, quick, _ = ready
    x = torch.zeros(4, 4)
    for dtype in (torch.int32, torch.int64, torch.int32, torch.int64):
        found((1, 1, 1), (x,), (x, torch.zeros(2, dtype=dtype)), (0.5,))
    assert len(kernel.usual) == 2
    assert len(quick) == 2
    # also of what is only described
    n = torch.zeros(2, dtype=torch.int32)
    for dtype in (torch.float16, torch.bfloat16):
        found((1, 1, 1), (x.to(dtype),), (x, n), (0.5,))
    assert len(kernel.usual) == 4


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_that_hooks_launches_sees_them(ready, monkeypatch, hook: str) -> None:
    _, found, quick, _ = ready
    x, n = torch.zeros(4, 4), torch.zeros(2, dtype=torch.int32)
    repeated = found.repeated((1, 1, 1), (0.5,))
    repeated((x, n))
    compiled = Kernel()
    found._known = {key: (compiled, made) for key, (_, made) in found._known.items()}
    monkeypatch.setattr(getattr(launcher.knobs.runtime, hook), "calls", [print])
    repeated((x, n))
    found((1, 1, 1), (x,), (x, n), (0.5,))
    assert quick == []
    assert len(compiled.usual) == 2
