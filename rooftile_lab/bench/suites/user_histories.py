"""Models of clicks trained on users' last n events: what a longer history brings, and what it costs.

    din          target attention over all n events
    sim-soft     over the 16 with the largest products of embeddings
    sim-hard     over the latest 16 of the candidate's category
    eta          over the 16 with the nearest hashes
    twin         over the 16 with the largest scores of each head, the bias of ages included
    hstu         a layer of HSTU over the events and the candidates

Users have 4,096 events and interests at known distances (`planted_clicks`). A model is trained on users of n events, in stages of
rising n, and tested on the last n events of others. `all_auc` counts all candidates; `within_auc` those whose interest lies in
the n events, or nowhere; `far_auc` those whose interest lies in the oldest three quarters of the whole history, or nowhere;
`possible_auc` is the AUC of one who knows the n events. The time is a user's, of a batch of users with 64 candidates each, and
holds embedding and projecting the whole history; `user_bytes` are counted, where keys and values are kept. On a CPU one core
trains and is timed. One training each, so differences of a few hundredths mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch

from rooftile.cost.session import Session
from rooftile.hardware.clock import clock_for, take_turns
from rooftile_lab.bench.learning.clicks import METHODS, Learned, Plan, Stage, bytes_read, learn, logits, moved
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import figures, timed_row
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.threads import one_thread
from rooftile_lab.bench.works import tidy, words_of_error

GPU = CPU = QUICK = tuple(METHODS)
PLAN = Plan(
    whole=4096,
    stages=(
        Stage(length=64, steps=240, users=32),
        Stage(length=256, steps=60, users=16),
        Stage(length=1024, steps=48, users=8),
        Stage(length=4096, steps=96, users=4),
    ),
)
# for the report: under a minute for all methods
SHORT = Plan(
    whole=256,
    stages=(
        Stage(length=16, steps=160, users=32),
        Stage(length=64, steps=60, users=16),
        Stage(length=256, steps=96, users=6),
    ),
    test_users=32,
)
# eight users do not keep a GPU busy
PLANS = {"cpu": PLAN, "cuda": replace(PLAN, timed_users=128)}


def measure(session: Session, names: Sequence[str], say: Progress, plan: Plan | None = None) -> Iterator[Row]:
    """A row for each method and length."""
    plan = plan or PLANS[session.device.type]
    for name in names:
        say(f"{name}: training")
        try:
            # Triton launches on the current device
            current = torch.cuda.device(session.device) if session.device.type == "cuda" else nullcontext()
            with one_thread(session.device), current:
                for found in learn(name, plan, session.device):
                    yield row_of(session, name, plan, found)
        except Exception as error:
            # a method that fails should not end the study
            reason = f"failed: {words_of_error(error, 600)}"
            say(f"{name} {reason}")
            yield timed_row(session, [], suite="user-histories", case="last", backend=name, phase="score", reason=reason)
        tidy(session.device)


def row_of(session: Session, method: str, plan: Plan, found: Learned) -> Row:
    """The row of a method after a stage."""
    device = session.device
    clicks = plan.drawn(plan.timed_users, found.length, plan.test_candidates, torch.Generator().manual_seed(3))
    with torch.no_grad():
        call = partial(logits, method, found.model, moved(clicks.events, device), clicks.candidates.to(device))
        call()
        samples = take_turns({method: call}, clock_for(device, 60.0))[method]
    measures = {
        "length_events": found.length, "all_auc": figures(found.auc), "within_auc": figures(found.within),
        "far_auc": figures(found.far), "possible_auc": figures(found.possible),
        "user_bytes": bytes_read(method, plan, found.length), "train_s": figures(found.train_s),
    }  # fmt: skip
    size = (
        f"{plan.whole:,} events, {plan.test_candidates} candidates, width {plan.dim}, {plan.heads} heads, "
        f"searches of {plan.top_k} events, {plan.test_users} users, timed in batches of {plan.timed_users}"
    )
    return timed_row(
        session, [us / plan.timed_users for us in samples], dtype="fp32", suite="user-histories", case=f"last-{found.length}",
        backend=method, phase="score", problem=size, measures=measures,
    )  # fmt: skip
