"""The first screen: what a step contains, and the causes that matter with the one thing to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rooftile.diagnosis.output.causes import causes, contents
from rooftile.diagnosis.remedies.remedy import Remedy
from rooftile.diagnosis.verdicts.step import StepEvidence
from tests.diagnosis.output.test_diagnosis import example, findings

WAITS = StepEvidence(
    time_us=10_000, idle_us={"host": 6000, "sync": 1000}, waiting_us=5000,
    host_us={"PIL.Image.resize, called at data.py:3": 4000, "train.py:9": 1000},
)  # fmt: skip
LOADER = Remedy(name="load beside the step", predicted_us=4500, how="data.py:3: DataLoader(num_workers=3)", changes="nothing")
LARGER = Remedy(name="larger batch", predicted_us=100, how="twice the batch", changes="memory")


def test_a_step_says_what_it_contains() -> None:
    ops = example().ops
    count = sum(op.calls for op in ops)
    assert contents(ops) == f"One step calls {count} operators (forward {count})."
    mixed = [replace(op, phase=phase) for op, phase in zip(ops, ("forward", "backward", "optimiser", "forward"), strict=True)]
    calls = {phase: sum(op.calls for op in mixed if op.phase == phase) for phase in ("forward", "backward", "optimiser")}
    assert contents(mixed).endswith(f"({', '.join(f'{phase} {number}' for phase, number in calls.items())}).")
    assert contents([]) == ""


def test_the_largest_cause_is_first_with_its_evidence_and_remedy() -> None:
    found = example(step=WAITS, remedies=[LARGER, LOADER], busy_us=3000.0)
    first, *others = causes(found.step, found.ops, found.remedies)
    assert first.bound == "host"
    assert first.head() == (
        "waiting for the host, 60 % of the step: 40 % in PIL.Image.resize, called at data.py:3, 10 % in train.py:9, 10 % waiting "
        "for the device"
    )
    assert first.advice(found.step.time_us) == "load beside the step saves 4.5 ms (45 %); data.py:3: DataLoader(num_workers=3)"
    assert [cause.share for cause in others] == sorted((cause.share for cause in others), reverse=True)
    assert all(cause.share >= 0.05 for cause in others)
    assert len(others) <= 2
    text = found.text(3)
    assert text.index("1. waiting for the host") < text.index("module")
    assert "> load beside the step saves 4.5 ms" in text


def test_a_cause_names_its_operators_and_the_share_by_experiment() -> None:
    found = example(step=StepEvidence(time_us=15_000, idle_us={"host": 100}), remedies=[])
    head = {cause.bound: cause for cause in causes(found.step, found.ops, found.remedies)}
    assert head["memory"].head().endswith("native_layer_norm; 100 % of it by experiment")
    assert head["memory"].advice(1.0) == "no change is known that saves a part of it"


def test_a_remedy_that_was_tried_and_costs_time_is_no_advice() -> None:
    row = next(n for n, one in enumerate(findings()) if one.operation.op == "aten::native_layer_norm")
    slower = Remedy(name="fuse", ops=(row,), predicted_us=500, measured_us=-20, how="torch.compile", changes="rounding")
    found = example(step=StepEvidence(time_us=15_000), remedies=[slower])
    assert all(cause.remedy is None for cause in causes(found.step, found.ops, found.remedies) if cause.bound == "memory")


@pytest.mark.parametrize("share", [0.04, 0.06])
def test_small_causes_are_left_out(share: float) -> None:
    found = example()
    step = replace(found.step, shares={"overhead": 1 - share, "memory": share})
    assert len(causes(step, found.ops, found.remedies)) == (2 if share > 0.05 else 1)
