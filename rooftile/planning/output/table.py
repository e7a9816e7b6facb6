"""The text of a plan: the layers with all their formats, the other operators, and the totals.

A layer has two lines: what it is and what bounds it, and below that each format with its times and loss. Layers that differ in
their number alone, such as layers.0.down and layers.1.down, share them where they have the same choice.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from rooftile.diagnosis.output.units import count, digits, duration
from rooftile.planning.costs import verdict_of
from rooftile.planning.records import KEPT_NAMES, Option, Other, PlannedLayer, Whole

WIDTH = 130
HEAD = ("module", "operator", "M, N, K", "FLOPs", "bytes", "F/B", "ridge", "bound", "chosen", "fuse with")
OTHER_HEAD = ("module", "operator", "calls", "FLOPs", "bytes", "F/B", "ridge", "bound", "predicted", "fuse with")
# the number of operators that are shown, the longest time first
MOST_OTHERS = 20
# names of operators that can be fused with one
MOST_NAMES = 4


def text(plan: Whole) -> str:
    """Returns the whole text."""
    lines = [f"plan for {plan.model} on {plan.device}"]
    groups = groups_of(plan.layers)
    lines += aligned([HEAD, *map(layer_cells, groups)], list(map(options_words, groups)))
    if plan.others:
        shown = plan.others[:MOST_OTHERS]
        lines += ["", *aligned([OTHER_HEAD, *(other_cells(other) for other in shown)], None)]
        if len(plan.others) > MOST_OTHERS:
            rest = sum(other.predicted_us or 0.0 for other in plan.others[MOST_OTHERS:])
            lines.append(f"... and {len(plan.others) - MOST_OTHERS} more operators: {duration(rest)}")
    lines += ["", *(line for words in sentences(plan) for line in textwrap.wrap(words, WIDTH))]
    return "\n".join(line.rstrip() for line in lines)


def groups_of(layers: Sequence[PlannedLayer]) -> list[list[PlannedLayer]]:
    """Returns the layers that share a row: alike but for a number in their names, and for their losses."""
    found: dict[tuple[object, ...], list[PlannedLayer]] = {}
    for layer in layers:
        shapes = tuple((part.N, part.K) for part in layer.parts)
        options = tuple((option.format, option.us) for option in layer.options)
        key = (_pattern(layer.name), shapes, layer.loads, options, layer.chosen, tuple(layer.why_not))
        found.setdefault(key, []).append(layer)
    return list(found.values())


def layer_cells(alike: Sequence[PlannedLayer]) -> tuple[str, ...]:
    """Returns the cells of layers that share a row, by `HEAD`; counts are of one layer."""
    layer = alike[0]
    name = layer.name or "(the model)" if len(alike) == 1 else f"{_pattern(layer.name)} ({len(alike)} times)"
    rows = "/".join(f"{load.rows:,}" + f" x{load.calls:g}" * (load.calls > 1) for load in layer.loads)
    N = "+".join(f"{part.N:,}" for part in layer.parts)
    bounds = "/".join(_bound(*one) for one in zip(layer.bounds, layer.doubled, strict=True))
    return (
        name, layer.operator, f"{rows}, {N}, {layer.parts[0].K:,}", count(layer.flops), count(layer.nbytes, "B"),
        digits(layer.intensity), digits(layer.ridge), bounds, layer.chosen, layer.fuse_with,
    )  # fmt: skip


def other_cells(other: Other) -> tuple[str, ...]:
    """Returns the cells of another operator, with its time in place of a choice."""
    saved = f" (saves {count(other.saved_bytes, 'B')}, {duration(other.saved_us)})" if other.saved_bytes else ""
    return (
        other.module, other.operator, f"{other.calls:g}", count(other.flops), count(other.nbytes, "B"),
        "-" if other.intensity is None else digits(other.intensity), digits(other.ridge), other.bound or "not counted",
        duration(other.predicted_us), f"{_some(other.fuse_with)}{saved}",
    )  # fmt: skip


def option_words(option: Option, losses: Sequence[float]) -> str:
    """Returns the times of a format, and the losses of layers that share a row."""
    low, high = f"{min(losses):.2g}", f"{max(losses):.2g}"
    loss = low if low == high else f"{low} to {high}"
    measured = "" if option.measured_us is None else f", measured {duration(option.measured_us)}"
    return f"{option.format}: predicted {duration(option.predicted_us)}{measured}, loss {loss}"


def options_words(alike: Sequence[PlannedLayer]) -> str:
    """Returns the line of the formats of layers that share a row, with the reason of the choice."""
    losses = zip(*([option.loss for option in layer.options] for layer in alike), strict=True)
    words = "; ".join(option_words(option, lost) for option, lost in zip(alike[0].options, losses, strict=True))
    return f"{words}. {why(alike[0])}"


def why(layer: PlannedLayer) -> str:
    """Returns why a layer has its format."""
    chosen, first = layer.choice, layer.options[0]
    if len(layer.options) == 1:
        return next(iter(layer.why_not.values()), "it has no other format") + "."
    if first.format in KEPT_NAMES:
        return _why_it_changes(layer, chosen, first)
    return f"{chosen.format} is {'the fastest' if chosen.us == min(o.us for o in layer.options) else 'what the losses allow'}."


def _why_it_changes(layer: PlannedLayer, chosen: Option, kept: Option) -> str:
    fastest = min(layer.options, key=lambda option: option.us)
    if chosen is kept:
        loses = "no format is faster here" if fastest is kept else f"{fastest.format} is faster and loses {fastest.loss:.2g}"
        return f"It stays: {loses}."
    time, size = (a / b if b else 1.0 for a, b in ((chosen.us, kept.us), (chosen.nbytes, kept.nbytes)))
    bound = "/".join(dict.fromkeys(layer.bounds))
    return f"{chosen.format} takes {time:.2f} of the time: {bound} bounds the layer, and its weight has {size:.2f} of the bytes."


def sentences(plan: Whole) -> Iterator[str]:
    """Yields the sentences about the whole step."""
    total = plan.total
    yield f"chosen: {chosen(plan.layers)}"
    measured = ""
    if total.measured_us is not None:
        measured = f", measured {duration(total.measured_us)} (as it is {duration(total.kept_measured_us)})"
    yield f"step: predicted {duration(total.predicted_us)} (as it is {duration(total.kept_us)}){measured}"
    singles = ", ".join(f"all {name} {duration(us)}" for name, us in total.single_us.items())
    yield f"layers: {duration(total.layers_us)} (as they are {duration(total.kept_layers_us)}; {singles})"
    yield f"weights: {count(total.nbytes, 'B')} (as they are {count(total.kept_nbytes, 'B')})"
    allowed = "any" if total.max_loss is None else f"{total.max_loss:g}"
    yield f"loss ({total.loss_kind}): sum {total.loss:.3g}, of the whole {total.measured_loss:.3g}, allowed {allowed}"
    yield from (f"note: {note}" for note in plan.notes)


def chosen(layers: Sequence[PlannedLayer]) -> str:
    """Says how many layers have which format."""
    counts = Counter(layer.chosen for layer in layers)
    stay = sum(count for word, count in counts.items() if word in KEPT_NAMES)
    changed = ", ".join(f"{word} for {count}" for word, count in counts.items() if word not in KEPT_NAMES)
    if not changed:
        return f"all {len(layers)} layers stay as they are"
    rest = "; 1 stays as it is" if stay == 1 else f"; {stay} stay as they are"
    return f"{changed} of {len(layers)} layers{rest * (stay > 0)}"


def aligned(rows: Sequence[Sequence[str]], below: Sequence[str] | None) -> list[str]:
    """Returns rows as lines with aligned columns. below: words under each row after the first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for n, row in enumerate(rows):
        sized = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(cell.ljust(width) if k < 2 or k > 6 else cell.rjust(width) for k, (cell, width) in sized))
        if n == 0:
            lines.append("-" * min(sum(widths) + 2 * len(widths) - 2, WIDTH))
        elif below is not None:
            lines += textwrap.wrap(below[n - 1], WIDTH, initial_indent="    ", subsequent_indent="    ")
    return lines


def _some(names: str) -> str:
    """The first few of some names."""
    listed = names.split(", ")
    return names if len(listed) <= MOST_NAMES else f"{', '.join(listed[:MOST_NAMES])} and {len(listed) - MOST_NAMES} more"


def _pattern(name: str) -> str:
    """A name with its first number as a star."""
    words = name.split(".")
    first = next((n for n, word in enumerate(words) if word.isdecimal()), None)
    return name if first is None or len(words) == 1 else ".".join([*words[:first], "*", *words[first + 1 :]])


def _bound(bound: str, doubled: float | None) -> str:
    if doubled is None:
        return bound
    return f"{bound} ({'flat' if (verdict := verdict_of(doubled)) == 'memory' else verdict}, {doubled:.2f}x)"
