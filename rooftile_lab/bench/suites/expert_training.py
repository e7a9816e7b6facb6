"""Small decoders that learn English, with experts and without, at equal active width: their loss, and the load of each expert.

    dense         one feed-forward per layer, as wide as the experts that a token uses
    balanced      experts, with the balance loss
    unbalanced    experts, without it

`loss_nats` is in nats per byte of held-out text. `busiest_load_ratio` is the largest load of any expert of any layer over the
mean load, `idle_experts` the number of experts with less than a tenth of it, and `loads` in the settings has all loads, by layer.
With `jobs` several processes train at once, and times of steps are absent. There is one training of each, so differences of a
hundredth of a nat mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch

from rooftile.cost.session import Session
from rooftile_lab.bench.learning.english import English
from rooftile_lab.bench.learning.expert_training import KINDS, ExpertPlan, TrainedExperts, learn
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import figures, timed_row
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.side_by_side import side_by_side
from rooftile_lab.bench.threads import one_thread
from rooftile_lab.bench.works import tidy, words_of_error

GPU: tuple[str, ...] = KINDS
CPU = QUICK = GPU
# the share of the mean load below which an expert counts as idle
IDLE = 0.1

PLANS = {
    "cuda": ExpertPlan(
        hidden=256, heads=4, layers=4, experts=32, active=4, shared=1, width=128, alpha=0.01, batch=32, length=256, steps=600,
        rate=2e-3, tests=256,
    ),
    "cpu": ExpertPlan(
        hidden=64, heads=2, layers=3, experts=16, active=3, shared=1, width=32, alpha=0.01, batch=8, length=64, steps=150,
        rate=5e-3, tests=64,
    ),
}  # fmt: skip


def measure(
    session: Session, names: Sequence[str], say: Progress, jobs: int = 1, plan: ExpertPlan | None = None
) -> Iterator[Row]:
    """Yields a row for each kind; `jobs` is the number of processes that train at once. By default the plan is the device's."""
    if jobs > 1:
        yield from side_by_side(session, "expert-training", [[name] for name in names], jobs, say)
        return
    plan = plan or PLANS[session.device.type]
    text = English.read(session.device, long=True)
    for name in names:
        try:
            # Triton launches on the current device
            current = torch.cuda.device(session.device) if session.device.type == "cuda" else nullcontext()
            with one_thread(session.device), current:
                yield row_of(session, plan, learn(name, plan, text, session.device, say))
        except Exception as error:
            # a kind that fails should not end the study
            reason = f"failed: {words_of_error(error, 600)}"
            say(f"{name} {reason}")
            yield timed_row(session, [], suite="expert-training", case="english", backend=name, phase="step", reason=reason)
        tidy(session.device)


def row_of(session: Session, plan: ExpertPlan, found: TrainedExperts) -> Row:
    """The row of a kind."""
    loads = [load for layer in found.loads for load in layer]
    measures = {"loss_nats": figures(found.loss)}
    if loads:
        measures |= {"busiest_load_ratio": figures(max(loads)), "idle_experts": sum(load < IDLE for load in loads)}
    size = f"{plan.layers} layers of {plan.hidden}, active width {plan.active_width}"
    size = f"{size}, {plan.steps} steps of {plan.batch} x {plan.length}"
    settings = {
        "experts": plan.experts, "active": plan.active, "shared": plan.shared, "width": plan.width, "alpha": plan.alpha,
        "rate": plan.rate, "parameters": found.parameters, "loads": [[round(load, 3) for load in layer] for layer in found.loads],
    }  # fmt: skip
    return timed_row(
        session, found.trained.step_us, dtype=session.dtype, suite="expert-training", case="english", backend=found.kind,
        phase="step", problem=size, measures=measures, settings=settings,
    )  # fmt: skip
