"""The report page: built by the command in quick mode, self-contained, well formed, with titles that match its data."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from rooftile.cli import main
from rooftile.drawing import charts, svg, units
from rooftile.exact import masks
from rooftile.exact.masks import CAUSAL, FULL, Window
from rooftile_lab.report import claims, experiments, page, probe, spread, top
from rooftile_lab.report.comparison import OURS, SDPA, STANDARD, Comparison, Reading, Traffic, too_much
from rooftile_lab.report.experiments import Report
from rooftile_lab.report.machine import Machine, Roof
from rooftile_lab.report.plan import CPU, plan_for
from rooftile_lab.report.probe import Probe
from rooftile_lab.report.progress import Progress
from rooftile_lab.report.tiles import TileMap, Tiling, aligned_walk, examples, online_softmax, tiled_walk
from rooftile_lab.report.training import Run, Training

VOID = {"meta", "link", "br", "img", "hr", "input", "source", "path", "rect", "circle", "polyline"}


class Page(HTMLParser):
    """Collects a page's elements; fails if one is closed out of order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        self.texts.setdefault(tag, [])
        if tag not in VOID:
            self.open.append(tag)
            self.texts[tag].append("")

    def handle_startendtag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another element, near line {self.getpos()[0]}"

    def handle_data(self, data):
        for tag in set(self.open):
            self.texts[tag][-1] += data


def numbers_of(text: str) -> dict:
    """Returns the raw numbers in a page."""
    found = re.search(r'<script type="application/json" id="numbers">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """Returns the page that the command writes with --quick, and its exit status."""
    out = tmp_path_factory.mktemp("report") / "deep" / "page.html"
    command = [sys.executable, "-m", "rooftile", "report", "--quick", "--device", "cpu", "--out", str(out)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(out.parent.parent), "TRANSFORMERS_VERBOSITY": "error"}
    return out, subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_command_ends_with_the_path_and_says_a_line_per_experiment_when_piped(made):
    out, done = made
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(out.resolve())]
    assert "\r" not in done.stderr
    assert "\x1b" not in done.stderr
    # PyTorch 2.15 built for CUDA logs that it finds no GPU
    lines = [line for line in done.stderr.splitlines() if not re.match(r"W\d{4} .*No CUDA runtime", line)]
    said = [line.split(":")[0] for line in lines]
    # the expected time first; an experiment that takes long says more than once where it is
    assert re.fullmatch(r"report: this takes about \d+\xa0(seconds|minutes?) here, as a probe .*", lines[0])
    assert list(dict.fromkeys(said)) == ["report", *plan_for("cpu", quick=True).seconds]
    assert all(re.search(r"\(\d+ % done, about \d+\xa0\w+ left\)$", line) for line in lines[1:])
    assert out.exists()


def test_the_page_is_well_formed_and_loads_nothing(made):
    text = made[0].read_text(encoding="utf-8")
    parsed = Page(text)
    assert parsed.open == []
    # links to sections, in their order, and to the numbers
    anchors = re.findall(r'<section id="(\w+)">', text)
    assert parsed.addresses == [*(f"#{anchor}" for anchor in anchors), "#numbers"]
    # in the numbers an address is a word of some message
    shown = text[: text.index('<script type="application/json"')]
    outside = [address for address in re.findall(r"https?://[^\s\"'<]+", shown) if "www.w3.org/2000/svg" not in address]
    assert outside == []
    assert "@import" not in text
    assert "url(" not in text


def test_every_experiment_ran_and_the_quick_page_says_that_it_is_quick(made):
    text = made[0].read_text(encoding="utf-8")
    numbers = numbers_of(text)
    assert numbers["failures"] == {}
    names = (
        "machine",
        "comparison",
        "tiling",
        "approximate",
        "training",
        "serving",
        "weights",
        "formats",
        "diagnosis",
        "recall",
        "context",
        "experts",
        "histories",
    )
    assert all(numbers[name] for name in names)
    assert "This is a quick run" in text
    assert numbers["reproduction"]["command"].startswith("rooftile report --out")


