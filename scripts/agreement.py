"""The table of `rooftile bench diagnosis` on programs after public ones: verdict, truth, seconds, and prices."""

from __future__ import annotations

from collections.abc import Iterable

from rooftile_lab.bench import results
from rooftile_lab.bench.diagnosis.cases import CASES
from rooftile_lab.bench.diagnosis.truth import UNCLEAR, agrees

REMEDIES = {"narrower-dtype-bf16": "bf16", "compile": "compile"}
HEAD = (
    "machine", "program", "after", "verdict", "truth", "right", "shares by other experiments", "judged", "diagnosis / program",
    "price, saving",
)  # fmt: skip


def agreement(rows: Iterable[results.Row]) -> str:
    """Returns a line for each program, and a sentence that counts how many main causes are right."""
    rows = [row for row in results.latest(rows) if row.case in CASES]
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    return "\n".join([*_counts(rows), "", *lines, "", *results.sources(rows), *_loads(rows)])


def _right(row: results.Row) -> bool | None:
    return agrees(row.settings.get("verdict"), row.settings.get("truth", UNCLEAR))


def _counts(rows: list[results.Row]) -> list[str]:
    """Returns a sentence for each machine and size."""
    groups: dict[tuple[str, str], list[results.Row]] = {}
    for row in rows:
        groups.setdefault((row.device, row.phase.removeprefix("step-")), []).append(row)
    return [
        f"{device}, {size} size: of {len(group)} programs the main cause is right in {sum(_right(row) is True for row in group)} "
        f"and wrong in {sum(_right(row) is False for row in group)}; other experiments do not tell it in "
        f"{sum(_right(row) is None for row in group)}."
        for (device, size), group in groups.items()
    ]


def _cells(row: results.Row) -> list[str]:
    right = {True: "yes", False: "**no**", None: "–"}[_right(row)]
    shares = {name.split("_")[1]: share for name, share in row.measures.items() if name.startswith("truth_")}
    ranked = sorted(((share, cause) for cause, share in shares.items()), reverse=True)
    found = row.measures.get("diagnosing_s")
    return [
        "GPU" if row.arch != "cpu" else "CPU", row.case, row.problem, _verdict(row),
        row.settings.get("truth", "–"), right, ", ".join(f"{cause} {share:.0f} %" for share, cause in ranked if share >= 5),
        f"{row.measures['judged_percent']:.0f} %" if found else "–",
        f"{found:.0f} s / {row.measures['program_s']:.0f} s" if found else "–", _prices(row),
    ]  # fmt: skip


def _verdict(row: results.Row) -> str:
    """Returns the verdict with its share of the step, or why there is none."""
    verdict = row.settings.get("verdict")
    if verdict is None:
        return row.reason
    # a balanced step has no cause whose share could be told
    share = None if verdict == "balanced" else row.measures.get(f"verdict_{verdict}_percent")
    return "none" if verdict == "None" else verdict if share is None else f"{verdict} {share:.0f} %"


def _prices(row: results.Row) -> str:
    """Returns each tried remedy's predicted and measured part of the step."""
    found = []
    for word, name in REMEDIES.items():
        both = [row.measures.get(f"{word}_{kind}_us") for kind in ("predicted", "measured")]
        if None not in both and row.median_us:
            found.append(f"{name} {', '.join(f'{100 * (us or 0.0) / row.median_us:.0f} %' for us in both)}")
    return "; ".join(found)


def _loads(rows: list[results.Row]) -> list[str]:
    loads = [row.settings["load"] for row in rows if "load" in row.settings]
    if not loads:
        return []
    return [f"Processes that wanted to run when a case began: {min(loads):.1f} to {max(loads):.1f}."]
