"""A diagnosis as one HTML file: its sentence, the table, the pictures, and the numbers themselves.

`page.html` is the template. The file loads nothing: it works offline, on a phone and in dark mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rooftile.diagnosis.output.causes import causes, contents
from rooftile.diagnosis.output.json_rows import Op, Program, StepSummary
from rooftile.diagnosis.output.pictures.bars import NAMES, time_line, waterfall
from rooftile.diagnosis.output.pictures.roofline import roofline
from rooftile.diagnosis.output.pictures.sweeps import number_of, sweep_chart
from rooftile.diagnosis.output.table import LEGEND, PHASES, alone_words, counted, sentence
from rooftile.diagnosis.remedies.remedy import Remedy
from rooftile.drawing import page
from rooftile.drawing.page import Chart, json_element
from rooftile.drawing.units import count, duration, number, percent, size

# rows and curves that are shown at once; the others are a click away
SHOWN = 20
SWEEPS = 8
MOST_ROWS = 12
HEAD = ("operator", "calls", "time", "share", "FLOPs", "bytes", "F/B", "roof", "reached", "verdict")
EXPERIMENTS = (
    "operator", "alone", "in the step", "slope", "knee, F/B", "from the cache", "gain", "fixed part", "not possible",
)  # fmt: skip


# the meaning of each name of the JSON, and its unit
FACTS = {
    "memory bytes": ("memory", "B"), "l2 bytes": ("L2 cache", "B"), "arch": ("architecture", ""),
    "copy gbs": ("copies in main memory", "GB/s"), "cache gbs": ("copies in the cache", "GB/s"),
    "fma tflops": ("multiply-adds in fp32", "TFLOP/s"), "special gops": ("exponentials", "G/s"),
    "launch us": ("one of many small operators, one after the other", "µs"),
    "operator us": ("one small operator and its result", "µs"),
    "node us": ("a kernel of nothing in a CUDA graph", "µs"), "date": ("measured", ""),
}  # fmt: skip
# these name the ceilings' source: the words after a roof, a heading, and a sentence
SOURCES = {
    "measured": (
        " of this machine, measured", "This machine, and its measured ceilings", "Ceilings are measured on this machine",
    ),
    "datasheet": (" of a datasheet", "The machine, and the ceilings of its datasheet", "Ceilings are a datasheet's"),
    "none": (", which is unknown here", "The machine", "The machine's ceilings are unknown"),
}  # fmt: skip
CHANGES = {"nothing": "nothing", "rounding": "results, by rounding", "memory": "the memory it takes"}
UNTOLD = ("device", "kind", "uuid")


def render(values: Mapping[str, Any], program: Program, step: StepSummary, ops: Sequence[Op], remedies: Sequence[Remedy]) -> str:
    """Renders the page of a diagnosis.

    values: the whole of it, as in its JSON; the other arguments are parts of the same. Unknown numbers are None.

    Raises InvalidInput if jinja2 is not installed.
    """
    step = replace(step, time_us=step.time_us or 0.0, idle_us=_known(step.idle_us), shares=_known(step.shares))
    ops = [replace(op, time_us=op.time_us or 0.0, share=op.share or 0.0) for op in ops]
    remedies = [replace(remedy, predicted_us=remedy.predicted_us or 0.0) for remedy in remedies]
    names = [f"{op.module or '(step)'} {PHASES.get(op.phase, '')}{op.op.split('::')[-1]}" for op in ops]
    rows = [row_of(n, op, remedies) for n, op in enumerate(ops)]
    machine, ceilings = values["machine"], values["ceilings"]
    on_gpu = machine.get("type") == "cuda" or any(op.kernels for op in ops)
    source = SOURCES.get(ceilings.get("kind", ""), SOURCES["measured"])
    return page.render(
        "rooftile.diagnosis.output",
        "page.html",
        title=f"{duration(step.time_us)} per step, {_bound(step)}",
        headline=f"{duration(step.time_us)} per step, {_bound(step)}",
        sentence=f"{sentence(step, ops, remedies)} {contents(ops)}",
        causes=[(cause.head(), cause.advice(step.time_us)) for cause in causes(step, ops, remedies)],
        program=program,
        machine_name=machine.get("name") or "this machine",
        numbers_on_top=_numbers(step, remedies, "launches" if on_gpu else "operators"),
        time_line=time_line(step, ops),
        head=HEAD,
        rows=rows[:SHOWN],
        legend=LEGEND,
        more_rows=rows[SHOWN:],
        more_us=duration(sum(op.time_us for op in ops[SHOWN:])),
        roofline=roofline(ceilings, step, ops, remedies, names, on_gpu),
        sweeps=_sweeps(ops, names),
        sweeps_left=max(0, sum(bool(op.experiments.get("intensity", {}).get("added_us")) for op in ops) - SWEEPS),
        experiment_head=EXPERIMENTS,
        experiments=[_experiments(n, op, names[n]) for n, op in enumerate(ops) if op.experiments],
        waterfall=waterfall(step, remedies),
        remedies=[remedy_of(remedy) for remedy in remedies],
        uncounted=values["uncounted"],
        counters=[counted(counter) for counter in values["counters"]],
        notes=values["notes"],
        step_facts=list(_facts(step)),
        facts=list(_machine_facts(machine, ceilings)),
        source=source,
        numbers=json_element(values),
    )


def _bound(step: StepSummary) -> str:
    if step.bound in ("memory", "compute", "overhead", "latency", "communication"):
        return f"bound by {step.bound}"
    others = {"host": "waiting for the host", "balanced": "bound by several things alike"}
    return others.get(step.bound or "", "without a verdict")


def _numbers(step: StepSummary, remedies: Sequence[Remedy], unit: str) -> list[dict[str, str]]:
    """Returns the numbers at the top. unit: "launches" or "operators", which the host starts."""
    launches = f"{step.launches:,} {unit}; " if step.launches else ""
    spread = f", ± {duration(step.spread_us)}" if step.spread_us else ""
    shown = [{"big": duration(step.time_us), "small": f"{launches}one step{spread}"}]
    if step.overhead_share is not None:
        shown.append({"big": percent(step.overhead_share), "small": "of it is overhead"})
    if rest := [name for name in step.shares if name != "overhead"]:
        largest = max(rest, key=lambda name: step.shares[name])
        words = f"of it is {largest}; the step's verdict is {step.confidence}"
        shown.append({"big": percent(step.shares[largest]), "small": words})
    best = max(remedies, key=lambda remedy: remedy.saving_us, default=None)
    if best is not None and best.saving_us > 0:
        how = "predicted" if best.measured_us is None else "measured"
        shown.append({"big": duration(best.saving_us), "small": f"less with “{best.name}”, {how}"})
    return shown


def row_of(n: int, op: Op, remedies: Sequence[Remedy]) -> dict[str, Any]:
    """Returns the cells of an operator, and the words below them."""
    reached = "–"
    if op.achieved is not None:
        unit = "B/s" if op.roof in ("HBM", "DRAM", "L2", "cache") else "/s" if op.roof == "special" else "FLOP/s"
        share = f"{percent(op.roof_share)} " if op.roof_share is not None else ""
        ceiling = f" of {count(op.ceiling, unit)}" if op.ceiling is not None else ""
        reached = f"{share}{count(op.achieved, unit)}{ceiling}"
    verdict = f"{op.bound} ({op.unit})" if op.bound and op.unit else op.bound or "no verdict"
    words = [f"{op.confidence}: {op.confirmed_by}"]
    if op.bound != op.modelled_bound and op.modelled_bound:
        words.append(f"the model says {op.modelled_bound}")
    if op.special:
        words.append(f"{count(op.special)} special functions")
    if (alone := alone_words(op)) is not None:
        words.append(alone)
    words += [op.where] if op.where else []
    if op.kernels:
        words.append(f"kernels {', '.join(op.kernels)}")
    its = [remedies[i] for i in op.remedies if 0 <= i < len(remedies)]
    if its:
        words.append(f"remedies: {', '.join(dict.fromkeys(remedy.name for remedy in its))}")
    return {
        "number": n + 1,
        "module": op.module or "(step)",
        "op": PHASES.get(op.phase, "") + op.op.split("::")[-1],
        "kind": op.bound or "unknown",
        "cells": [
            f"{op.calls:,}", duration(op.time_us), percent(op.share), _or_dash(op.flops, count), _or_dash(op.bytes, size),
            _or_dash(op.intensity, number), op.roof or "–", reached,
        ],
        "verdict": verdict,
        "words": "; ".join(words),
    }  # fmt: skip


def _sweeps(ops: Sequence[Op], names: Sequence[str]) -> list[Chart]:
    charts = (sweep_chart(op, f"{n + 1} {name}") for n, (op, name) in enumerate(zip(ops, names, strict=True)))
    return [chart for chart in charts if chart is not None][:SWEEPS]


def _experiments(n: int, op: Op, name: str) -> list[str]:
    sweep, cache, fixed = (op.experiments.get(kind) or {} for kind in ("intensity", "cache", "size"))
    alone_us = (op.experiments.get("alone") or {}).get("time_us")
    why_not = op.experiments.get("why_not") or {}
    return [
        f"{n + 1} {name}", _or_dash(alone_us, duration), duration(op.time_us / op.calls),
        _or_dash(sweep.get("slope"), number_of), _or_dash(sweep.get("knee_flops_per_byte"), number_of),
        _or_dash(cache.get("time_us"), duration), _or_dash(cache.get("gain"), percent), _or_dash(fixed.get("fixed_us"), duration),
        "; ".join(f"{kind}: {reason}" for kind, reason in why_not.items()) or "–",
    ]  # fmt: skip


def remedy_of(remedy: Remedy) -> dict[str, Any]:
    rows = "the whole step"
    if remedy.ops:
        first = ", ".join(str(n + 1) for n in remedy.ops[:MOST_ROWS])
        rest = len(remedy.ops) - MOST_ROWS
        rows = f"row{'s' * (len(remedy.ops) > 1)} {first}{f' and {rest} more' if rest > 0 else ''}"
    return {
        "name": remedy.name, "predicted": duration(remedy.predicted_us), "measured": _or_dash(remedy.measured_us, duration),
        "how": remedy.how, "changes": CHANGES[remedy.changes], "rows": rows,
    }  # fmt: skip


def _facts(step: StepSummary) -> Iterator[tuple[str, str]]:
    named = (
        ("FLOPs of a step", step.flops, count), ("bytes of a step", step.bytes, size), ("peak memory", step.peak_bytes, size),
        ("busy", step.busy_us, duration), ("spread", step.spread_us, duration),
    )  # fmt: skip
    yield from ((name, write(value)) for name, value, write in named if value is not None)
    yield from ((f"idle: {NAMES.get(cause, cause)}", duration(us)) for cause, us in step.idle_us.items() if us)
    tried = {"graph_us": "as a CUDA graph", "half_batch_us": "half the batch", "double_batch_us": "twice the batch"}
    for name, words in tried.items():
        if step.experiments.get(name) is not None:
            yield words, duration(step.experiments[name])
    why_not = {"graph": "no CUDA graph", "batch": "no other batch"}
    yield from ((why_not.get(name, name), why) for name, why in (step.experiments.get("why_not") or {}).items())


def _machine_facts(machine: Mapping[str, Any], ceilings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields names and values with their units: what the machine is, then what it was measured to do."""
    busy = ceilings.get("busy_cores") or {}
    if busy:
        yield "busy elsewhere while that was measured, at most", f"{max(busy.values()):.1f} cores"
    for name, value in (*_flat(machine), *_flat({key: of for key, of in ceilings.items() if key != "busy_cores"})):
        if name in FACTS:
            words, unit = FACTS[name]
            yield words, f"{size(int(value.replace(',', '')))}" if unit == "B" else f"{value} {unit}".strip()
        elif name.startswith("matmul tflops "):
            yield f"products in {name.rpartition(' ')[2]}", f"{value} TFLOP/s"
        elif name not in UNTOLD:
            yield name, value


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yields names and values of nested dictionaries as words."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name} ")
        elif value not in (None, ""):
            yield f"{above}{name}".replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value)


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def _or_dash(value: Any, write: Any) -> str:
    return "–" if value is None else write(value)