def test_titles_say_what_the_data_says(made):
    text = made[0].read_text(encoding="utf-8")
    parsed, numbers = Page(text), numbers_of(text)
    readings = numbers["comparison"]["readings"]
    lengths = {side: {r["N"]: r for r in readings if r["side"] == side} for side in (OURS, STANDARD)}
    N = max(lengths[OURS].keys() & lengths[STANDARD].keys())
    titles = [" ".join(title.split()) for title in parsed.texts["h3"]]
    ours, theirs = (lengths[side][N]["training_peak_bytes"] for side in (OURS, STANDARD))
    ratio = max(ours, theirs) / min(ours, theirs)
    written = f"{ratio:,.0f}×" if ratio >= 9.95 else f"{ratio:.1f}×"
    due = f"{written} {'less' if ours < theirs else 'more'} memory than standard"
    due = due if ratio >= 1.05 else "the same memory as standard"
    assert any(title.startswith("Forward and backward") and title.endswith(due) for title in titles), (due, titles)
    window = numbers["tiling"]["maps"][-1]
    assert f"skips {100 * window['saved']:.0f}\xa0% of the scores" in parsed.texts["h1"][0]
    apart = 1 + max(0.05, window["forward_spread"] + window["sdpa_spread"])
    assert ("faster than SDPA" in parsed.texts["h1"][0]) == (window["forward_us"] * apart <= window["sdpa_us"])
    sdpa, ours = (run["losses"][-1] for run in numbers["training"]["runs"])
    assert abs(sdpa - ours) < 0.02
    assert any(title.startswith("Same seed, same curve") for title in parsed.texts["h2"])


def test_the_load_of_the_machine_stands_at_the_top_and_beside_each_ceiling(made):
    text = made[0].read_text(encoding="utf-8")
    numbers, top = numbers_of(text), text[: text.index("<main>")]
    assert "Before the experiments" in top
    if numbers["before"]["others"] is None:
        assert "the load of other programs is unknown" in top
        return
    assert 0 <= numbers["before"]["others"] <= numbers["before"]["cores"]
    assert set(numbers["others"]) <= set(numbers["seconds"]) == set(numbers["cpu_seconds"])
    assert "busy elsewhere" in text
    for roof in numbers["machine"]["roofs"]:
        if roof["others"] is not None:
            assert f"{roof['others']:.1f} cores" in text


def test_the_page_has_one_speed_of_memory(made):
    text = made[0].read_text(encoding="utf-8")
    machine = numbers_of(text)["machine"]
    (copy,) = [roof["measured"] for roof in machine["roofs"] if roof["what"] == "copies in memory"]
    assert machine["ceilings"]["copy_gbs"] == copy
    shown = text[: text.index('<script type="application/json"')]
    assert set(re.findall(r"(?:DRAM|copies) ([\d.,]+\xa0[kMGT]?B/s)", shown)) == {units.count(copy * 1e9, "B/s")}


def test_no_chart_has_a_line_of_one_point(made):
    text = made[0].read_text(encoding="utf-8")
    lines = re.findall(r'<polyline class="line (?!thin)[\w ]*" points="([^"]*)"', text)
    charts_drawn = re.findall(r"<svg .*?</svg>", text)
    assert lines
    for drawn in charts_drawn:
        its = re.findall(r'<polyline class="line (?!thin|due dashed)[\w ]*" points="([^"]*)"', drawn)
        assert not its or max(len(points.split()) for points in its) >= charts.FEWEST, drawn[:300]


def test_a_section_comes_after_those_that_it_refers_to(made):
    text = made[0].read_text(encoding="utf-8")
    sections = dict(re.findall(r'<section id="(\w+)">(.*?)</section>', text, re.DOTALL))
    order = list(sections)
    assert order == [anchor for anchor, _ in top.CONTENTS]
    # the Llama that is served, weighed and diagnosed was trained before; roofs are those of the machine
    for later in ("serving", "weights", "diagnosis"):
        assert order.index("model") < order.index(later)
    assert order[0] == "machine"
    assert all("trained above" in sections[name] for name in ("serving", "weights"))
    assert "trained below" not in text


def test_the_footer_names_the_commit_once_and_the_time_that_was_computed(made):
    text = made[0].read_text(encoding="utf-8")
    footer = text[text.index("<footer>") : text.index("</footer>")]
    assert footer.count("commit ") == 1
    assert re.search(r"The experiments took \d+ s, of which this process computed for \d+ s\.", footer)


