"""Times the kernels of the steps, of the causal convolution and of the selective scan on a GPU, beside a copy of the same bytes.

    python benchmarks/recurrent_steps.py

Prints a table, and writes benchmarks/results/recurrent-steps.json. An error beyond rounding ends it with a failure.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooftile import recurrent as rec
from rooftile.recurrent.kernels import state_space_step

RESULTS = Path(__file__).parent / "results" / "recurrent-steps.json"


def milliseconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """Returns the median time of a call, each behind a cache that another tensor has filled."""
    flush = torch.empty(128 * 2**20, dtype=torch.int8, device="cuda")
    run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def bandwidth() -> float:
    """Returns the bytes per millisecond, read and written, of a copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source))


def error(found: Tensor, due: Tensor) -> float:
    return ((found.double() - due.double()).norm() / due.double().norm()).item()


def row(name: str, run: Callable[[], Any], moved: int, wrong: float, room: float, copy: float) -> dict[str, Any]:
    """Times a call that has to move some bytes at least."""
    if not wrong < room:
        raise SystemExit(f"{name}: relative error {wrong:.1e}; must be below {room:.0e}")
    took = milliseconds(run)
    return {"name": name, "ms": took, "bytes": moved, "share_of_copy": moved / took / copy, "error": wrong}


def ssd_step(dtype: torch.dtype, copy: float) -> dict[str, Any]:
    """256 sequences of 80 heads of 64 x 128, the state of Mamba-2 2.7B's layers."""
    S, H, P, N = 256, 80, 64, 128
    state = torch.randn(S, H, P, N, device="cuda").to(dtype)
    x, z = (torch.randn(S, H, P, device="cuda").bfloat16() for _ in range(2))
    B, C = (torch.randn(S, 1, N, device="cuda").bfloat16() for _ in range(2))
    dt, A = torch.randn(S, H, device="cuda"), -torch.rand(H, device="cuda")
    bias, D = (torch.rand(H, device="cuda") for _ in range(2))
    options = (True, 0.0, float("inf"))

    def run(own: Tensor) -> Tensor:
        return state_space_step.step(own, (x, dt, B, C, z), (A, D, bias), None, options)

    few = state[:8].clone()
    own = [a[:8].double() for a in (x, dt, B, C, z)]
    steps = torch.nn.functional.softplus(own[1] + bias.double())
    last = torch.exp(steps * A.double())[..., None, None] * few.double()
    last += (steps[..., None] * own[0])[..., None] * own[2][:, :, None]
    due = ((last * own[3][:, :, None]).sum(-1) + D.double()[:, None] * own[0]) * torch.nn.functional.silu(own[4])
    y = state_space_step.step(few, tuple(a[:8] for a in (x, dt, B, C, z)), (A, D, bias), None, options)
    # the states may have less error than the outputs, which are bf16
    room = 1e-5 if dtype == torch.float32 else 5e-3
    wrong = max(error(few, last) / room * 5e-3, error(y, due))
    return row(f"ssd_step {str(dtype)[6:]}", lambda: run(state), 2 * state.numel() * state.element_size(), wrong, 5e-3, copy)


def conv(copy: float) -> dict[str, Any]:
    x = torch.randn(1, 16384, 5376, device="cuda").bfloat16()
    weight, bias = torch.randn(5376, 4, device="cuda").bfloat16(), torch.randn(5376, device="cuda").bfloat16()

    def run() -> Any:
        return rec.causal_conv(x, weight, bias, backend="triton")[0]

    due = rec.causal_conv(x[:, :2000].double(), weight.double(), bias.double(), return_tail=False)
    return row("causal_conv 1 x 16k x 5376 bf16", run, 4 * x.numel(), error(run()[:, :2000], due), 5e-3, copy)


def scan(batch: int, T: int, copy: float) -> dict[str, Any]:
    W, N = 5120, 16
    x, dt, z = (torch.randn(batch, T, W, device="cuda").bfloat16() for _ in range(3))
    B, C = (torch.randn(batch, T, N, device="cuda").bfloat16() for _ in range(2))
    A, D, bias = -torch.rand(W, N, device="cuda"), torch.rand(W, device="cuda"), torch.rand(W, device="cuda") - 4

    def run() -> Any:
        return rec.selective_scan(x, dt, A, B, C, D=D, z=z, dt_bias=bias, backend="triton")[0]

    # some channels by themselves, and tokens of a few chunks
    few = [a[..., :600, :64].double() for a in (x, dt)]
    own = {"D": D[:64].double(), "z": z[:, :600, :64].double(), "dt_bias": bias[:64].double()}
    due = rec.selective_scan(*few, A[:64].double(), B[:, :600].double(), C[:, :600].double(), return_state=False, **own)
    wrong = error(run()[:, :600, :64], due)
    return row(f"selective_scan {batch} x {T} x {W}, N = {N}, bf16", run, 8 * x.numel(), wrong, 5e-3, copy)


def main() -> None:
    """Runs every case."""
    torch.manual_seed(0)
    copy = bandwidth()
    rows = [ssd_step(torch.float32, copy), ssd_step(torch.bfloat16, copy), conv(copy), scan(1, 16384, copy), scan(8, 2048, copy)]
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_GB_per_s": copy / 1e6}
    print(f"{about['device']}: a copy moves {about['copy_GB_per_s']:.0f} GB/s")
    print(f"{'':52} {'ms':>8} {'of a copy':>10} {'error':>8}")
    for r in rows:
        print(f"{r['name']:52} {r['ms']:8.3f} {r['share_of_copy']:10.1%} {r['error']:8.1e}")
    RESULTS.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
