"""The rungs of the ladder between FlashAttention-2 and the shipped Hopper kernel compile to what they say they are."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

import torch  # noqa: E402

from tests.grids import swept  # noqa: E402

RUNGS = {
    "plain": {},
    "specialised": {"OVERLAPPED": False, "PING_PONG": False},
    "overlapped": {"OVERLAPPED": True, "PING_PONG": False},
    "ping-pong": {"OVERLAPPED": True, "PING_PONG": True},
}


# each rung once, and both masks
@pytest.mark.parametrize(
    ("rung", "causal"), swept([(rung, causal) for rung in RUNGS for causal in (True, False)], lambda case: case)
)
def test_rung_compiles(rung: str, causal: bool) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from rooftile.exact.backends.hopper.tma import layout
    from rooftile_lab.bench.ladder import kernels

    kernel = kernels.plain if rung == "plain" else kernels.specialised
    constants = {"D": 128, "CAUSAL": causal, **RUNGS[rung]}

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.endswith("_desc"):
            rows = 64 if name[0] in "qo" and rung != "plain" else 128
            return f"tensordesc<bf16{[1, 1, rows, 128]},{layout((1, 1, rows, 128), torch.bfloat16)!r}>"
        return {"lse_ptr": "*fp32", "factor": "fp32"}.get(name, "i32")

    names = kernel.arg_names
    source = GluonASTSource(
        kernel, {name: kind(name) for name in names}, {(names.index(name),): value for name, value in constants.items()}
    )
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8 if rung == "plain" else 4})
    ptx = built.asm["ptx"]
    assert "wgmma" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert ("setmaxnreg" in ptx) == (rung != "plain")
    # the named barriers of the turns
    assert ("bar.arrive 9" in ptx) == (rung == "ping-pong")