def test_every_comparison_has_sdpa_beside_rooftile(made):
    numbers = numbers_of(made[0].read_text(encoding="utf-8"))
    assert numbers["comparison"]["backends"] == {OURS: "tiled", SDPA: "torch-flash", STANDARD: "standard"}
    assert {reading["side"] for reading in numbers["comparison"]["readings"]} == {OURS, SDPA, STANDARD}
    assert [run["attention"] for run in numbers["training"]["runs"]] == ["sdpa", "rooftile"]
    assert all(tile_map["sdpa_us"] > 0 for tile_map in numbers["tiling"]["maps"])


def reading(side: str, N: int, us: float, peak: int) -> Reading:
    return Reading(
        side=side, N=N, forward_us=us, backward_us=2 * us, forward_peak_bytes=peak, training_peak_bytes=2 * peak,
        forward_error=3e-7, backward_error=4e-7,
    )  # fmt: skip


def comparison(ours_us: float, ours_peak: int) -> Comparison:
    """Standard attention takes 100 us and 1 MB at 256 tokens, 400 us and 4 MB at 512; SDPA 100 us at 512."""
    readings = [
        reading(OURS, 256, ours_us / 4, ours_peak // 4), reading(STANDARD, 256, 100, 10**6),
        reading(OURS, 512, ours_us, ours_peak), reading(STANDARD, 512, 400, 4 * 10**6),
        reading(OURS, 1024, 3 * ours_us, ours_peak), reading(SDPA, 512, 100, 10**5),
    ]  # fmt: skip
    return Comparison(
        dtype="fp32", batch=1, heads=2, dim=32, peak_kind="counted",
        backends={OURS: "tiled", SDPA: "torch-flash", STANDARD: "standard"},
        readings=tuple(readings), traffic=tuple(Traffic(N=N, standard=N * N, tiled=N * 99, compulsory=N) for N in (256, 512)),
        stopped={STANDARD: "at 1,024 tokens it got bored"},
    )  # fmt: skip


def report(**parts) -> Report:
    return Report(
        plan=CPU, reproduction={"command": "rooftile report", "rooftile": "0", "commit": "unknown", "date": "today"}, **parts
    )


@pytest.mark.parametrize(
    ("ours_us", "due"),
    [
        (100.0, "A window over 256 tokens skips 75\xa0% of the scores: 4.0× faster than SDPA"),
        (1000.0, "A window over 256 tokens skips 75\xa0% of the scores: 2.5× slower than SDPA"),
        (401.0, "A window over 256 tokens skips 75\xa0% of the scores: as fast as SDPA"),
    ],
)
def test_the_headline_follows_the_numbers_also_where_they_are_against_us(ours_us, due):
    window = replace(tile_map(CAUSAL & Window(0), 256), forward_us=ours_us, sdpa_us=400.0)
    found = report(tiling=Tiling(backend="tiled", block_t=64, block_s=64, maps=(tile_map(FULL, 256), window)))
    assert claims.headline(found.tiling) == due
    assert Page(page.render(found)).texts["h1"] == [due]


def test_a_slower_kernel_is_called_slower():
    slow = comparison(1000.0, 10**5)
    assert claims.time_claim(slow, "forward_us") == "Forward, 512 tokens: 10× slower than SDPA, 2.5× slower than standard"
    assert claims.memory_claim(slow, "forward_peak_bytes") == (
        "Forward, 512 tokens: the same memory as SDPA, 40× less memory than standard"
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "spread", "due"),
    [(100.0, 150.0, 0.1, "1.5× less"), (100.0, 150.0, 0.6, "alike"), (150.0, 100.0, 0.6, "alike"), (100.0, 103.0, 0.0, "alike")],
)
def test_a_difference_within_the_spread_is_no_finding(ours, theirs, spread, due):
    assert claims.against(ours, theirs, "less", "more", "alike", spread) == due


