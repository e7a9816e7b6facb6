"""Diagnoses what the report itself runs: a pass with more and more arithmetic, its training step, and its decode step.

The training step is diagnosed twice, with eager attention, which stores its scores, and with Rooftile behind SDPA. The decode step is
the decode step of `rooftile.LLM` on the checkpoint that the training wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rooftile.diagnosis.diagnosis import Diagnosis
from rooftile.diagnosis.programs.diagnose_call import diagnose
from rooftile.diagnosis.programs.diagnose_checkpoint import diagnose_checkpoint
from rooftile.diagnosis.tour.elementwise import knee_of, repeats
from rooftile.diagnosis.tour.exhibit import Lab, show
from rooftile.hardware import ceilings
from rooftile_lab.report.plan import DiagnosisPlan, ModelPlan, Plan
from rooftile_lab.report.training import batches, corpus, in_force, llama, quiet

# names of operators of attention, ours and those that eager attention is made of
ATTENTION = ("attention", "bmm", "softmax")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Horace He's experiment: the time of one pass over an array with more and more arithmetic."""

    bytes: int  # read and written
    points: tuple[tuple[int, float, float], ...]  # repeats, predicted and measured µs
    knee: float  # repeats, where the ceilings put it
    measured_knee: float | None  # None: the time does not rise
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed:
    """The section's content. What could not run is in `why_not`."""

    repeats: Repeats | None
    eager: Diagnosis | None  # the training step with eager attention
    rooftile: Diagnosis | None
    decode: Diagnosis | None
    batch: int  # answers that decode at once
    why_not: dict[str, str]

    def json(self) -> dict[str, Any]:
        """Returns the numbers as plain values."""
        steps = {"eager": self.eager, "rooftile": self.rooftile, "decode": self.decode}
        return {
            "repeats": self.repeats and asdict(self.repeats), "why_not": self.why_not,
            **{name: found and json.loads(found.to_json()) for name, found in steps.items()},
        }  # fmt: skip


def diagnose_all(plan: Plan, device: str, folder: Path | None, on_step: Callable[[float, str], None]) -> Diagnosed:
    """Diagnoses all parts; without a folder with a trained model, only the repeats."""
    why_not: dict[str, str] = {}
    on_step(0.0, "repeating an operation in one pass over memory")
    found = raise_arithmetic(plan.diagnosis, device, why_not)
    steps: dict[str, Diagnosis] = {}
    if folder is not None:
        for n, attention in enumerate(("eager", "rooftile")):
            on_step(0.4 + 0.25 * n, f"diagnosing a training step with {attention} attention")
            steps[attention] = training_step(plan.model, attention, device, plan.diagnosis.budget)
        on_step(0.9, "diagnosing a decode step")
        sizes = {"batch": plan.diagnosis.batch, "context": plan.diagnosis.context}
        steps["decode"], _ = diagnose_checkpoint(folder, **sizes, device=device, budget=plan.diagnosis.budget / 2)
    return Diagnosed(
        repeats=found, eager=steps.get("eager"), rooftile=steps.get("rooftile"), decode=steps.get("decode"),
        batch=plan.diagnosis.batch, why_not=why_not,
    )  # fmt: skip


def raise_arithmetic(plan: DiagnosisPlan, device: str, why_not: dict[str, str]) -> Repeats | None:
    """Measures the repeats; None if they cannot be compiled here, with the reason in why_not."""
    lab = Lab(torch.device(device), ceilings.measure(device))
    exhibit = repeats(lab, plan.rungs, plan.nbytes)
    shown = show(exhibit, lab.device)
    if shown.failed:
        why_not["repeats"] = shown.sentence
        return None
    measured = [(int(case.name), shown.measured_us[case.name]) for case in exhibit.cases]
    return Repeats(
        bytes=2 * plan.nbytes,
        points=tuple((r, case.expected.us, us) for case, (r, us) in zip(exhibit.cases, measured, strict=True)),
        knee=4e3 * lab.ceilings.fma_tflops / lab.ceilings.copy_gbs,
        measured_knee=knee_of(measured),
        sentence=shown.sentence,
    )


def training_step(plan: ModelPlan, attention: str, device: str, budget: float) -> Diagnosis:
    """Diagnoses one step of the report's own training: forward, backward, optimiser."""
    model = llama(plan).to(device)
    if attention == "eager":
        with quiet():
            model.set_attn_implementation("eager")
    optimiser = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate)
    batch = next(batches(plan, corpus().to(device)))
    autocast = plan.dtype != "fp32"

    def step() -> None:
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    step.__qualname__ = f"training step with {attention} attention"
    with in_force(device) if attention == "rooftile" else nullcontext():
        return diagnose(step, budget=budget)


def attention_bytes(found: Diagnosis) -> int:
    """Returns the bytes that a step's attention moves, forward and backward, by the names of its operators."""
    return sum(op.bytes or 0 for op in found.ops if any(word in op.op for word in ATTENTION))
