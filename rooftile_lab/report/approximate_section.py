"""The page's section on approximate attention: when each method pays, what it loses, and what it sees."""

from __future__ import annotations

from typing import Any

from rooftile.drawing import charts
from rooftile.drawing.charts import Series, enough
from rooftile.drawing.page import Chart, Table, safe
from rooftile.drawing.units import duration, percent, power, times
from rooftile_lab.bench.methods.crossover import Found, rounded
from rooftile_lab.bench.methods.losses import EXACT
from rooftile_lab.report.approximate import Approximate
from rooftile_lab.report.claims import ALIKE
from rooftile_lab.report.mask_tiles import draw_tiles
from rooftile_lab.report.sight import Sight


def section(found: Approximate, spread: float = 0.0) -> dict[str, Any]:
    """Returns what the template shows. spread: the spread of the run's times; a method that is faster by less is not called faster."""
    charts = [_chart(found, name, spread) for name in found.paying if enough(_series(found, name))]
    short = [name for name in found.paying if not enough(_series(found, name))]
    some = next(iter(found.sizes.values()))
    return {
        "claim": claim(found, spread),
        "setup": (
            "These methods compute less than all pairs, and give another result than attention. Each is timed beside rooftile.attention "
            f"on the same tensors, {some.H} heads of {some.D} numbers in {found.dtype}, forward. Native Sparse Attention has "
            f"{found.sizes['nsa'].H} heads that share one key head, and Loki is a step of decoding. The dotted line marks the length from "
            "which a method is faster at all longer ones that were measured, interpolated between powers of two."
        ),
        "charts": charts,
        "short": [f"{title(name, found.paying[name], spread)}." for name in short],
        "losses": [_needle_bars(found), _error_bars(found)],
        "table": _table(found),
        "lost": (
            f"Nothing is trained here: a model that was trained with a method learns to lose less. Texts have {found.lost_at:,} tokens. "
            "A needle is a key that the last query must find, at ten depths of the text; it is found if no other token's value is nearer "
            "to the output. Errors are those on Gaussian tensors, where attention is nearly a mean over all keys: a method that reads few "
            "keys gives a larger output, and its error can exceed 1."
        ),
        "sights": [_picture(sight) for sight in found.sights],
        "law": (
            "A kernel computes a tile whole or skips it. Filled tiles are all seen, hatched ones in part, so that a method whose pairs are "
            "scattered saves nothing until it has arranged its tokens: by column, by hash or by cluster."
        ),
    }  # fmt: skip


def claim(found: Approximate, spread: float = 0.0) -> str:
    """Returns the section's title from its numbers."""
    faster = {name: each for name, each in found.paying.items() if is_faster(each, spread)}
    if not faster:
        return f"Up to {longest(found):,} tokens, no approximate method is faster than exact attention here"
    first = min(faster, key=lambda name: faster[name].at or 0.0)
    return (
        f"{len(faster)} of {len(found.paying)} approximate methods become faster than exact attention here, "
        f"the first ({first}) from {start(faster[first])} tokens"
    )


def is_faster(found: Found, spread: float) -> bool:
    """Whether a method is faster at the longest length, by more than two times of the run differ anyway."""
    if found.at is None:
        return False
    last = found.points[-1]
    return last.exact_us / last.method_us > 1 + max(ALIKE, 2 * spread)


def longest(found: Approximate) -> int:
    """The shortest of the lengths at which the searches ended: up to it all methods were measured."""
    return min(each.longest for each in found.paying.values())


def start(found: Found) -> str:
    """The crossover in words, without the remark about the shortest length."""
    return found.words().removesuffix(" or below")


def title(name: str, found: Found, spread: float = 0.0) -> str:
    """Returns the title of a method's chart."""
    if not found.points:
        return f"{name}: {found.words()}"
    last = found.points[-1]
    if found.at is None:
        return f"{name}: not faster up to {last.N:,} tokens, where it takes {times(last.method_us / last.exact_us)} the time"
    if not is_faster(found, spread):
        return f"{name}: as fast at {last.N:,} tokens"
    return f"{name}: faster from {start(found)} tokens, {times(last.exact_us / last.method_us)} at {last.N:,}"


def _series(found: Approximate, name: str) -> list[Series]:
    points = found.paying[name].points
    return [
        Series(name="exact", kind="other", points=tuple((float(point.N), point.exact_us) for point in points)),
        Series(name=name, kind="ours", points=tuple((float(point.N), point.method_us) for point in points)),
    ]


def _chart(found: Approximate, name: str, spread: float) -> Chart:
    search, series = found.paying[name], _series(found, name)
    words = title(name, search, spread)
    rows = [
        [f"{point.N:,}", duration(point.exact_us), duration(point.method_us), times(point.exact_us / point.method_us)]
        for point in search.points
    ]
    table = Table(["tokens", "exact", name, "speed, of exact"], rows)
    # a method that is faster from the first length on has no place at which two lines cross
    mark = rounded(search.at) if search.at is not None and search.at > search.points[0].N else None
    picture = charts.log_chart(series, title=words, y_name="time", write=duration, mark=mark)
    loss = found.loss_of(name)
    lost = f"Untrained, it finds {percent(loss.recall or 0.0)} of the needles; error {_error(loss.gaussian)}."
    return Chart(words, safe(picture), lost, table)


def _needle_bars(found: Approximate) -> Chart:
    rows = [
        (loss.method, "other" if loss.method == EXACT else "ours", loss.recall or 0.0, percent(loss.recall or 0.0))
        for loss in found.losses
    ]
    words = "Needles found, without training"
    return Chart(words, safe(charts.bars(rows, title=words)), "Of ten depths and all heads: longer is better.")


def _error_bars(found: Approximate) -> Chart:
    rows = [
        (loss.method, "other" if loss.method == EXACT else "ours", loss.gaussian or 0.0, _error(loss.gaussian))
        for loss in found.losses
    ]
    words = "Error on Gaussian tensors, without training"
    note = "|o − exact| / |exact|: shorter is better. Exact attention's own is its rounding."
    return Chart(words, safe(charts.bars(rows, title=words)), note)


def _table(found: Approximate) -> Table:
    rows = []
    for name, search in found.paying.items():
        loss = found.loss_of(name)
        depths = " ".join(f"{100 * share:.0f}" for share in loss.found)
        rows.append([name, search.words(), f"{search.longest:,}", _error(loss.gaussian), percent(loss.recall or 0.0), depths])
    return Table(["method", "faster from", "measured up to", "error", "needle found", "at each tenth of the text, %"], rows)


def _error(value: float | None) -> str:
    return "–" if value is None else power(value) if value < 0.01 else f"{value:.2f}"


def _picture(sight: Sight) -> dict[str, Any]:
    return {
        "name": sight.name,
        "picture": safe(draw_tiles(sight.visits, sight.N, title=sight.name)),
        "note": sight.note,
        "counts": f"{percent(sight.computed)} of the tiles, {percent(sight.filled)} of their pairs seen",
    }