def test_spreads_of_times_reach_the_titles():
    noisy = comparison(200.0, 10**5)
    readings = [replace(one, forward_spread=0.6) for one in noisy.readings]
    assert "2.0× slower than SDPA" in claims.time_claim(noisy, "forward_us")
    assert "as fast as SDPA" in claims.time_claim(replace(noisy, readings=tuple(readings)), "forward_us")
    # memory is counted, and has no spread
    assert "40× less memory" in claims.memory_claim(replace(noisy, readings=tuple(readings)), "forward_peak_bytes")
    window = replace(tile_map(CAUSAL & Window(0), 256), forward_us=100.0, sdpa_us=150.0)
    assert claims.window_claim(window) == "1.5× faster than SDPA"
    assert claims.window_claim(replace(window, forward_spread=0.3, sdpa_spread=0.3)) == "as fast as SDPA"
    one = Run(attention="sdpa", losses=(1.0,), step_ms=10.0, peak_bytes=1, step_spread=0.2)
    runs = [one, replace(one, attention="rooftile", step_ms=7.7)]
    training = Training(parameters=1, text_bytes=1, runs=tuple(runs), prompt="", written="")
    assert claims.standing_of_step(training, "step_ms") == "the same time as with SDPA"


def test_the_spread_is_half_of_the_distance_between_quartiles():
    assert spread.spread_of([10.0] * 9) == 0.0
    assert spread.spread_of([float(n) for n in range(1, 100)]) == pytest.approx(0.5)
    assert spread.relative(90.0, 100.0, 110.0) == pytest.approx(0.1)
    assert spread.relative(None, 100.0, None) == 0.0
    assert spread.usual([0.0, 0.1, 0.3, 0.2]) == pytest.approx(0.2)


def test_errors_of_rounding_are_alike_up_to_twice_each_other():
    one = comparison(100.0, 10**5)
    assert claims.error_claim(one, "forward_error").startswith("The output is as exact as standard")
    far = [replace(each, forward_error=9e-7) if each.side == OURS else each for each in one.readings]
    assert "3.0× further from fp64" in claims.error_claim(replace(one, readings=tuple(far)), "forward_error")


def test_lengths_that_are_too_few_for_a_line_are_said_in_words():
    short = comparison(100.0, 10**5)
    few = replace(short, readings=tuple(one for one in short.readings if one.N == 512))
    text = page.render(report(comparison=few))
    assert "<polyline" not in text.split('id="why"')[0]
    assert "<li>Forward, 512 tokens: as fast as SDPA" in text


def test_a_slow_product_is_not_shown_as_zero():
    copy = Roof(what="copies in memory", measured=5.0, datasheet=None, unit="GB/s", others=1.25)
    roofs = (copy, Roof(what="fp16 product", measured=0.0004, datasheet=None, unit="TFLOP/s"))
    device = {"name": "c", "type": "cpu", "cores": 2, "memory_bytes": 10**9, "l2_bytes": 0, "driver": "1", "torch": "2"}
    verdicts: dict[str, tuple[str, ...]] = {"tiled": ()}
    machine = Machine(
        device=device, datasheet="", roofs=roofs, measured_on="2026-01-01", problem="p", chosen="tiled", verdicts=verdicts
    )
    text = page.render(report(machine=machine))
    assert "400\xa0MFLOP/s" in text
    assert "1.2 cores" in text
    assert not re.search(r"\b0\xa0?[TG]FLOP/s", text)


@pytest.mark.parametrize(
    ("script", "due"),
    [("echo 37", 37.0), ("echo '[N/A]'", None), ("echo 37; exit 6", None), ('test "$1" = --id=GPU-1-2 && echo 5', 5.0)],
)
def test_nvidia_smi_says_how_busy_a_gpu_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, due: float | None
) -> None:  # fmt: skip
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert probe.gpu_percent("1-2") == due
    assert probe.gpu_percent("") is None


def test_the_probe_says_how_long_it_takes_under_this_load():
    found = Probe(slower=6.0, others=1.6, cores=2)
    assert found.words({"a": 200.0, "b": 100.0}) == (
        "this takes about 30\xa0minutes here, as a probe of a second says; other programs kept 1.6 of 2 cores busy"
    )
    busy = replace(found, gpu_percent=40.0)
    assert busy.load == "other programs kept 1.6 of 2 cores busy, and the GPU was 40 % busy"
    stream = io.StringIO()
    progress = Progress({"a": 100.0, "b": 100.0}, stream)
    progress.expect(found)
    progress.show("a", 0.5, "half")
    # 6 times 200 s, of which three quarters are left
    assert stream.getvalue().splitlines()[1] == "a: half (25 % done, about 15\xa0minutes left)"
    # the machine is quieter than the probe found: what is left takes less
    progress.done("a", 100.0)
    assert 100 < progress.left_s(0.5) < 300


