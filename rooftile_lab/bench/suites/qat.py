"""Losses on held-out English: what rounding costs a small decoder in each format, and what training for the format wins back.

`continued_nats` is the loss after further steps in full precision, `rounded_nats` of the same model rounded, `trained_nats`
of a model which took the same further steps with rounded weights; in nats per byte, as means over the seeds, with the least
and the most of them in `low` and `high`. Weights of the cases 2:4 are masked, and not rounded. `recovered` is the share of the
loss by rounding that training wins back, of the means; it is absent where rounding costs less than what two trainings differ by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from statistics import mean

import torch

from rooftile.cost.session import Session
from rooftile.weights.two_four import Recipe as Sparsity
from rooftile_lab.bench.learning.english import English
from rooftile_lab.bench.learning.formats import Learned, Plan, Recipe, learn_formats, recovered
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import timed_row
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.threads import one_thread

# int4-row has a scale for a row, int4-row-lsq learns it, and mxfp4-mxfp4 has activations in mxfp4, too
WORDS = {
    "fp8": Recipe("fp8"), "int8": Recipe("int8"), "int4-row": Recipe("int4:row"), "int4-32": Recipe("int4:32"),
    "int4-row-lsq": Recipe("int4:row", estimator="lsq"), "mxfp8": Recipe("mxfp8"), "mxfp4": Recipe("mxfp4"),
    "mxfp4-mxfp4": Recipe("mxfp4", activations="mxfp4"), "2:4": Recipe(None, sparsity=Sparsity()),
    "2:4-transposable": Recipe(None, sparsity=Sparsity(transposable=True)),
}  # fmt: skip
GPU = CPU = tuple(WORDS)
QUICK = ("int8", "int4-row")
SEEDS = (1, 2, 3)
# nats
NOISE = 0.005
PLAN = Plan(
    hidden=128, heads=4, layers=2, ffn=384, length=128, batch=16, steps=700, rate=3e-3, further_steps=150, further_rate=1e-3,
    tests=64,
)  # fmt: skip


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each format."""
    found: dict[str, list[Learned]] = {name: [] for name in names}
    # Triton launches on the current device
    current = torch.cuda.device(session.device) if session.device.type == "cuda" else nullcontext()
    with one_thread(session.device), current:
        text = English.read(session.device)
        for seed in SEEDS:
            learned = learn_formats([WORDS[name] for name in names], PLAN, text, seed, session.device, say)
            for name, one in zip(names, learned, strict=True):
                found[name].append(one)
    for name in names:
        yield row(session, name, found[name])


def row(session: Session, name: str, found: Sequence[Learned]) -> Row:
    """The row of one format."""
    losses = {
        f"{what}_nats": [getattr(one, what) for one in found] for what in ("continued", "rounded", "trained")
    }  # fmt: skip
    means = {what: mean(values) for what, values in losses.items()}
    three = [means[f"{what}_nats"] for what in ("continued", "rounded", "trained")]
    share = {"recovered": round(recovered(*three), 3)} if three[1] - three[0] >= NOISE else {}
    size = f"{PLAN.layers} layers of {PLAN.hidden}, batch {PLAN.batch} x {PLAN.length}"
    return timed_row(
        session, [], dtype=session.dtype, suite="qat", case=name, backend="rooftile", phase="train", problem=size,
        measures={what: round(value, 4) for what, value in means.items()} | share,
        low={what: round(min(values), 4) for what, values in losses.items()},
        high={what: round(max(values), 4) for what, values in losses.items()},
        settings={"steps": PLAN.steps, "further_steps": PLAN.further_steps, "seeds": len(found)},
    )  # fmt: skip
