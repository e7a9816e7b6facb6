"""The section of the page about the machine: its ceilings with the load under which they were measured, and its backends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooftile.drawing.units import count, size
from rooftile_lab.report.machine import Machine, Roof


def section(machine: Machine) -> dict[str, Any]:
    """Returns the section's words and rows."""
    device = machine.device
    able = [name for name, reasons in machine.verdicts.items() if not reasons]
    backends = []
    for name, reasons in machine.verdicts.items():
        words = "does not run here: " + "; ".join(reasons) if reasons else "runs"
        backends.append((name, "runs, and is chosen" if name == machine.chosen else words))
    unit = "cores" if device["type"] == "cpu" else "multiprocessors"
    return {
        "claim": f"It copies {_rate(machine.roofs[0])} and multiplies {_best(machine)}",
        "has_sheet": bool(machine.datasheet),
        "roofs": [
            (roof.what, _rate(roof), _rate(replace(roof, measured=roof.datasheet)) if roof.datasheet else "", _busy(roof))
            for roof in machine.roofs
            if roof.measured
        ],
        "has_load": any(roof.others is not None for roof in machine.roofs),
        "roofs_note": (
            f"{device['name']}, {device['cores']} {unit}, {size(device['memory_bytes'])} of memory. "
            f"Measured {machine.measured_on[:10]} on random data: the highest of this run, and the cores that other programs kept busy meanwhile." + f" Datasheet: {machine.datasheet}." * bool(machine.datasheet)
        ),
        "backends_claim": f"{len(able)} of {len(machine.verdicts)} backends run a causal training step here",
        "backends": backends,
        "problem": machine.problem,
    }  # fmt: skip


def _best(machine: Machine) -> str:
    best = max(machine.roofs[1:], key=lambda roof: roof.measured)
    return f"{_rate(best)} in {best.what.split()[0]}"


def _rate(roof: Roof) -> str:
    """Writes a rate with a unit in which it is no 0."""
    scale, unit = {"GB/s": (1e9, "B/s"), "TFLOP/s": (1e12, "FLOP/s")}[roof.unit]
    return count(roof.measured * scale, unit)


def _busy(roof: Roof) -> str:
    return "–" if roof.others is None else f"{roof.others:.1f} cores"
