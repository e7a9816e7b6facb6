"""Small decoders trained with each method of attention, with equally many parameters and steps: how much each of them loses.

    recall-METHOD    associative recall, at three learning rates on a GPU and one on a CPU; the best counts
    english-METHOD   the next byte of the docs of Python and its standard library, at one learning rate
    needle           the exact model, decoded by Loki with an eighth of the keys: a pair at ten depths of a text

`all_recall` is the share of right answers, `pairs_N_recall` in texts with N pairs, and `distance_N_recall` of questions
up to N tokens behind their pair, and farther than the next smaller N. `chance_recall` is the share of a guess. The loss of
English is in nats per byte, on text that no model was trained on; `frequencies_nats` is the loss of a guess by the frequencies of
bytes. Times are of a training step, on a CPU on one core, and absent with `jobs`: then several processes train at once, one for
each method. A method that fails is a row with a reason. There is one training per learning rate, so differences of a few
hundredths mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from rooftile.cost.session import Session
from rooftile_lab.bench.learning import needle
from rooftile_lab.bench.learning.english import English
from rooftile_lab.bench.learning.methods import EXACT, METHODS, NOT_CAUSAL
from rooftile_lab.bench.learning.recall import Recall
from rooftile_lab.bench.learning.study import Plan, Read, Recalled, learn_english, learn_recall
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import figures, timed_row
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.side_by_side import side_by_side
from rooftile_lab.bench.threads import one_thread
from rooftile_lab.bench.works import tidy, words_of_error

GPU = (
    *(f"recall-{method}" for method in METHODS),
    *(f"english-{method}" for method in METHODS if method not in NOT_CAUSAL),
    "needle",
)
CPU = ("recall-exact", "recall-linear", "recall-linformer", "needle")
QUICK = ("recall-exact", "recall-linear", "recall-native_sparse", "needle")

PLANS = {
    "cuda": Plan(
        task=Recall(length=256, pairs=(4, 8, 16, 32, 64), keys=64, values=8), hidden=128, heads=4, layers=4, batch=32,
        steps=700, rates=(1e-3, 3e-3, 1e-2), tests=128, english_steps=400, english_rate=3e-3,
    ),
    "cpu": Plan(
        task=Recall(length=64, pairs=(4, 8, 16, 32), keys=32, values=8), hidden=64, heads=2, layers=2, batch=16, steps=300,
        rates=(5e-3,), tests=64, english_steps=200, english_rate=3e-3,
    ),
}  # fmt: skip


def measure(session: Session, names: Sequence[str], say: Progress, jobs: int = 1) -> Iterator[Row]:
    """A row for each method and task, and for each way to decode the needle; `jobs` processes train at once."""
    if jobs > 1:
        yield from side_by_side(session, "recall", groups_of(names), jobs, say)
        return
    plan, made = PLANS[session.device.type], _Made()
    for number, name in enumerate(names, 1):
        say(f"{name}, {number} of {len(names)}")
        task, _, method = name.partition("-")
        try:
            # Triton launches on the current device
            current = torch.cuda.device(session.device) if session.device.type == "cuda" else nullcontext()
            with one_thread(session.device), current:
                rows = list(_rows(session, task, method, plan, made, say))
        except Exception as error:
            # the one place that catches whatever a method raises: a study of an hour should not end at its first failure
            reason = f"failed: {words_of_error(error, 600)}"
            say(f"{name} {reason}")
            rows = [_row(session, plan, task, method or EXACT, [], reason=reason)]
        yield from rows
        tidy(session.device)


def groups_of(names: Sequence[str]) -> list[list[str]]:
    """The cases of each method: recall and needle of the exact one share a model, and all share what was compiled."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition("-")[2] or EXACT, []).append(name)
    return list(groups.values())


class _Made:
    """Keeps what several cases of a run share: the exact model that recalls, and the text."""

    exact: Recalled | None = None
    text: English | None = None


def _rows(session: Session, task: str, method: str, plan: Plan, made: _Made, say: Progress) -> Iterator[Row]:
    if task == "recall":
        found = learn_recall(method, plan, session.device, say)
        made.exact = found if method == EXACT else made.exact
        say(f"recall, {method}: {found.recall:.3f}")
        yield recall_row(session, plan, found)
    elif task == "english":
        made.text = made.text or English.read(session.device, long=True)
        read = learn_english(method, plan, made.text, session.device, say)
        say(f"English, {method}: {read.loss:.3f} nats per byte")
        yield english_row(session, plan, read)
    else:
        made.exact = made.exact or learn_recall(EXACT, plan, session.device, say)
        say("needle: decoding at ten depths")
        generator = torch.Generator(session.device).manual_seed(3)
        found_by = needle.needles(made.exact.model, plan.task, plan.tests, generator)
        kept: dict[str, Any] = {"dims": needle.DIMS, "keep": needle.KEEP, "page": needle.PAGE}
        for way, shares in found_by.items():
            measures = {f"depth_{depth}_recall": figures(share) for depth, share in shares.items()}
            measures["all_recall"] = figures(sum(shares.values()) / len(shares))
            yield _row(session, plan, task, way, [], phase="decode", measures=measures, **kept)


def recall_row(session: Session, plan: Plan, found: Recalled) -> Row:
    """The row of a method that learned recall."""
    measures = {"all_recall": found.recall, "chance_recall": plan.task.chance}
    measures |= {f"pairs_{pairs}_recall": share for pairs, share in found.by_pairs.items()}
    measures |= {f"distance_{end}_recall": share for end, share in found.by_distance.items()}
    return _row(
        session, plan, "recall", found.method, found.trained.step_us, measures={k: figures(v) for k, v in measures.items()},
        steps=plan.steps, rate=found.rate, recall_by_rate={f"{rate:g}": figures(share) for rate, share in found.by_rate.items()},
        parameters=found.model.parameter_count,
    )  # fmt: skip


def english_row(session: Session, plan: Plan, read: Read) -> Row:
    """The row of a method that learned English."""
    measures = {"loss_nats": figures(read.loss), "frequencies_nats": figures(read.frequencies_loss)}
    return _row(
        session, plan, "english", read.method, read.trained.step_us, measures=measures, steps=plan.english_steps,
        rate=plan.english_rate, parameters=read.parameters,
    )  # fmt: skip


def _row(
    session: Session, plan: Plan, task: str, method: str, samples: Sequence[float], *, measures: dict[str, float] | None = None,
    phase: str = "step", reason: str = "", **settings: Any,
) -> Row:  # fmt: skip
    size = f"{plan.layers} layers of {plan.hidden}, {plan.heads} heads in groups of 2, batch {plan.batch} x {plan.task.length}"
    return timed_row(
        session, samples, dtype=session.dtype, suite="recall", case=task, backend=method, phase=phase, problem=size,
        measures=measures or {}, settings=settings, reason=reason,
    )  # fmt: skip
