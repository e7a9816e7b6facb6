"""`rooftile bench approximate --crossover`: a crossover follows from times, and a search keeps its limit and its time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rooftile.cli import main
from rooftile_lab.bench import results
from rooftile_lab.bench.methods import crossover
from rooftile_lab.bench.methods.crossover import Found, Point, crossing, search
from rooftile_lab.bench.methods.table import WAYS
from scripts.crossovers import crossovers
from tests.bench.session import SESSION


def test_a_crossover_lies_between_two_lengths_where_their_lines_cross() -> None:
    # 100 N against N^2 / 10: equal at 1,000
    points = [Point(N, 100.0 * N, N**2 / 10) for N in (256, 512, 1024, 2048)]
    assert crossing(points) == pytest.approx(1000)
    assert crossing(points[:2]) is None
    assert crossing(points[2:]) == 1024
    assert crossing([]) is None
    # faster at 512 by chance, but slower at 1,024: the last crossing counts
    odd = [points[0], Point(512, 1.0, 2.0), Point(1024, 2.0, 1.0), Point(2048, 1.0, 2.0)]
    assert crossing(odd) == pytest.approx(1024 * 2**0.5)
    # equal is not faster
    assert crossing([Point(256, 1.0, 1.0)]) is None


class Simulated:
    """A machine with a clock of its own: a call takes c N^p µs, and a measurement a thousand calls."""

    def __init__(self, method, exact) -> None:
        self.seconds, self.asked = 0.0, []
        self.method, self.exact = method, exact

    def times(self, N: int) -> tuple[float, float]:
        self.asked.append(N)
        both = self.method(N), self.exact(N)
        self.seconds += sum(both) * 1e-3
        return both


def test_a_search_ends_at_its_limit_or_before_its_time_is_over() -> None:
    machine = Simulated(lambda N: 100.0 * N, lambda N: N**2 / 10)
    found = search(machine.times, 8192, 1e9, now=lambda: machine.seconds)
    assert machine.asked == [256, 512, 1024, 2048, 4096, 8192]
    assert found.at == pytest.approx(1000)
    assert found.why_ended == "the limit"
    assert found.words() == "1,000"
    machine = Simulated(lambda N: 100.0 * N, lambda N: N**2 / 10)
    found = search(machine.times, 8192, 700.0, now=lambda: machine.seconds)
    # 256 takes 32 s, 512 77 s, 1,024 207 s; 2,048 is expected to take as many times more
    assert machine.asked == [256, 512, 1024]
    assert machine.seconds <= 700
    assert found.why_ended == "the time budget"
    assert found.at == pytest.approx(1000)


def test_a_search_without_a_crossover_says_how_far_it_looked() -> None:
    slow = Simulated(lambda N: 1e3 * N**2, lambda N: N**2 / 10)
    found = search(slow.times, 1024, 1e9, now=lambda: slow.seconds)
    assert (found.at, found.words()) == (None, "not below 1,024 (the limit)")
    # the shortest length is measured whatever the budget
    assert search(slow.times, 1024, 0.0, now=lambda: slow.seconds).words() == "not below 256 (the time budget)"
    assert search(lambda N: (1.0, 2.0), 1024, 1e9).words() == "256 or below"

    def full(N: int) -> tuple[float, float]:
        if N > 256:
            raise torch.OutOfMemoryError("out of memory")
        return 2.0, 1.0

    assert search(full, 1024, 1e9).words() == "not below 256 (out of memory at 512)"
    assert Found((), None, "out of memory at 256").words() == "not measured (out of memory at 256)"


def test_searches_share_the_time_and_become_rows(ticking, monkeypatch) -> None:
    shares = []

    def recorded(times, limit, seconds, **more):
        shares.append(seconds)
        return search(times, limit, seconds, shortest=64, **more)

    monkeypatch.setattr(crossover, "search", recorded)
    made = list(crossover.measure(SESSION, ["linear", "loki"], 128, 90.0, rounds=1))
    assert [(name, phase) for name, phase, *_ in made] == [("linear", "fwd"), ("linear", "bwd"), ("loki", "decode")]
    assert shares[0] == pytest.approx(30, abs=0.1)
    # what one search leaves goes to the others
    assert 30 < shares[1] < shares[2] <= 90
    rows = made[0][3]
    assert [(row.case, row.backend) for row in rows] == [
        ("linear-crossover-64", "rooftile"), ("linear-crossover-64", "exact"), ("linear-crossover-128", "rooftile"),
        ("linear-crossover-128", "exact"), ("linear-crossover", "rooftile"),
    ]  # fmt: skip
    assert rows[-1].reason == "not below 128 (the limit)"
    assert rows[-1].measures == {"shortest_tokens": 64, "longest_tokens": 128}
    assert rows[-1].settings["heads"] == "4/4"
    faster = replace(made[0][2], at=90.0)
    assert crossover.summary(SESSION, WAYS["linear"], "fwd", faster).measures["crossover_tokens"] == 90


def test_the_command_prints_crossovers_and_appends_rows(ticking, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr("rooftile.cost.session.open_session", lambda target, refresh: SESSION)
    path = tmp_path / "rows.jsonl"
    words = ["bench", "approximate", "--crossover", "--case", "linear", "--limit", "256", "--device", "cpu", "--json", str(path)]
    with pytest.raises(SystemExit) as done:
        main(words)
    assert done.value.code in (0, None)
    told = capsys.readouterr().out
    assert "not below 256 (the limit)" in told
    assert [row.case for row in results.read(path)] == 2 * ["linear-crossover-256", "linear-crossover-256", "linear-crossover"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--crossover", "--case", "magic"], "--crossover has no method 'magic'; has linear, performer, linformer, "),
        (["--limit", "512"], "--limit is for --crossover; give both, or choose cases by --case"),
        (["--crossover", "--limit", "255"], "--limit is 255; must be at least 256"),
        (["--crossover", "--quick"], "--quick is for the suite's cases; with --crossover give --limit or --budget"),
        (["--case", "magic"], "bench approximate has no case 'magic'; has linear-2k, "),
    ],
)
def test_a_users_mistake_is_one_sentence(words, sentence, capsys) -> None:
    with pytest.raises(SystemExit) as done:
        main(["bench", "approximate", "--device", "cpu", *words])
    assert done.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def row(case: str, phase: str, *, at: float | None = None, longest: int = 4096, device: str = "a CPU", **more) -> results.Row:
    """A row of a search."""
    measures = {"shortest_tokens": 256.0, "longest_tokens": float(longest)} | ({} if at is None else {"crossover_tokens": at})
    given = {"date": "2026-01-02", "commit": "abc", "settings": {"heads": "4/4", "dim": 64, "threads": 1}} | more
    return results.Row(
        suite="approximate", case=f"{case}-crossover", backend="rooftile", phase=phase, device=device, measures=measures, **given
    )  # fmt: skip


def test_the_page_says_below_which_length_to_use_exact_attention() -> None:
    rows = [
        row("linear", "fwd", at=1311.0), row("linear", "bwd", at=2048.0), row("nsa", "fwd", longest=2048), row("nsa", "bwd"),
        row("loki", "decode", at=256.0), row("linformer", "fwd", at=514.2), row("linformer", "bwd", at=300.0),
        row("strided", "fwd", at=900.0), row("strided", "bwd", longest=1024),
    ]  # fmt: skip
    lines = crossovers(rows).splitlines()
    # in training both phases must be faster, so `strided` does not count there, and linformer has no causal form
    assert lines[0] == (
        "On a CPU, for a causal forward below 900 tokens use `rt.attention`: `strided` is the first that is faster. "
        "For causal training below 2,000 tokens use `rt.attention`: `linear` is the first that is faster. "
        "For training without a mask below 510 tokens use `rt.attention`: `linformer` is the first that is faster."
    )
    assert "| `linear` | 4/4, 64 | 1,300 | 2,000 | – |" in lines
    assert "| `nsa` | 4/4, 64 | not below 2,048 | not below 4,096 | – |" in lines
    assert "| `loki` | 4/4, 64 | – | – | 256 or below |" in lines
    assert lines[-1] == "a CPU, torch , threads: 1, 2026-01-02, commit abc."


def test_the_page_takes_the_latest_search_and_names_gpus_first() -> None:
    gpu = {"settings": {"heads": "16/16", "dim": 128}, "arch": "sm90", "device": "a GPU"}
    rows = [
        row("linear", "fwd", at=999.0, date="2026-01-03"), row("linear", "fwd", at=300.0), row("nsa", "fwd", longest=512, **gpu),
        replace(row("linear", "fwd", at=77.0), case="linear-crossover-512", measures={}),
    ]  # fmt: skip
    text = crossovers(rows)
    first = text.index("On a GPU, for a causal forward use `rt.attention`: no method is faster")
    assert first < text.index("On a CPU, for a causal forward below 1,000")
    assert "up to 512 tokens at least" in text
    assert "77" not in text
    assert crossovers([]) == "No crossover is measured yet."
