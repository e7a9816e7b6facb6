"""Rewrites lines of benchmarks/results/ that older scripts wrote, each with fields of its own, as rows.

    PYTHONPATH=. python scripts/convert_results.py benchmarks/results/*.jsonl

Lines that are rows already stay as they are. Numbers are those that were measured; only TFLOP/s are counted anew by
`rooftile.cost`, for some scripts counted half of a square under a causal mask. What an old line does not say, such as
quartiles or the driver, is absent.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rooftile.cost import flops
from rooftile.exact.cases import CASES, Case
from rooftile.exact.masks import CAUSAL, FULL
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import figures
from rooftile_lab.bench.serving import case_name

Line = dict[str, Any]
ABOUT = ("device", "arch", "driver", "torch", "triton", "commit", "date", "copy_gbs", "matmul_tflops")
LENGTHS = {512: "512", 1024: "1k", 2048: "2k", 4096: "4k", 8192: "8k", 16384: "16k"}
US_PER_TFLOP = 1e6


def about(line: Line) -> Line:
    """The machine and the run."""
    return {name: line[name] for name in ABOUT if name in line}


def numbers(line: Line, names: dict[str, str]) -> dict[str, float]:
    """Fields of a line under their names in `measures`; those that the line lacks are left out."""
    return {new: line[old] for old, new in names.items() if line.get(old) is not None}


def counted(case: Case, phase: str, old_flops: float, tflops: float) -> Line:
    """The time behind an old rate, and the rate with the FLOPs of `rooftile.cost`."""
    us = old_flops / tflops / US_PER_TFLOP
    return {"median_us": figures(us), "tflops": figures(flops.count(case.problem("sm90"), phase) / us / US_PER_TFLOP)}


def square(case: Case, phase: str) -> float:
    """FLOPs as the old scripts counted them: half of the square under a causal mask."""
    pairs = sum(T * S for T, S in case.problem().sizes.sequences) / (2 if case.mask == CAUSAL else 1)
    return (4 if phase == "fwd" else 10) * case.H * pairs * case.dim


def attention(line: Line) -> Iterator[Row]:
    suite = "cpu" if re.fullmatch(r"cpu-\w+-d\d+-\w+-\d+-h\d+", line["case"]) else "attention"
    yield Row(suite=suite, **{name: value for name, value in line.items() if value is not None})


def deterministic(line: Line) -> Iterator[Row]:
    case = CASES[f"d{line['dim']}-{line['mask']}-{LENGTHS[line['S']]}"]
    named = {"suite": "deterministic", "case": case.name, "phase": "bwd", **about(line)}
    old = square(case, "bwd")
    yield Row(backend="rooftile", **counted(case, "bwd", old, line["tflops"]), **named)
    yield Row(
        backend="rooftile, deterministic", measures={"extra_time_percent": figures(100 * line["price"])},
        **counted(case, "bwd", old, line["deterministic_tflops"]), **named,
    )  # fmt: skip


def precision(line: Line) -> Iterator[Row]:
    case = CASES[f"d{line['dim']}-{line['mask']}-{LENGTHS[line['S']]}"]
    what, _, part = line["what"].partition(", ")
    phase = {"": "fwd", "attention": "attention alone", "quantising": "quantise"}[part]
    named = {"suite": "precision", "case": case.name, "backend": "hopper" if what == "bf16" else what, "phase": phase}
    found: Line = {"median_us": line["us"]}
    if phase == "quantise":
        found |= {"gbs": line["gbs"], "roofline_percent": figures(100 * line["of_copy"]), "binds": "memory"}
    else:
        found["tflops"] = figures(flops.count(case.problem("sm90"), "fwd") / line["us"] / US_PER_TFLOP)
    names = {"of_best_in_16_bits": "of_best_16_bit_ratio", "of_best_peer": "of_best_peer_ratio"}
    yield Row(**named, **found, measures=numbers(line, names), **about(line))


def packed(line: Line) -> Iterator[Row]:
    what, phase, dim = line["what"], line["phase"], line["dim"]
    mask = CAUSAL if line["mask"] == "causal" else FULL
    heads = 2048 // dim
    group = int(what.split()[1]) if what.startswith("group") else 1
    lengths = tuple((n, n) for n in line["lengths"])
    case = Case(
        name=f"d{dim}-{line['mask']}-{what.replace(' ', '-')}", tags=frozenset(), H=heads, Hk=heads // group, dim=dim,
        dtype="bf16", mask=mask, lengths=lengths,
    )  # fmt: skip
    yield Row(
        suite="packed", case=case.name, backend="rooftile", phase=phase,
        **counted(case, phase, square(case, phase), line["tflops"]),
        measures={"of_dense_ratio": line["of_dense"]}, settings={"lengths": line["lengths"]}, **about(line),
    )  # fmt: skip


def paged(line: Line) -> Iterator[Row]:
    what = line["what"].replace("rooftile, portable", "triton")
    measures = numbers(line, {"alone_us": "alone_us", "of_unpaged": "of_dense_ratio", "of_packed": "of_packed_ratio"})
    found: Line = {"median_us": line["us"], "measures": measures}
    if "tbs" in line:
        found |= {
            "gbs": figures(1e3 * line["tbs"]),
            "roofline_percent": figures(100 * line["of_copy"]),
            "binds": "memory",
        }
    if "timed" in line:
        found["settings"] = {"timed": line["timed"]}
    if "heads" not in line:
        found |= {"case": what.replace(", ", "-").replace(" ", "-"), "backend": "rooftile", "phase": "cache"}
    elif "queries" not in line:
        found |= {
            "case": f"shared-prefix-{line['B']}x{line['S'] - 256}",
            "backend": f"rooftile, {what}",
            "phase": "decode",
        }
    else:
        phase = "decode" if line["queries"] == 1 else "prefill"
        heads = line["heads"].replace("/", "-")
        found |= {"case": f"{phase}-{line['B']}x{line['S']}-h{heads}", "backend": what, "phase": phase}
    if "tflops" in line:
        size = {"B": line["B"], "T": line["S"], "S": line["S"], "H": 32, "Hk": 8, "dim": 128}
        problem = Case(name="", tags=frozenset(), mask=CAUSAL, dtype="bf16", **size).problem("sm90")
        found["tflops"] = figures(flops.count(problem) / line["us"] / US_PER_TFLOP)
    yield Row(suite="paged", **found, **about(line))


def overhead(line: Line) -> Iterator[Row]:
    names = {
        "public": ("rooftile", "fwd"), "public, triton": ("triton", "fwd"), "torch flash": ("torch-flash", "fwd"),
        "public, with gradients": ("rooftile", "fwd with gradients"), "backward": ("rooftile", "bwd"),
    }  # fmt: skip
    for what, us in line["host_us"].items():
        # the launcher and the bare launch of the Triton backend
        backend, phase = names.get(what, (f"triton, {what}", "fwd"))
        yield Row(
            suite="overhead",
            case="host",
            backend=backend,
            phase=phase,
            median_us=us,
            settings={"timed": "host"},
            **about(line),
        )


def ladder(line: Line) -> Iterator[Row]:
    case = CASES[f"d128-{line['mask']}-4k"]
    us = line["median_us"]
    tflops = figures(flops.count(case.problem("sm90")) / us / US_PER_TFLOP)
    yield Row(suite="ladder", case=case.name, backend=line["rung"], phase="fwd", median_us=us, tflops=tflops, **about(line))


def counters(line: Line) -> Iterator[Row]:
    names = {name: name for name in line if name.endswith(("_percent", "_mb"))} | {
        "kernels": "kernels",
        "us": "kernels_us",
    }
    stalls = {f"stall_{reason}": value for reason, value in line["stalls"].items()}
    yield Row(
        suite="ladder-counters", case=f"d128-{line['mask']}-4k", backend=line["rung"], phase="fwd",
        measures=numbers(line, names) | stalls, **about(line),
    )  # fmt: skip


def serving(line: Line) -> Iterator[Row]:
    apart = ("seconds", "peak_bytes")
    spreads = {
        new: {name: figures(value) for name, value in line[old].items() if name not in apart and value is not None}
        for old, new in (("median", "measures"), ("low", "low"), ("high", "high"))
    }
    more = numbers(line, {"start_s": "start_s", "first_s": "first_run_s"})
    more |= {f"{name}_over_reserved": ratio for name, ratio in (line["over_contiguous"] or {}).items()}
    spreads["measures"] |= {name: figures(value) for name, value in more.items()}
    times = {f"{word}_us": figures(1e6 * line[word]["seconds"]) for word in ("median", "low", "high")}
    yield Row(
        suite="serving", case=case_name(line["workload"], line["model"], line["scale"], line["settings"]),
        backend=f"rooftile, {line['allocator']}", phase="serve", problem=line["purpose"], samples=line["runs"],
        roofline_percent=spreads["measures"].get("floor_percent"), peak_bytes=int(line["high"]["peak_bytes"]), **times, **spreads,
        settings={"model": line["model"], "scale": line["scale"]} | line["settings"], **about(line),
    )  # fmt: skip


def engine(line: Line) -> Iterator[Row]:
    """Lines of the serving driver: starts, rates, decode steps, idle shares, and the peers."""
    row, model = line["row"], line["model"]
    measures = {
        name: value
        for name, value in line.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in (*ABOUT, "scale", "seconds", "ms")
    }
    settings = {name: line[name] for name in ("as_asked", "settings", "transformers", "sampling", "measured") if line.get(name)}
    found: Line = {"settings": {"model": model, "scale": line["scale"]} | settings, "measures": measures}
    if "ms" in line:
        found |= {"median_us": figures(1e3 * line["ms"]), "phase": "decode"}
        found |= {
            "low_us": figures(1e3 * min(line["each"])),
            "high_us": figures(1e3 * max(line["each"])),
            "samples": len(line["each"]),
        }
    elif row.startswith("idle"):
        found |= {"median_us": figures(1e3 * line["profiled_ms"]), "phase": "decode"}
    else:
        seconds = line["seconds"] if "seconds" in line else line["output_tokens"] / line["output_tok_s"]
        found |= {"median_us": figures(1e6 * seconds), "phase": "start" if row.startswith("start") else "serve"}
        if "each" in line:
            found |= {"low": {"output_tok_s": min(line["each"])}, "high": {"output_tok_s": max(line["each"])}}
            found["samples"] = len(line["each"])
    if "times" in measures:
        word = "output_tok_s_over_reserved" if row.startswith("W8") else "rooftile_over_this"
        measures[word] = measures.pop("times")
    for old, new in (("first_s", "first_run_s"), ("events_step", "events_per_step")):
        if old in measures:
            measures[new] = measures.pop(old)
    if "floor_percent" in measures:
        found["roofline_percent"] = measures.pop("floor_percent")
    if "floor_ms" in measures:
        measures["floor_us"] = figures(1e3 * measures.pop("floor_ms"))
    if line.get("reason"):
        found["reason"] = line["reason"]
    name = {"batch 1": "W10", "start, again": "start-again"}.get(row, row)
    name = "W11" if name.startswith("n = 4") else name.replace(", ", "-").replace(" x ", "x").replace(" ", "-")
    yield Row(suite="engine", case=f"{name}-{model}", backend=line["engine"], **found, **about(line))


KINDS: dict[str, Callable[[Line], Iterator[Row]]] = {
    "h200-deterministic": deterministic, "h200-eight-bits": precision, "h200-precision": precision,
    "h200-packed-groups": packed, "h200-packed": packed, "h200-paged": paged, "h200-overhead": overhead,
    "h200-ladder": ladder, "h200-ladder-counters": counters, "h200-serving": serving, "h200-serving-peers": engine,
    "h200-engine": engine,
}  # fmt: skip


def converted(path: Path) -> list[str]:
    """The lines of a file as rows."""
    kind = KINDS.get(path.stem, attention)
    lines = []
    for text in path.read_text().splitlines():
        line = json.loads(text)
        lines += [text] if "suite" in line else [row.json() for row in kind(line)]
    return lines


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text("".join(line + "\n" for line in converted(Path(name))))
