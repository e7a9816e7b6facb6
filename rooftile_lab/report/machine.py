"""This machine in plain values: hardware, measured ceilings, which backends run here, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import rooftile
from rooftile.cost.session import commit
from rooftile.exact import dispatch
from rooftile.exact.cases import Case
from rooftile.exact.masks import CAUSAL
from rooftile.hardware import ceilings
from rooftile.hardware.chips import Chip, chip_named
from rooftile.hardware.device import describe
from rooftile_lab.report.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """One ceiling: the measured value, and the datasheet's if there is one."""

    what: str
    measured: float
    datasheet: float | None
    unit: str
    others: float | None = None  # cores that other programs kept busy while it was measured; None where that is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The content of the page's first section."""

    device: dict[str, Any]
    datasheet: str  # the source of the datasheet numbers
    roofs: tuple[Roof, ...]
    measured_on: str
    problem: str  # the spec of the verdicts
    chosen: str
    verdicts: dict[str, tuple[str, ...]]
    ceilings: dict[str, Any] = field(default_factory=dict)  # all of them, as `Ceilings.json` has them


def survey(plan: Plan, device: str) -> Machine:
    """Measures the ceilings again (a quick plan uses cached ones) and checks every backend for a training step."""
    seen = describe(device)
    measured = ceilings.measure(device, refresh=not plan.is_quick)
    chip = chip_named(seen.name) if seen.type == "cuda" else None
    spec = _training_case(plan).problem(seen.arch).spec
    verdicts = dispatch.verdicts(spec)
    return Machine(
        device=seen.json(),
        datasheet=f"{chip.name} ({chip.kind})" if chip else "",
        roofs=tuple(_roofs(measured, chip)),
        measured_on=measured.date,
        problem=str(spec),
        chosen=str(dispatch.select(spec).NAME),
        verdicts=verdicts,
        ceilings=measured.json(),
    )


def settled(found: Machine, known: ceilings.Ceilings) -> tuple[Machine, ceilings.Ceilings]:
    """Returns the machine with the highest ceilings that the run has seen, so that the page has one speed of each kind."""
    final = ceilings.higher(ceilings.Ceilings(**found.ceilings), known)
    chip = chip_named(found.device["name"]) if found.device["type"] == "cuda" else None
    return replace(found, roofs=tuple(_roofs(final, chip)), measured_on=final.date, ceilings=final.json()), final


def _training_case(plan: Plan) -> Case:
    sizes = {"B": plan.batch, "T": plan.lengths[0], "S": plan.lengths[0], "H": plan.heads, "Hk": plan.heads}
    return Case(name="report", tags=frozenset(), **sizes, dim=plan.dim, dtype=plan.dtype, mask=CAUSAL)


def _roofs(measured: ceilings.Ceilings, chip: Chip | None) -> list[Roof]:
    busy = measured.busy_cores
    copy = {"measured": measured.copy_gbs, "datasheet": chip and chip.bandwidth_gbs, "others": busy.get("copy_gbs")}
    roofs = [Roof(what="copies in memory", unit="GB/s", **copy)]  # type: ignore[arg-type]
    for dtype, tflops in measured.matmul_tflops.items():
        sheet = getattr(chip, f"{dtype}_tflops", None)
        roofs.append(
            Roof(what=f"{dtype} product", measured=tflops, datasheet=sheet, unit="TFLOP/s", others=busy.get(f"{dtype} product"))
        )
    return roofs


def reproduction(command: str) -> dict[str, str]:
    """Returns the command, the commit ("unknown" outside of a checkout) and the date, so that a reader can repeat the run."""
    return {
        "command": command,
        "rooftile": rooftile.__version__,
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