def test_curves_that_part_are_not_called_the_same():
    ends = {"sdpa": 2.0, "rooftile": 2.5}
    runs = [Run(attention=name, losses=(5.0, last), step_ms=1.0, peak_bytes=10) for name, last in ends.items()]
    training = Training(parameters=1, text_bytes=1, runs=tuple(runs), prompt="", written="")
    assert claims.loss_claim(training) == "Same seed, two curves: SDPA ends at a loss of 2.00, Rooftile at 2.50"


def test_what_failed_or_is_missing_is_said_in_words():
    found = report(failures={"comparison": "RuntimeError: <no luck>"}, missing={"training": "transformers is not installed"})
    text = page.render(found)
    assert Page(text).open == []
    assert "The comparison failed" in text
    assert "RuntimeError: &lt;no luck&gt;" in text
    assert "transformers is not installed" in text
    assert numbers_of(text)["failures"] == {"comparison": "RuntimeError: <no luck>"}


def test_a_failed_experiment_ends_the_command_with_1_after_the_page(monkeypatch, tmp_path, capsys):
    found = report(comparison=comparison(100.0, 10**5), failures={"training": "RuntimeError: no luck"})
    monkeypatch.setattr(experiments, "run", lambda plan, device, command, progress: found)
    with pytest.raises(SystemExit) as ended:
        main(["report", "--device", "cpu", "--json", "--out", str(tmp_path / "page.html")])
    shown = capsys.readouterr()
    assert ended.value.code == 1
    assert "the experiment 'training' failed: RuntimeError: no luck" in shown.err
    told = json.loads(shown.out)
    assert told["page"] == str(tmp_path / "page.html")
    assert told["comparison"]["stopped"] == {STANDARD: "at 1,024 tokens it got bored"}
    assert "The training failed" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_folder_as_out_is_refused_in_a_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["report", "--device", "cpu", "--out", str(tmp_path)])
    assert ended.value.code == 2
    assert "which is a folder; give the name of a file" in capsys.readouterr().err


def test_a_string_in_the_data_cannot_end_the_script():
    run = Run(attention="sdpa", losses=(5.0, 4.0), step_ms=1.0, peak_bytes=10)
    hostile = Training(parameters=1, text_bytes=1, runs=(run, run), prompt="The ", written="</script><b>loud</b>")
    text = page.render(report(training=hostile))
    assert numbers_of(text)["training"]["written"] == "</script><b>loud</b>"
    assert "<b>loud" not in text
    assert "Same seed, same curve" in text


@pytest.mark.parametrize("walk", [lambda mask, N: aligned_walk(mask, N, 64, 32), tiled_walk], ids=["aligned", "tiled"])
@pytest.mark.parametrize("mask", examples(1024), ids=str)
def test_the_walk_visits_every_visible_pair_and_masks_where_one_is_hidden(mask, walk):
    N = 1024
    visible = masks.materialise(mask, N, N)
    covered = 0
    for visit in walk(mask, N):
        tile = visible[visit.t : visit.t_stop, visit.s : visit.s_stop]
        assert visit.is_masked == (not bool(tile.all()))
        covered += int(tile.sum())
    assert covered == masks.pairs(mask, N, N)


