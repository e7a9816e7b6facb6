"""The benchmark: it times what is right, says why it times nothing else, and counts what it says it counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rooftile import InvalidInput, cost
from rooftile.exact import api
from rooftile.exact.cases import CASES, Case
from rooftile.exact.masks import CAUSAL, FULL, Window
from rooftile.hardware.clock import HostClock, medians
from rooftile_lab.bench import check, compare, peers, results
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.run import measure
from tests.bench.session import CEILINGS, SESSION

SMALL = CASES["gqa2"]


def quick(case: Case, providers: tuple[str, ...], **more) -> list[Row]:
    return measure(case, providers, rounds=1, session=SESSION, **more)


@pytest.fixture
def invent(monkeypatch: pytest.MonkeyPatch):
    """Adds a peer of the given name and forward to the list."""

    def add(name: str, prepare) -> None:
        made = peers.Provider(name, lambda case, device, needs_grad: None, prepare)
        monkeypatch.setitem(peers.PEERS, name, made)

    return add


def eager(inputs, **changes):
    return api.attention(*inputs.tensors, inputs.mask, backend="eager", **(inputs.options | changes))


# measure


def test_one_row_a_provider_and_phase_with_figures_that_follow_from_the_median() -> None:
    rows = quick(SMALL, ("eager", "standard"))
    assert [(row.backend, row.phase) for row in rows] == [
        ("eager", "fwd"), ("eager", "bwd"), ("standard", "fwd"), ("standard", "bwd"),
    ]  # fmt: skip
    for row in rows:
        assert row.reason == ""
        assert 0 < row.low_us <= row.median_us <= row.high_us
        assert row.samples >= 1
        floor = cost.roof(SMALL.problem(), CEILINGS, row.phase)
        assert row.tflops == pytest.approx(cost.flops.count(SMALL.problem(), row.phase) / row.median_us / 1e6, rel=1e-4)
        assert row.roofline_percent == pytest.approx(100 * floor.time_us / row.median_us, rel=1e-4)
        assert 0 < row.error < 1e-5
        assert row.peak_bytes > 0
        assert (row.commit, row.date, row.copy_gbs, row.matmul_tflops) == ("abc", SESSION.date, 10.0, 0.1)


def test_rooftile_is_the_automatic_choice_and_says_what_ran() -> None:
    (row,) = quick(CASES["everything"], ("rooftile",), phases=("fwd",))
    assert row.backend == "rooftile"
    assert row.ran in ("tiled", "sdpa", "eager")
    assert row.median_us is not None


def test_a_refusal_is_a_row_with_its_reason() -> None:
    rows = quick(SMALL, ("triton", "torch-cudnn", "flex", "eager"), phases=("fwd",))
    assert [row.median_us is None for row in rows] == [True, True, True, False]
    assert rows[0].reason.startswith("refused: tensors are on cpu")
    assert rows[1].reason == "refused: tensors are on cpu; is for CUDA"
    assert all(row.ran == "" and row.peak_bytes is None for row in rows[:3])


def test_a_provider_that_fails_ends_nothing(invent) -> None:
    def broken(case, inputs):
        def forward():
            raise MemoryError("no room for 3 GiB")

        return forward

    invent("broken", broken)
    rows = quick(SMALL, ("broken", "eager"))
    assert [row.reason for row in rows[:2]] == ["failed: MemoryError: no room for 3 GiB"] * 2
    assert all(row.median_us is not None for row in rows[2:])


def test_one_that_fails_in_a_later_round_has_no_time(invent) -> None:
    calls = 0

    def tiring(case, inputs):
        def forward():
            nonlocal calls
            calls += 1
            if calls > 2:
                raise RuntimeError("tired")
            return eager(inputs)

        return forward

    invent("tiring", tiring)
    (row,) = quick(SMALL, ("tiring",), phases=("fwd",))
    assert (row.median_us, row.reason) == (None, "failed: RuntimeError: tired")


WRONG = {
    "scale": lambda inputs: eager(inputs, scale=0.126),
    "mask": lambda inputs: api.attention(*inputs.tensors, FULL, backend="eager"),
    "off-by-one": lambda inputs: api.attention(*inputs.tensors, CAUSAL & Window(126), backend="eager"),
    "half": lambda inputs: eager(inputs._replace(tensors=tuple(x.bfloat16() for x in inputs.tensors))).float(),
    "nan": lambda inputs: eager(inputs) * float("nan"),
    "group": lambda inputs: eager(inputs._replace(tensors=(inputs.tensors[0], *(x.flip(2) for x in inputs.tensors[1:])))),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_answer_is_not_timed(invent, how: str) -> None:
    invent("wrong", lambda case, inputs: lambda: WRONG[how](inputs))
    for row in quick(SMALL, ("wrong",)):
        assert row.median_us is None
        assert row.reason.startswith("wrong: o is off by")


def test_a_wrong_gradient_behind_a_right_output_is_not_timed(invent) -> None:
    def prepare(case, inputs):
        def forward():
            o = eager(inputs)
            # the same value, and a gradient 1 % too large
            return o + 0.01 * (o - o.detach())

        return forward

    invent("wrong", prepare)
    forward, backward = quick(SMALL, ("wrong",))
    assert forward.median_us is not None
    assert backward.median_us is None
    assert backward.reason.startswith("wrong: dq is off by")


def test_without_the_check_a_wrong_answer_is_timed(invent) -> None:
    invent("wrong", lambda case, inputs: lambda: WRONG["mask"](inputs))
    (row,) = quick(SMALL, ("wrong",), phases=("fwd",), check=False)
    assert (row.error, row.reason) == (None, "")
    assert row.median_us is not None


def test_providers_take_turns_back_and_forth(invent) -> None:
    order = []

    def prepare(name):
        def forward(inputs):
            order.append(name)
            return eager(inputs)

        return lambda case, inputs: lambda: forward(inputs)

    for name in "abc":
        invent(name, prepare(name))
    measure(SMALL, ("a", "b", "c"), ("fwd",), rounds=3, session=SESSION, check=False)
    changes = [name for n, name in enumerate(order) if n == 0 or order[n - 1] != name]
    # each once to prepare, then there, back and there again
    assert "".join(changes) == "abc" + "abc" + "ba" + "bc"


def test_progress_names_the_case_the_provider_and_the_round() -> None:
    said = []
    quick(SMALL, ("eager",), phases=("fwd",), on_progress=said.append)
    assert said == ["gqa2: the definition", "gqa2: eager", "gqa2: round 1 of 1"]


def test_users_mistakes_are_sentences() -> None:
    with pytest.raises(InvalidInput, match="no backend or peer is called 'fast'; has rooftile, hopper, triton"):
        quick(SMALL, ("fast",))
    with pytest.raises(InvalidInput, match="phase is 'both'; must be fwd or bwd"):
        quick(SMALL, ("eager",), phases=("both",))
    with pytest.raises(InvalidInput, match="rounds is 0; must be at least 1"):
        measure(SMALL, ("eager",), rounds=0, session=SESSION)


# the check


@pytest.mark.parametrize(
    "name",
    ["mha", "causal-more-queries", "no-key", "no-query", "gqa5", "d192-128", "fp16", "bf16-outliers", "softcap", "bias-rows",
     "bias-batch", "alibi", "sinks", "dropout-causal", "everything", "expanded", "packed-empty", "packed-uneven",
     "packed-everything"],
)  # fmt: skip
def test_the_definition_as_a_backend_passes_the_check_of_every_kind_of_case(name: str) -> None:
    for row in quick(CASES[name], ("eager",)):
        assert row.reason == ""


@pytest.mark.parametrize("name", ["one-key", "d80", "bf16"])
def test_a_right_backend_with_other_rounding_passes_too(name: str) -> None:
    # with one key dq is zero, but for what is left of terms that cancel
    for row in quick(CASES[name], ("tiled",)):
        assert row.reason == ""


def test_the_longest_of_packed_sequences_is_checked_with_its_own_rows_of_bias() -> None:
    case = replace(CASES["packed-everything"], lengths=((20, 30), (60, 90), (33, 10)), dropout=0.0)
    (part,) = check.Conformance(case, case.inputs(), needs_grad=False).parts
    assert (part.batch, part.queries, part.keys) == (1, slice(20, 80), slice(30, 120))
    assert [row.reason for row in quick(case, ("eager",))] == ["", ""]


@pytest.mark.parametrize("whole", [1 << 30, 100])
@pytest.mark.parametrize("name", ["causal-window", "packed-uneven", "alibi-full"])
def test_a_sample_of_rows_finds_what_the_whole_finds(monkeypatch, name: str, whole: int) -> None:
    monkeypatch.setattr(check, "WHOLE", {"cpu": whole})
    monkeypatch.setattr(check, "BLOCK", 8)
    # several chunks of rows where all are computed
    monkeypatch.setattr(check, "CHUNK", 2000)
    case = CASES[name]
    inputs = case.inputs(requires_grad=True)
    conformance = check.Conformance(case, inputs, needs_grad=True)
    function = api.attention_packed if case.lengths else api.attention
    rows = [sum(rows.stop - rows.start for rows in part.rows) for part in conformance.parts]
    assert all((n == 24) == (whole == 100) for n in rows)

    def answer(**changes) -> dict[str, torch.Tensor]:
        o = function(*inputs.tensors, changes.pop("mask", inputs.mask), backend="eager", **(inputs.options | changes))
        dq, dk, dv = torch.autograd.grad(o, inputs.tensors[:3], conformance.do)
        return {"o": o, "dq": dq, "dk": dk, "dv": dv}

    right = answer()
    assert conformance.complaint(right) is None
    assert max(conformance.errors(right).values()) < 1e-5
    assert conformance.complaint(answer(scale=0.13)) is not None
    assert conformance.complaint(answer(mask=case.mask & Window(20))) is not None
    for tensor in right:
        off = right | {tensor: right[tensor] * 1.001}
        assert conformance.complaint(off).startswith(f"{tensor} is off by")
        assert conformance.errors(off)[tensor] == pytest.approx(1e-3, rel=0.01)


def test_the_last_head_of_the_last_sequence_is_looked_at() -> None:
    case = CASES["mha"]
    inputs = case.inputs()
    conformance = check.Conformance(case, inputs, needs_grad=False)
    o = eager(inputs)
    assert conformance.complaint({"o": o}) is None
    o[-1, 3, -1, 5] += 1e-3
    assert conformance.complaint({"o": o}) is not None


# clocks


def test_works_take_turns_back_and_forth_and_each_gets_the_median_of_its_samples() -> None:
    turns: list[str] = []

    class Counting:
        peak_kind = ""

        def samples(self, work) -> list[float]:
            work()
            return [float(len(turns)), 100.0]

        def peak_bytes(self, work) -> int:
            return 0

    found = medians({name: lambda name=name: turns.append(name) for name in "abc"}, Counting(), rounds=2)
    assert "".join(turns) == "abccba"
    # a's samples are 1, 6 and twice 100, b's 2, 5 and twice 100
    assert found == {"a": 53.0, "b": 52.5, "c": 52.0}


def test_peak_memory_is_what_torch_allocated() -> None:
    x = torch.randn(256, 256)
    # two results of 256 KiB are held at once, the first is let go before the third
    peak = HostClock(1.0).peak_bytes(lambda: (x @ x).exp().sin())
    assert peak == 2 * x.nbytes


def test_the_textbook_holds_the_matrices_that_the_model_counts() -> None:
    case = replace(CASES["mha"], name="tall", B=1, H=4, Hk=4, T=512, S=512, dim=16)
    forward, backward = quick(case, ("standard",))
    assert 1.0 <= forward.peak_bytes / cost.io.standard_peak(case.problem()) < 1.2
    assert 0.9 <= backward.peak_bytes / cost.io.standard_peak(case.problem(), "bwd") < 1.4


def test_a_long_call_is_sampled_once_and_a_short_one_often() -> None:
    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1

    assert len(HostClock(budget_ms=0.5).samples(work)) > 10
    calls = 0
    assert len(HostClock(budget_ms=0.0).samples(work)) == 1
    assert calls == 1


# peers


@pytest.mark.parametrize("name", ["standard", "torch-math", "torch-flash"])
@pytest.mark.parametrize("case", ["causal", "window", "gqa8", "scale"])
def test_the_peers_of_a_cpu_are_right(name: str, case: str) -> None:
    assert [row.reason for row in quick(CASES[case], (name,))] == ["", ""]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["mha", "causal-more-keys", "causal-window", "prefix", "two-chunks", "softcap", "alibi"])
def test_flex_is_asked_for_the_same_problem(monkeypatch, name: str) -> None:
    # uncompiled it runs anywhere, and its masks and scores are the same functions
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = CASES[name]
    inputs = case.inputs()
    with torch.no_grad():
        found = peers.provider_named("flex").prepare(case, inputs)()
        torch.testing.assert_close(found, eager(inputs), atol=1e-5, rtol=1e-5)


def test_peers_refuse_what_they_would_get_wrong() -> None:
    cpu = torch.device("cpu")
    reasons = {
        name: peers.provider_named("standard").reason(CASES[name], cpu, True)
        for name in ("packed", "sinks", "dropout", "causal-more-queries", "softcap")
    }
    assert reasons == {
        "packed": "packed sequences; takes a dense batch",
        "sinks": "sinks; is run without it here",
        "dropout": "dropout; is run without it here",
        "causal-more-queries": "rows that see no key; its softmax has no answer for them",
        "softcap": None,
    }
    # torch aligns its causal mask to the other corner
    assert peers.provider_named("torch-flash").reason(CASES["causal-more-keys"], torch.device("cuda"), True) is not None


@pytest.mark.parametrize(
    ("name", "module"),
    [("fa4", "flash_attn.cute"), ("fa3", "flash_attn_interface"), ("flash-attn", "flash_attn.flash_attn_interface")],
)
def test_a_peer_that_is_not_installed_says_so(name: str, module: str) -> None:
    assert peers.provider_named(name).reason(SMALL, torch.device("cuda"), True) == f"{module} is not installed"


@pytest.mark.parametrize("name", ["standard", "torch-math", "eager"])
def test_what_would_fill_the_memory_of_a_host_is_refused(name: str) -> None:
    huge = replace(SMALL, name="huge", T=1 << 20, S=1 << 20)
    reason = peers.provider_named(name).reason(huge, torch.device("cpu"), True)
    assert reason.startswith("about 196608 GiB of T x S matrices; the machine has")
    assert peers.provider_named("torch-flash").reason(huge, torch.device("cpu"), True) is None


# rows, tables, comparisons


def row(case: str = "c", backend: str = "ours", phase: str = "fwd", us: float | None = 10.0, **more) -> Row:
    values = {
        "suite": "attention", "case": case, "backend": backend, "ran": backend, "phase": phase, "problem": "p",
        "median_us": us, "low_us": us, "high_us": us, "tflops": 12.34,
        "device": "GPU", "arch": "sm90", "driver": "1", "torch": "2", "triton": "3",
        "commit": "abc", "date": "2026-01-01", "copy_gbs": 1.0, "matmul_tflops": 2.0,
    }  # fmt: skip
    return Row(**(values | more))


def test_rows_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    rows = [row(), row(us=None, reason="refused: no")]
    results.append(path, [rows[0].json()])
    results.append(path, [row.json() for row in rows[1:]])
    assert results.read(path) == rows


def test_a_file_of_something_else_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"speed": 3}) + "\n")
    with pytest.raises(InvalidInput, match="line 1 is no benchmark row"):
        results.read(path)
    path.write_text("half a li")
    with pytest.raises(InvalidInput, match="line 1 is no benchmark row"):
        results.read(path)
    with pytest.raises(InvalidInput, match="does not exist"):
        results.read(tmp_path / "y.jsonl")


def test_the_latest_row_counts() -> None:
    old, new = row(us=1.0, date="2026-01-01"), row(us=2.0, date="2026-02-01")
    assert results.latest([new, old]) == [new]


def test_a_table_is_written_between_its_marks_and_nowhere_else(tmp_path: Path) -> None:
    rows = [row("a"), row("a", "peer", tflops=5.55), row("b", us=None), row("a", phase="bwd", tflops=9.0), row("other")]
    results.append(tmp_path / "r.jsonl", [row.json() for row in rows])
    text = "before\n<!-- table: r.jsonl phase=fwd cases=[ab] backends=ours,peer -->\nstale\n<!-- /table -->\nafter\n"
    made = results.write_tables(text, tmp_path)
    assert made == (
        "before\n<!-- table: r.jsonl phase=fwd cases=[ab] backends=ours,peer -->\n"
        "| fwd, TFLOP/s | ours | peer |\n|---|--:|--:|\n| a | 12 | 5.5 |\n| b | - | - |\n\n"
        "GPU, torch 2, 2026-01-01, commit abc.\n<!-- /table -->\nafter\n"
    )
    assert results.write_tables(made, tmp_path) == made


def test_other_numbers_have_a_table_too(tmp_path: Path) -> None:
    rows = [replace(row("a"), measures={"x_nats": 1.5, "y": 2}), replace(row("b"), measures={"y": 3})]
    results.append(tmp_path / "r.jsonl", [one.json() for one in rows])
    made = results.write_tables("<!-- table: r.jsonl measures=x_nats,y -->\n<!-- /table -->\n", tmp_path)
    assert "| | x nats | y |\n|---|--:|--:|\n| a | 1.5 | 2 |\n| b | - | 3 |\n" in made


def test_against_a_peer_the_geometric_mean_and_the_worst_case() -> None:
    rows = [
        row("a", us=10), row("a", "peer", us=20), row("b", us=10), row("b", "peer", us=5),
        row("alone"), row("c", us=None), row("c", "peer"),
        row("other-run", us=1), row("other-run", "peer", us=100, date="2025-12-31"),
    ]  # fmt: skip
    (found,) = compare.against_peer(rows, "ours", "peer")
    assert (found.cases, found.geomean, found.worst, found.worst_case) == (2, pytest.approx(1.0), 0.5, "b")
    assert str(found) == "fwd: ours is 1.00x peer over 2 cases (worst 0.50x at b, best 2.00x at a)"
    with pytest.raises(InvalidInput, match="no case was timed on both 'ours' and 'nobody'"):
        compare.against_peer(rows, "ours", "nobody")


def test_before_and_after() -> None:
    before = [row("a", us=10), row("b", us=40), row("a", phase="bwd")]
    (found,) = compare.before_after(before, [row("a", us=5), row("b", us=10)])
    assert (found.phase, found.geomean, found.worst) == ("fwd", pytest.approx(8**0.5), 2.0)
    with pytest.raises(InvalidInput, match="share no timed case"):
        compare.before_after(before, [row("z")])
