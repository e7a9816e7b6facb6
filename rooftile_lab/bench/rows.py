"""Rows made from samples: medians, quartiles, and the share of the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median, quantiles
from typing import Any

from rooftile.cost import Roof
from rooftile.cost.session import Session
from rooftile.hardware.clock import Sampler, Work, take_turns
from rooftile_lab.bench.results import Row


def spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; of fewer than four samples the least, the median and the most."""
    if len(samples) < 4:
        return figures(min(samples)), figures(median(samples)), figures(max(samples))
    low, middle, high = quantiles(samples, n=4, method="inclusive")
    return figures(low), figures(middle), figures(high)


def timed_row(session: Session, samples: Sequence[float], *, dtype: str = "bf16", roof: Roof | None = None, **named: Any) -> Row:
    """A row of one contestant from its samples in µs.

    Args:
        session: the run.
        samples: of the time; may be empty, where `named` has a reason.
        dtype: whose matrix-product ceiling the row names.
        roof: the floor that TFLOP/s, GB/s and the share of the roofline follow from; None where there is none.
        named: the other fields of `Row`.
    """
    if samples and roof is not None:
        roof = session.checked(roof, dtype, median(samples))
    found: dict[str, Any] = session.about(dtype) | named
    if roof is not None:
        found["binds"] = roof.binds
    if samples:
        found["low_us"], found["median_us"], found["high_us"] = spread(samples)
        found["samples"] = len(samples)
    if samples and roof is not None:
        middle = median(samples)
        if roof.flops:
            found["tflops"] = figures(roof.flops / middle / 1e6)
        found["gbs"] = figures(roof.bytes_moved / middle / 1e3)
        found["roofline_percent"] = figures(roof.percent(middle))
    return Row(**found)


def contest(
    session: Session, works: Mapping[str, Work], clock: Sampler, *, roofs: Mapping[str, Roof] | Roof | None = None,
    rounds: int = 4, **named: Any,
) -> dict[str, Row]:  # fmt: skip
    """A row for each work by its name, which is the row's backend; the works take turns.

    `roofs` is one floor for all, or each work's own. `named` are fields of `Row`, the same for all.
    """
    taken = take_turns(works, clock, rounds)
    floors = {name: roofs.get(name) if isinstance(roofs, Mapping) else roofs for name in taken}
    return {name: timed_row(session, each, roof=floors[name], backend=name, **named) for name, each in taken.items()}


def refused(session: Session, why: Mapping[str, str], *, before: str = "", **named: Any) -> list[Row]:
    """A row for each contestant that is not timed, with its reason behind the words `before`."""
    return [timed_row(session, [], backend=who, reason=before + reason, **named) for who, reason in why.items() if reason]


def beside_peers(rows: Mapping[str, Row]) -> dict[str, Row]:
    """The rows of a contest; the row of "rooftile" with the time of its fastest peer over its own."""
    us = times_of(rows)
    others = [time for who, time in us.items() if who != "rooftile"]
    if not others or "rooftile" not in us:
        return dict(rows)
    return dict(rows) | {"rooftile": with_measures(rows["rooftile"], of_fastest_peer_ratio=min(others) / us["rooftile"])}


def with_measures(row: Row, **more: float) -> Row:
    """The row with further measures."""
    return replace(row, measures=row.measures | {name: figures(value) for name, value in more.items()})


def times_of(rows: Mapping[str, Row]) -> dict[str, float]:
    """The median times of a contest in µs."""
    return {name: row.median_us for name, row in rows.items() if row.median_us is not None}


def measured(taken: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """`measures`, `low` and `high` of a row, from the values of each run."""
    found = {name: spread(values) for name, values in taken.items() if values}
    fields = {"low": 0, "measures": 1, "high": 2}
    return {field: {name: each[place] for name, each in found.items()} for field, place in fields.items()}


def figures(value: float) -> float:
    """Six significant figures: more are noise in a line that people read."""
    return float(f"{value:.6g}")
