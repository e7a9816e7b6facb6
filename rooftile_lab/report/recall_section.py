"""The section of the page about what a model loses when it is trained with an approximate method."""

from __future__ import annotations

from typing import Any

from rooftile.drawing.charts import FEWEST
from rooftile.drawing.page import Chart, Table, safe
from rooftile.drawing.units import duration, percent
from rooftile_lab.bench.learning.methods import EXACT
from rooftile_lab.report.recall import Curve, Curves, Recall
from rooftile_lab.report.recall_pictures import picture, states

# recall that two runs of one method differ by
SURE = 0.05
NAMES = {
    EXACT: "exact attention", "linear": "Linear attention", "performer": "Performer", "linformer": "Linformer",
    "strided": "Sparse Transformer, strided", "fixed": "Sparse Transformer, fixed", "reformer": "Reformer",
    "routing": "Routing Transformer", "native_sparse": "Native Sparse Attention", "mamba2": "Mamba-2",
    "delta": "Gated delta net", "hybrid": "Hybrid with attention",
}  # fmt: skip


def section(found: Recall) -> dict[str, Any]:
    """Returns the section's words and charts."""
    committed = [("All methods", found.committed)] if found.committed else []
    here = (f"{'The same, small' if committed else 'Small'}, on this machine: {_listed(found.here)}", found.here)
    return {
        "claim": claim(found.committed or found.here),
        "setup": (
            "A method that compares fewer pairs, or keeps a state of fixed size, cannot look everything up. Small decoders, one per "
            "method, with equally many parameters and steps, learn to answer questions about pairs of keys and values that "
            "the text gave before. Recurrences (Mamba-2, the gated delta net) keep a state in all layers; the hybrid attends in every second layer. Each "
            "small chart has one method (circles) beside exact attention (diamonds) and chance (the dashed line)."
        ),
        "parts": [_part(title, curves) for title, curves in [*committed, here]],
        "note": (
            "A pair is one token, so the task needs one look back and no more. Reformer and Routing run in their strict form; Linformer "
            "has no causal form, sees the whole text, and predicts no bytes. These are short trainings: what a method does not recall, it "
            "may only not have learnt yet. There is one per learning rate, so small differences mean nothing. rooftile bench recall repeats the study."
        ),
    }  # fmt: skip


def claim(curves: Curves) -> str:
    """Returns the section's title, from its numbers: the method that loses most, at the most pairs."""
    exact, others = curves.exact, [one for one in curves.curves if one.method != EXACT]
    if exact is None or not others:
        return "What a model loses by its attention"
    most = max(exact.by_pairs)
    worst = min(others, key=lambda one: one.by_pairs[most])
    if exact.by_pairs[most] - curves.chance < SURE:
        return f"In so few steps not even exact attention learns to recall {most} pairs"
    if exact.by_pairs[most] - worst.by_pairs[most] < SURE:
        return f"Of {most} pairs every method recalls about as many as exact attention: {percent(exact.by_pairs[most])}"
    return (
        f"Of {most} pairs, exact attention recalls {percent(exact.by_pairs[most])}, and {_name(worst)} "
        f"{percent(worst.by_pairs[most])}"
    )


def _listed(curves: Curves) -> str:
    names = [_name(one) for one in curves.curves]
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)


def _part(title: str, curves: Curves) -> dict[str, Any]:
    others = [one for one in curves.curves if one.method != EXACT]
    recall = (
        "Recall by the number of pairs, loss on English, and time"
        if curves.frequencies_loss
        else "Recall by the number of pairs, and time"
    )
    tables = [(recall, _table(curves)), ("Recall by the distance of a question from its pair", _distances(curves))]
    if any(len(one.by_rate) > 1 for one in curves.curves):
        tables.append(("Recall over all tests by the learning rate, of which the best counts", _rates(curves)))
    if curves.needles:
        tables.append(("A needle at ten depths, decoded with an eighth of the keys", _needles(curves)))
    return {
        "title": title,
        "note": f"{curves.machine[:1].upper()}{curves.machine[1:]}: {curves.problem}.",
        "failed": list(curves.failed),
        "states": states(curves),
        "charts": [_chart(one, curves) for one in others if len(one.by_pairs) >= FEWEST],
        "tables": tables,
    }


def _chart(curve: Curve, curves: Curves) -> Chart:
    title = _name(curve)
    return Chart(title, safe(picture(curve, curves.exact, curves.chance, title, NAMES)))


def _table(curves: Curves) -> Table:
    """Recall by the number of pairs, with what else is known of a method."""
    pairs = sorted({n for one in curves.curves for n in one.by_pairs})
    has_loss = any(one.loss is not None for one in curves.curves)
    rows = []
    for one in curves.curves:
        loss = ["–" if one.loss is None else f"{one.loss:.3f}"] * has_loss
        time = "–" if one.step_us is None else duration(one.step_us)
        rows.append([_name(one), *_shares(one.by_pairs, pairs), *loss, f"{one.parameters or 0:,}", time])
    by_frequencies = ["–" if curves.frequencies_loss is None else f"{curves.frequencies_loss:.3f}"] * has_loss
    rows.append(["chance", *[percent(curves.chance)] * len(pairs), *by_frequencies, "–", "–"])
    return Table(["", *(f"{n} pairs" for n in pairs), *["nats per byte"] * has_loss, "parameters", "a step"], rows)


def _distances(curves: Curves) -> Table:
    ends = sorted({n for one in curves.curves for n in one.by_distance})
    rows = [[_name(one), *_shares(one.by_distance, ends)] for one in curves.curves]
    rows.append(["chance", *[percent(curves.chance)] * len(ends)])
    return Table(["", *(f"to {n} tokens" for n in ends)], rows)


def _rates(curves: Curves) -> Table:
    rates = sorted({rate for one in curves.curves for rate in one.by_rate})
    rows = [
        [_name(one), *(percent(one.by_rate[rate]) if rate in one.by_rate else "–" for rate in rates)] for one in curves.curves
    ]
    return Table(["", *(f"{rate:g}" for rate in rates)], rows)


def _needles(curves: Curves) -> Table:
    depths = sorted({depth for shares in curves.needles.values() for depth in shares})
    rows = [[way, *_shares(shares, depths)] for way, shares in curves.needles.items()]
    return Table(["depth", *(f"{depth}\xa0%" for depth in depths)], rows)


def _shares(found: dict[int, float], ends: list[int]) -> list[str]:
    return [percent(found[end]) if end in found else "–" for end in ends]


def _name(curve: Curve) -> str:
    return NAMES.get(curve.method, curve.method)
