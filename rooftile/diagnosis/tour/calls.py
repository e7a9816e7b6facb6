"""Exhibits about what is called: many small operators, and attention that stores its scores or does not."""

from __future__ import annotations

from collections.abc import Mapping

import torch

import rooftile
from rooftile.cost import flops, io
from rooftile.diagnosis.output.units import count, digits, duration
from rooftile.diagnosis.tour.exhibit import Exhibit, ExhibitCase, Expected, Lab, one_after_another
from rooftile.exact.cases import Case as Problem
from rooftile.exact.masks import FULL
from rooftile.hardware.clock import captured
from rooftile.runtime.devices import arch

CALLS, NUMBERS = 1000, 16
# tokens, heads, head dim, dtype
ATTENTION = {"cpu": (4096, 2, 64, "fp32"), "cuda": (8192, 16, 128, "bf16")}


def loop(lab: Lab) -> Exhibit:
    """Adds in a Python loop of small operators, in one operator, and on a GPU in a CUDA graph."""
    small = torch.zeros(NUMBERS, device=lab.device)
    large = torch.zeros(CALLS * NUMBERS, device=lab.device)

    def calls() -> None:
        for _ in range(CALLS):
            small.add_(1.0)

    cases = [
        ExhibitCase(name=f"{CALLS:,} operators", expected=lab.expect(bytes=8 * large.numel(), calls=CALLS), work=calls),
        ExhibitCase(name="one operator", expected=lab.expect(bytes=8 * large.numel()), work=lambda: large.add_(1.0)),
    ]
    if lab.on_gpu:
        expected = Expected(CALLS * (lab.ceilings.node_us or 0.0), "overhead")
        cases.insert(1, ExhibitCase(name="as a CUDA graph", expected=expected, work=captured(calls).replay))

    def lesson(us: Mapping[str, float]) -> str:
        many, one = us[f"{CALLS:,} operators"], us["one operator"]
        graph = f" Replayed as a graph, the same operators take {duration(us['as a CUDA graph'])}." if lab.on_gpu else ""
        return (
            f"Each of the small operators takes {duration(many / CALLS)}, and all of them {many / one:,.0f} times as long as one "
            f"with the same additions: it is overhead, and no faster arithmetic would help.{graph}"
        )

    return Exhibit(
        title="A Python loop of small operators",
        does=f"{CALLS * NUMBERS:,} additions: {CALLS:,} operators on {NUMBERS} numbers, and one operator on all.",
        cases=tuple(cases),
        lesson=lesson,
    )


def attentions(lab: Lab) -> Exhibit:
    """Computes attention with its score matrix in memory, and in tiles."""
    N, H, dim, dtype = ATTENTION[lab.device.type]
    case = Problem(name="tour", tags=frozenset(), B=1, T=N, S=N, H=H, Hk=H, dim=dim, dtype=dtype, mask=FULL)
    problem = case.problem(arch(lab.device))
    q, k, v = (torch.randn(1, N, H, dim, device=lab.device).to(problem.spec.dtype) for _ in range(3))
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    scores = torch.empty(1, H, N, N, device=lab.device, dtype=q.dtype)
    out = torch.empty_like(heads[0])
    tiled = None if lab.on_gpu else "tiled"

    def standard() -> None:
        torch.matmul(heads[0] * dim**-0.5, heads[1].mT, out=scores)
        torch.softmax(scores, -1, out=scores)
        torch.matmul(scores, heads[2], out=out)

    work, special = flops.count(problem), flops.exponentials(problem)
    moved = {"standard": io.standard(problem).total, "tiled": io.compulsory(problem).total}
    rows = (moved["tiled"] // 2, moved["standard"] // 4)  # bytes of two of q, k, v, o, and of the scores once
    product = lab.expect(bytes=sum(rows), flops=work / 2, product=dtype)
    stored = one_after_another([product, lab.expect(bytes=2 * rows[1], special=special), product])
    kept = lab.expect(bytes=moved["tiled"], flops=work, special=special, product=dtype)

    def lesson(us: Mapping[str, float]) -> str:
        bytes_of = {name: count(total, "B") for name, total in moved.items()}
        if us["standard"] <= us["tiled"]:
            ratio = digits(us["tiled"] / us["standard"])
            fewer = f"{bytes_of['tiled']} and not {bytes_of['standard']}"
            return f"Here the tiles take {ratio} times as long, though they move {fewer}."
        ratio = digits(us["standard"] / us["tiled"])
        return (
            f"The same {count(work)} FLOPs take {ratio} times as long where the scores go through memory: "
            f"{bytes_of['standard']} move in place of {bytes_of['tiled']}."
        )

    return Exhibit(
        title="Attention, standard and tiled",
        does=f"Attention of {N:,} tokens, {H} heads of {dim}, in {dtype}; standard attention stores {N:,} x {N:,} scores.",
        cases=(
            ExhibitCase(name="standard", expected=stored, work=standard),
            ExhibitCase(name="tiled", expected=kept, work=lambda: rooftile.attention(q, k, v, backend=tiled)),
        ),
        lesson=lesson,
    )
