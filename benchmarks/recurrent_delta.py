"""Times the gated delta rule on a GPU: 16 key and 32 value heads of 128 in bf16, beside fla's kernels where fla is installed.

    python benchmarks/recurrent_delta.py

Prints a table, and writes it to benchmarks/results/GPU-recurrent-delta.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from rooftile.recurrent import gated_delta, gated_delta_step
from rooftile.recurrent.delta import OPERATORS

SHAPES = ((1, 16384), (8, 2048))
KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128


def inputs(*front: int) -> list[Tensor]:
    """Draws q, k, v, g and beta as a trained layer has them."""
    shape = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(*front, heads, DIM, **shape) for heads in (KEY_HEADS, KEY_HEADS, VALUE_HEADS))
    g = -0.1 * torch.rand(*front, VALUE_HEADS, device="cuda")
    return [q, k, v, g, torch.rand(*front, VALUE_HEADS, **shape)]


def others() -> dict[str, Callable[..., Tensor]]:
    """Returns the implementations to compare with."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as why:
        sys.stdout.write(f"fla is not compared: {why}\n")
        return {}

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        # each value head has a key head of its own there
        q, k = (x.repeat_interleave(VALUE_HEADS // KEY_HEADS, 2) for x in (q, k))
        found: Tensor = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]
        return found

    return {"fla": run}


def ours(*given: Tensor) -> Tensor:
    """Runs the kernels."""
    found: Tensor = gated_delta(*given, backend="triton", return_state=False)
    return found


def both(run: Callable[..., Tensor], given: list[Tensor]) -> Callable[[], object]:
    """Returns a forward and backward."""
    leaves = [x.detach().requires_grad_() for x in given]
    dy = torch.randn_like(given[2])
    return lambda: torch.autograd.grad(run(*leaves), leaves, dy)


def median(run: Callable[[], object]) -> float:
    """Returns milliseconds."""
    return float(triton.testing.do_bench(run, warmup=50, rep=300, return_mode="median"))


def error(run: Callable[..., Tensor]) -> float:
    """Returns the largest error over the largest output, against plain operations in fp32."""
    given = inputs(1, 1000)
    due = gated_delta(*(x.float() for x in given), backend="tiled", return_state=False)
    return float((run(*given).float() - due).abs().max() / due.abs().max())


def rows() -> list[dict[str, object]]:
    """Measures everything."""
    gradients = "walk.backward" not in Path(_kernels_file()).read_text()
    found: list[dict[str, object]] = []
    for name, run in {"rooftile": ours, **others()}.items():
        wrong = error(run)
        for B, T in SHAPES:
            given = inputs(B, T)
            found.append({"what": "forward", "B": B, "T": T, "by": name, "ms": median(partial(run, *given)), "error": wrong})
            if name != "rooftile" or gradients:
                found.append({"what": "both", "B": B, "T": T, "by": name, "ms": median(both(run, given)), "error": wrong})
    for S in (1, 64):
        given, state = inputs(S), torch.zeros(S, VALUE_HEADS, DIM, DIM, device="cuda")
        ms = median(partial(gated_delta_step, state, *given))
        found.append({"what": "step", "B": S, "T": 1, "by": "rooftile", "ms": ms, "error": None})
    return found


def _kernels_file() -> str:
    return str(OPERATORS._kernels.__file__)


def main() -> None:
    """Prints the table and writes it."""
    gpu = torch.cuda.get_device_name()
    path = Path(__file__).parent / "results" / f"{re.findall(r'[ABHL][0-9]+', gpu)[0].lower()}-recurrent-delta.json"
    found = rows()
    for row in found:
        wrong = "" if row["error"] is None else f"  error {row['error']:.1e}"
        sys.stdout.write(f"{row['what']:8} {row['B']:3} x {row['T']:6}  {row['by']:9} {row['ms']:9.3f} ms{wrong}\n")
    about = {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__}
    path.write_text(json.dumps([about | row for row in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
