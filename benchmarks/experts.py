"""Times experts on a GPU beside PyTorch's grouped product: python benchmarks/experts.py, from the repository root.

Every number is a median of triton.testing.do_bench, in one process on one GPU; up to 256 tokens, where the host would be what is
timed, of do_bench_cudagraph. The pipeline beside it sorts, gathers, multiplies by torch._grouped_mm, activates, multiplies and
scatters, with the same shared network.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from triton.testing import do_bench, do_bench_cudagraph

from rooftile import moe

RESULTS = Path(__file__).parent / "results"


class Case(NamedTuple):
    """Sizes of a call."""

    tokens: int
    E: int
    K: int
    d: int
    h: int
    shared: int = 0
    load: str = "uniform"

    def tensors(self) -> tuple[Tensor, moe.Routing, dict[str, Tensor]]:
        """Tokens, routing and weights; under "zipf" the n-th expert is chosen 1 / n as often as the first."""
        shapes = {"up": (self.E, 2 * self.h, self.d), "down": (self.E, self.d, self.h)}
        if self.shared:
            shapes |= {"shared_up": (2 * self.shared * self.h, self.d), "shared_down": (self.d, self.shared * self.h)}
        weights = {name: _random(*shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}
        rank = torch.arange(1, self.E + 1, device="cuda", dtype=torch.float32)
        weight = 1 / rank if self.load == "zipf" else torch.ones_like(rank)
        chosen = torch.multinomial(weight.expand(self.tokens, -1), self.K).int()
        gates = torch.rand(self.tokens, self.K, device="cuda")
        return _random(self.tokens, self.d), moe.Routing(chosen, gates / gates.sum(-1, keepdim=True)), weights

    @property
    def operations(self) -> int:
        """Of the forward."""
        return 2 * self.tokens * (self.K + self.shared) * 3 * self.h * self.d


CASES = [
    Case(4096, 64, 6, 2048, 1408, 2),
    Case(4096, 64, 6, 2048, 1408, 2, "zipf"),
    Case(32768, 128, 8, 2048, 768),
    *(Case(tokens, 128, 8, 2048, 768) for tokens in (1, 8, 64, 256)),
]


def pipeline(
    u: Tensor, routing: moe.Routing, up: Tensor, down: Tensor, shared_up: Tensor | None = None, shared_down: Tensor | None = None
) -> Tensor:
    """What one writes with torch._grouped_mm."""
    K = routing.experts.shape[1]
    ids, order = routing.experts.flatten().sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(len(up), device=u.device, dtype=ids.dtype), right=True, out_int32=True)
    z = torch._grouped_mm(_swiglu(torch._grouped_mm(u[order // K], up.mT, offs=ends)), down.mT, offs=ends)
    z = torch.zeros_like(z).index_copy(0, order, z).unflatten(0, (-1, K))
    y = (z * routing.gates[..., None]).sum(1).to(u.dtype)
    if shared_up is None or shared_down is None:
        return y
    return y + functional.linear(_swiglu(functional.linear(u, shared_up)), shared_down)


def measure(case: Case, bandwidth: float) -> dict[str, object]:
    """Milliseconds of each way, and what they say."""
    u, routing, weights = case.tensors()
    y, due = moe.experts(u, routing, **weights), pipeline(u, routing, **weights)
    error = float((y.float() - due.float()).norm() / due.float().norm())
    assert error < 0.02, f"{case}: the two differ by {error}"
    row: dict[str, object] = dict(case._asdict(), error=error)
    ways: dict[str, Callable[..., Tensor]] = {
        "ours": moe.experts, "plain": lambda *x, **y: moe.experts(*x, backend="tiled", **y), "grouped_mm": pipeline,
    }  # fmt: skip
    row |= {f"{name} ms": _median(lambda way=way: way(u, routing, **weights), case.tokens <= 256) for name, way in ways.items()}
    row["ours TFLOP/s"] = case.operations / float(row["ours ms"]) / 1e9
    touched = routing.experts.unique().numel() * 3 * case.h * case.d * 2
    row["weights over bandwidth ms"] = touched / bandwidth * 1e3
    if case.tokens == 4096:
        leaves = [u.requires_grad_(), *(x.requires_grad_() for x in weights.values())]
        for name, way in ways.items():
            row[f"{name} with backward ms"] = _median(
                lambda way=way: torch.autograd.grad(way(u, routing, **weights).sum(), leaves)
            )
    return row


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy of 1 GiB."""
    x = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / _median(lambda: y.copy_(x)) * 1e3


def _median(run: Callable[[], object], in_graph: bool = False) -> float:
    """Milliseconds of a call, or of its captured graph."""
    if in_graph:
        with torch.no_grad():
            return do_bench_cudagraph(run, rep=40, return_mode="median")
    return do_bench(run, warmup=20, rep=80, return_mode="median")


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def main() -> None:
    """Prints a line for each case and writes all of them."""
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    sys.stdout.write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s\n")
    rows = [measure(case, bandwidth) for case in CASES]
    for row in rows:
        sys.stdout.write(", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()) + "\n")
    word = "h200" if "H200" in torch.cuda.get_device_name() else "h100" if "H100" in torch.cuda.get_device_name() else "gpu"
    head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "copy bytes/s": bandwidth}
    (RESULTS / f"{word}-experts.json").write_text(json.dumps([head, *rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
