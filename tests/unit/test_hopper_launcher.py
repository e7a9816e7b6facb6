"""The quick launch of the Hopper kernels hands over what Triton's own launch would."""

from __future__ import annotations

import pytest

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
    from rooftile.backends.launch import remember

    known: dict[int, int] = {}
    for n in range(5000):
        remember(known, n, n)
        assert known[n] == n
        assert len(known) <= 1024
