"""Whole training steps of Transformers models on random tokens, in turns.

    eager, sdpa    the model as it comes, with eager attention or PyTorch's SDPA
    rooftile       attn_implementation="rooftile", and `rt.enable`
    fused          the same, and `rt.fuse` with `rooftile.optim.AdamW`
    liger          the same attention, and Liger's kernels in the model

A step is forward, backward and AdamW. Each contestant has a model of its own with the same weights, and all steps of a turn
follow one another without a wait, as in a training loop, so the host's time counts where the GPU has to wait for it.

    median_us       the whole step ("step"), or forward and backward alone ("fwd+bwd")
    tok_s           tokens per second; padding counts, as every contestant computes it outside attention
    of_sdpa_ratio   SDPA's median time over this one's: above 1 is faster than SDPA

Weights are random and in bf16 on a GPU, dropout is off. The SDPA of PyTorch is run as it comes, without Rooftile behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import rooftile as rt
from rooftile.cost.session import Session
from rooftile.exact.spec import DTYPES
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import figures, timed_row
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.training_models import RECIPES, Recipe, batch_of, model_of
from rooftile_lab.bench.works import tidy

CONTESTANTS = ("eager", "sdpa", "rooftile", "fused", "liger")
# those that change the model, and the families that each knows
CHANGED = {"fused": ("llama", "gpt2"), "liger": ("llama",)}
PHASES = ("step", "fwd+bwd")
CPU = tuple(name for name in RECIPES if name.startswith("tiny"))
GPU = tuple(name for name in RECIPES if name not in CPU)
QUICK = ("gpt2-16x1k", "bert-64x512", "llama-1b-2x4k")


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each case, contestant and phase."""
    for name in names:
        yield from _case(session, name, RECIPES[name], say)


def _case(session: Session, name: str, recipe: Recipe, say: Progress) -> Iterator[Row]:
    batch = batch_of(recipe, session.device)
    reasons = {name: reason for name in CONTESTANTS if (reason := _reason(name, recipe, session))}
    students: dict[str, Student] = {}
    for contestant in CONTESTANTS:
        if contestant not in reasons:
            say(f"{name}: {contestant}, the first steps")
            students[contestant] = Student(contestant, recipe, session, batch)
            students[contestant].train(3)
            students[contestant].forget()
    for turn in range(recipe.rounds):
        say(f"{name}: round {turn + 1} of {recipe.rounds}")
        # back and forth: a chip clocks lower after a busy neighbour
        for contestant in list(students)[:: -1 if turn % 2 else 1]:
            students[contestant].train(recipe.steps)
    yield from _rows(session, name, recipe, batch, students, reasons)
    students.clear()
    tidy(session.device)


def _rows(
    session: Session,
    name: str,
    recipe: Recipe,
    batch: dict[str, Tensor],
    students: dict[str, Student],
    reasons: dict[str, str],
) -> Iterator[Row]:
    tokens = recipe.batch * recipe.length
    for contestant in CONTESTANTS:
        student = students.get(contestant)
        for phase in PHASES:
            taken = [] if student is None else student.taken[phase]
            measures: dict[str, float] = {}
            if taken:
                measures = {"tok_s": figures(tokens / median(taken) * 1e6)}
                if "sdpa" in students:
                    measures["of_sdpa_ratio"] = figures(median(students["sdpa"].taken[phase]) / median(taken))
            yield timed_row(
                session, taken, dtype=session.dtype, suite="training", case=name, backend=contestant, phase=phase,
                problem=f"{recipe.family}, batch {recipe.batch} x {recipe.length}", measures=measures,
                peak_bytes=None if student is None else student.peak_bytes, reason=reasons.get(contestant, ""),
                settings={"tokens": int(batch["attention_mask"].sum()) if recipe.padded else tokens, "dropout": 0.0},
            )  # fmt: skip


def _reason(contestant: str, recipe: Recipe, session: Session) -> str:
    """Why a contestant is not run: eager attention where its matrices find no room."""
    room = 0.8 * session.machine.memory_bytes
    if contestant == "eager" and recipe.score_bytes > room:
        return f"refused: about {recipe.score_bytes / 2**30:.0f} GiB of T x S matrices; {room / 2**30:.0f} GiB are left for them"
    if contestant in CHANGED and recipe.family not in CHANGED[contestant]:
        return f"refused: {recipe.family}; has {', '.join(CHANGED[contestant])}"
    if contestant == "liger" and find_spec("liger_kernel") is None:
        return "refused: liger-kernel is not installed"
    if contestant == "liger" and session.device.type != "cuda":
        return "refused: its kernels are for a GPU"
    return ""


def change(model: Any, contestant: str) -> None:
    """Puts a contestant's kernels into a model."""
    if contestant == "fused":
        rt.fuse(model, verbose=False)
    elif contestant == "liger":
        liger = import_module("liger_kernel.transformers")
        liger._apply_liger_kernel_to_instance(model=model)


class Student:
    """A model in training with one attention, and the time that its steps took."""

    def __init__(self, attention: str, recipe: Recipe, session: Session, batch: dict[str, Tensor]) -> None:
        self.attention, self.batch, self.device = attention, batch, session.device
        # weights are drawn where they stay: a CPU takes ten seconds for a billion of them
        with attending(attention), session.device:
            named = attention if attention in ("eager", "sdpa") else "rooftile"
            self.model = model_of(recipe, named).to(DTYPES[session.dtype])
        change(self.model, attention)
        self.model.train()
        adamw = rt.optim.AdamW if attention == "fused" else torch.optim.AdamW
        self.optimiser: torch.optim.Optimizer = adamw(self.model.parameters(), lr=1e-5)
        self.taken: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.peak_bytes: int | None = None
        self.loss: Tensor | None = None

    def forget(self) -> None:
        """Forgets the times so far, of steps in which kernels were compiled."""
        self.taken = {phase: [] for phase in PHASES}

    def train(self, steps: int) -> None:
        """Takes steps one after the other, and keeps the time of each."""
        held = 0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            held = torch.cuda.memory_allocated(self.device)
        with attending(self.attention):
            # the first mark comes after a step that is not counted: the host is ahead from then on, as in a long loop
            self._step(lambda: None)
            marks = [mark(self.device)]
            for _ in range(steps):
                self._step(lambda: marks.append(mark(self.device)))
                marks.append(mark(self.device))
        times = times_of(marks, self.device)
        for begun, learned, ended in zip(times[:-1:2], times[1::2], times[2::2], strict=True):
            self.taken["fwd+bwd"].append(learned - begun)
            self.taken["step"].append(ended - begun)
        if self.device.type == "cuda":
            # activations and gradients: weights and the optimiser's state are held all the time
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - held

    def _step(self, before_update: Callable[[], None]) -> None:
        self.loss = self.model(**self.batch).loss
        self.loss.backward()
        before_update()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)


@contextmanager
def attending(attention: str) -> Iterator[None]:
    """Rooftile behind Transformers for the contestants that have it: the SDPA of the others stays PyTorch's."""
    if attention not in ("rooftile", *CHANGED):
        yield
        return
    with rt.enabled():
        yield


def mark(device: torch.device) -> Any:
    """A moment: an event on a GPU, the host's clock elsewhere."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def times_of(marks: Sequence[Any], device: torch.device) -> list[float]:
    """The moments in µs since the first."""
    if device.type != "cuda":
        return [(one - marks[0]) * 1e6 for one in marks]
    torch.cuda.synchronize(device)
    return [marks[0].elapsed_time(one) * 1e3 for one in marks]