def tile_map(mask, N: int) -> TileMap:
    return TileMap(
        mask=str(mask), N=N, visits=tuple(aligned_walk(mask, N, N // 4, N // 4)), full_visits=16,
        visible_pairs=masks.pairs(mask, N, N), forward_us=1.0 + masks.pairs(mask, N, N) / N**2, sdpa_us=2.0,
    )  # fmt: skip


def test_saved_work_is_counted_in_scores():
    causal = tile_map(CAUSAL, 256)
    assert (len(causal.visits), causal.masked, causal.skipped) == (10, 4, 6)
    assert causal.saved == pytest.approx(6 / 16)
    maps = tuple(tile_map(mask, 256) for mask in (FULL, CAUSAL, CAUSAL & Window(0)))
    assert claims.tiles_claim(maps).startswith("Hidden tiles are skipped: causal & window(0) leaves out 75")
    text = page.render(report(tiling=Tiling(backend="tiled", block_t=64, block_s=64, maps=maps)))
    assert "10 tiles computed, 4 of them masked, 6 skipped" in text


def test_online_softmax_ends_where_softmax_does():
    import torch

    row = ((0.5, 2.0, 1.0), (3.0, 0.0, 2.5), (-4.0,))
    last = online_softmax(row)[-1]
    whole = torch.tensor([score for tile in row for score in tile], dtype=torch.float64)
    assert last.largest == whole.max().item()
    assert last.sum == pytest.approx((whole - whole.max()).exp().sum().item(), rel=1e-12)


def test_the_sweep_stops_before_memory_and_before_patience():
    from rooftile_lab.report.comparison import case_of

    plan = replace(CPU, heads=4, patience=4.0)
    long = case_of(plan, 8192).problem()
    assert "score matrices alone would need 3.22\xa0GB" in too_much(plan, STANDARD, long, [], 2 * 2**30)
    assert too_much(plan, OURS, long, [], 2 * 2**30) == ""
    slow = [replace(reading(OURS, 4096, 1.0, 1), forward_us=1e6, backward_us=2e6)]
    assert "would take about 12\xa0s" in too_much(plan, OURS, long, slow, 2 * 2**30)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_a_line_per_experiment_elsewhere(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for stream in (io.StringIO(), Terminal()):
        progress = Progress({"machine": 10.0, "training": 30.0}, stream)
        for done in (0.25, 0.5):
            progress.show("training", done, f"training two Llamas, {done}")
        progress.clear()
        if stream.isatty():
            assert "━" in stream.getvalue()
            assert "training two Llamas, 0.5" in stream.getvalue()
        else:
            assert stream.getvalue() == "training: training two Llamas, 0.25 (44 % done, about 20\xa0seconds left)\n"
    assert progress.share("training", 0.5) == pytest.approx(25 / 40)


@pytest.mark.parametrize(
    "names", [("Rooftile", "SDPA", "standard"), ("Rooftile", "standard", "no cache"), ("exact", "sparse transformer")]
)
def test_the_legend_covers_no_point_and_its_names_do_not_meet(names):
    lines = [
        charts.Series(name=name, kind=kind, points=((256, y), (512, 2 * y), (1024, 4 * y)))
        for name, kind, y in zip(names, ("ours", "other", "standard"), (1.0, 1.05, 300.0), strict=False)
    ]
    picture = charts.log_chart(lines, title="t", y_name="y", write=str)
    places = re.findall(r'<text class="label \w+" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]+)', picture)
    assert [name for *_, name in places] == list(names)
    for (x, _, name), (after, *_) in pairwise(places):
        assert float(x) + svg.LETTER * len(name) < float(after)
    x, _, name = places[-1]
    assert float(x) + svg.LETTER * len(name) < svg.WIDTH
    below = [float(y) for points in re.findall(r'points="([^"]+)"', picture) for y in re.findall(r",([\d.]+)", points)]
    assert max(float(y) for _, y, _ in places) < min(below)


def test_a_page_that_cannot_be_written_is_refused_before_the_work(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(experiments, "run", lambda *ignored: pytest.fail("it measured first"))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SystemExit) as ended:
        main(["report", "--device", "cpu", "--out", str(tmp_path / "file" / "page.html")])
    assert ended.value.code == 2
    assert f"and {tmp_path / 'file'} is a file; give a file in a folder" in capsys.readouterr().err


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_rises_in_length_and_names_every_experiment(device, quick):
    plan = plan_for(device, quick=quick)
    assert list(plan.lengths) == sorted(set(plan.lengths))
    names = {
        "machine", "comparison", "tiling", "precision", "approximate", "training", "serving", "weights", "formats", "diagnosis",
        "recall", "context", "experts", "histories",
    }  # fmt: skip
    assert set(plan.seconds) == names
    assert plan.model.hidden % plan.model.heads == 0
    assert (plan.device, plan.is_quick) == (device, quick)


def test_the_probe_takes_the_time_of_its_work_and_puts_the_threads_back(monkeypatch):
    import torch

    before = torch.get_num_threads()
    monkeypatch.setattr(probe, "_work", lambda: 3 * probe.REFERENCE_S)
    found = probe.probe(torch.device("cpu"))
    # half of the plan's time goes by the clock
    assert found.slower == pytest.approx(2.0)
    assert found.expected_s({"a": 10.0, "b": 20.0}) == pytest.approx(60.0)
    assert torch.get_num_threads() == before
    monkeypatch.undo()
    assert probe._work() > 0
