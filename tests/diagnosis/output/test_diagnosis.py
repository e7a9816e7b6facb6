"""The diagnosis: its JSON by the schema, there and back; its table; its sentence."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rooftile.diagnosis.diagnosis import Diagnosis, diagnosis
from rooftile.diagnosis.output import units
from rooftile.diagnosis.output.json_rows import Program
from rooftile.diagnosis.output.table import WIDTH, text
from rooftile.diagnosis.remedies.prices import cuda_graph
from rooftile.diagnosis.remedies.remedy import Remedy
from rooftile.diagnosis.verdicts.findings import Finding, find
from rooftile.diagnosis.verdicts.step import StepEvidence
from rooftile.errors import InvalidInput
from tests.diagnosis.machine import Machine, Work, finding, narrower_dtype, operation
from tests.diagnosis.schema import SCHEMA, breaches

GPU = Machine(flops_per_us=7e8, bytes_per_us=4e6, cache_bytes_per_us=1.2e7, fixed_us=2.0, launch_us=5.0, device="cuda")
PROGRAM = Program(command="train.py --fast", step="Optimizer.step", torch="2.13", mode="eager")
STEP = StepEvidence(
    time_us=53700, spread_us=120, graph_us=8100, double_batch_us=54500, idle_us={"host": 46000, "sync": 200},
    why_not={"half": "the batch is 1"},
)  # fmt: skip

COUNTED = {
    "module": "head", "op": "aten::mm", "phase": "forward", "bytes": 1000, "dram_bytes": 1010.0, "l2_bytes": 2500.0,
    "flops": 10, "tensor_flops": None, "kernels": 1, "dram_percent": 81.0, "l2_percent": 60.0, "sm_percent": 20.0,
}  # fmt: skip


def findings() -> list[Finding]:
    norm = finding(GPU, Work(bytes=4e8, flops=1e8), calls=40, index=0, op="aten::native_layer_norm")
    product = finding(GPU, Work(bytes=1e8, flops=1.4e11), calls=10, index=1, op="aten::mm")
    product = replace(product, operation=replace(product.operation, module="model.layers.0.mlp.gate_proj.with.a.long.path"))
    tiny = finding(GPU, Work(bytes=1e3, flops=1e3, latency_us=30), calls=20, index=2, op="aten::cumsum")
    unknown = find(
        replace(operation(Work(bytes=0, flops=0), device="cuda", index=3, op="mine::kernel"), flops=None, bytes=None),
        GPU.roofs(), None, time_us=80.0,
    )  # fmt: skip
    return [tiny, unknown, norm, product]


def example(**changes: object) -> Diagnosis:
    its = findings()
    graph = cuda_graph(STEP, busy_us=7300, launches=1185, node_us=1.0)
    narrow = narrower_dtype([(2, its[2]), (3, its[3])], "fp8", rate_ratio=2, bytes_ratio=0.5)
    given = {
        "machine": {"name": "NVIDIA H200"}, "ceilings": {"copy_gbs": 4000.0}, "program": PROGRAM, "step": STEP,
        "findings": its, "remedies": [narrow, graph, None], "launches": 1185, "peak_bytes": 10**9, "busy_us": 7300.0,
        "kernels": {3: ["sm90_gemm"]}, "counters": [COUNTED], "notes": ["two ranks"],
    }  # fmt: skip
    return diagnosis(**given | changes)  # type: ignore[arg-type]


def test_the_json_has_the_schema_and_comes_back() -> None:
    d = example()
    values = json.loads(d.to_json())
    assert list(breaches(values, SCHEMA)) == []
    assert Diagnosis.from_json(d.to_json()) == d
    assert Diagnosis.from_json(d.to_json()).to_json() == d.to_json()


@pytest.mark.parametrize(
    ("path", "value"),
    [("form", "rooftile.diagnosis/2"), ("step", {}), ("ops", [{}]), ("notes", "none"), ("machine", None)],
)
def test_the_checker_sees_a_breach(path: str, value: object) -> None:
    values = json.loads(example().to_json())
    assert list(breaches(values | {path: value}, SCHEMA))
    values["ops"][0]["time_us"] = "3 us"
    assert [b for b in breaches(values, SCHEMA) if "ops[0].time_us" in b]
    values["ops"][0]["time_us"] = True
    assert [b for b in breaches(values, SCHEMA) if "ops[0].time_us" in b]
    values["extra"] = 1
    assert "$.extra is not in the schema" in list(breaches(values, SCHEMA))


def test_the_ops_are_sorted_and_remedies_point_at_them() -> None:
    d = example()
    assert [op.op for op in d.ops] == ["aten::native_layer_norm", "aten::mm", "aten::cumsum", "mine::kernel"]
    assert [op.time_us for op in d.ops] == sorted((op.time_us for op in d.ops), reverse=True)
    assert [r.name for r in d.remedies] == ["CUDA graph", "narrower dtype: fp8"]
    assert d.remedies[1].ops == (0, 1)
    assert [op.remedies for op in d.ops] == [(1,), (1,), (), ()]
    assert d.ops[1].kernels == ("sm90_gemm",)
    assert d.uncounted == ("mine::kernel",)


def test_a_row_counts_all_calls_and_reaches_its_roof() -> None:
    norm, product, *_ = example().ops
    assert (norm.calls, norm.bytes, norm.flops) == (40, 40 * 4 * 10**8, 40 * 10**8)
    assert norm.intensity == pytest.approx(0.25)
    assert (norm.roof, norm.ceiling) == ("HBM", pytest.approx(4e12))
    assert norm.achieved == pytest.approx(4e8 / 102e-6)
    assert norm.roof_share == pytest.approx(100 / 102)
    assert (product.roof, product.ceiling) == ("fp32", pytest.approx(7e14))
    assert product.achieved == pytest.approx(1.4e11 / 202e-6)
    assert norm.share == pytest.approx(40 * 102 / 53700)


def test_an_uncounted_operator_is_null_and_never_0() -> None:
    values = json.loads(example().to_json())["ops"][-1]
    names = ("flops", "bytes", "intensity", "roof", "ceiling", "achieved", "roof_share", "bound", "unit", "modelled_bound")
    assert {values[name] for name in names} == {None}
    assert values["experiments"]["intensity"] == {"added_us": [], "time_us": [], "slope": None, "knee_flops_per_byte": None}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_lacks_is_null(bad: float) -> None:
    d = example(peak_bytes=None, machine={"clock": bad, "nested": [{"x": bad}]}, step=replace(STEP, half_batch_us=bad))
    values = json.loads(d.to_json())
    assert values["machine"] == {"clock": None, "nested": [{"x": None}]}
    assert values["step"]["experiments"]["half_batch_us"] is None
    assert list(breaches(values, SCHEMA)) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ('{"form": "another/1"}', r"the form 'another/1'; must be 'rooftile\.diagnosis/1'"),
        ("{}", "the form None"),
        ("[]", "the form None"),
        ("oops", "is not JSON"),
        ('{"form": "rooftile.diagnosis/1"}', r"is not whole \('program'\)"),
        ('{"form": "rooftile.diagnosis/1", "program": {"x": 1}}', "is not whole"),
    ],
)
def test_another_text_is_refused(other: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Diagnosis.from_json(other)


def test_the_table_fits_its_width_and_says_everything() -> None:
    d = example()
    lines = str(d).splitlines()
    assert max(map(len, lines)) <= WIDTH
    words = " ".join(str(d).split())
    assert "Step 53.7 ms: 85 % overhead (1,185 launches, 38.8 us between kernels)" in words
    assert "replayed as a CUDA graph it takes 8.1 ms." in words
    assert "Of the 7.3 ms of kernels 60 % are bound by memory (native_layer_norm), 30 % by compute (mm)" in words
    assert "9 % by latency (cumsum), 1 % have no verdict (kernel)." in words
    assert "memory (HBM), confirmed: model, slope 0.0" in words
    assert "98 % 3.92 TB/s" in words
    assert "train.py:7; narrower dtype: fp8 saves 3 ms here and in 1 other row" in words
    assert "no rule has their formula: mine::kernel" in words
    assert "Note: two ranks." in words
    assert "gain: the share of the time that goes away with its traffic to main memory" in words
    assert "head mm: 1 kB predicted, 1.01 kB counted in main memory and 2.5 kB in L2;" in words
    assert "of their peak rates 81 % in main memory, 60 % in L2, 20 % in multiprocessors" in words
    assert "CUDA graph: saves 45.6 ms (85 %), tried;" in words
    assert "together at most" in words
    assert "nan" not in words.lower()


def test_a_measured_saving_takes_the_place_of_the_computed_one() -> None:
    d = example()
    applied = replace(d, remedies=(replace(d.remedies[0], measured_us=44000.0), *d.remedies[1:]))
    assert "saves 44 ms (82 %), tried;" in " ".join(str(applied).split())
    slower = replace(d, remedies=(replace(d.remedies[0], measured_us=-5370.0), *d.remedies[1:]))
    assert "CUDA graph: takes 5.37 ms more (10 %), tried;" in " ".join(str(slower).split())
    computed = replace(d, remedies=(replace(d.remedies[0], measured_us=None), *d.remedies[1:]))
    assert "saves 45.6 ms (85 %), computed;" in " ".join(str(computed).split())


def test_long_tables_are_cut() -> None:
    d = example()
    shown = text(d.program, d.step, d.ops, d.remedies, rows=1)
    assert "... and 3 more: 2.74 ms" in shown
    assert "cumsum  " not in shown
    assert "cumsum  " in str(d)


def test_a_diagnosis_of_nothing_prints() -> None:
    d = example(findings=[], remedies=[], step=StepEvidence(time_us=10.0), launches=None, busy_us=None)
    assert "Step 10 us: overhead unknown." in str(d)
    assert list(breaches(json.loads(d.to_json()), SCHEMA)) == []


def test_a_remedy_beyond_the_step_is_not_promised() -> None:
    greedy = [Remedy(name=name, predicted_us=50000.0, how="do it", changes="nothing") for name in ("one", "two")]
    assert "together at most 53.7 ms, leaving 0 us" in " ".join(str(example(remedies=greedy)).split())


def test_units() -> None:
    assert [units.count(x) for x in (0, 999, 999.6, 1e6, 2.5e15, 1e19)] == ["0", "999", "1 k", "1 M", "2.5 P", "10,000 P"]
    assert [units.duration(x) for x in (0.5, 999.4, 999.6, 2e6)] == ["0.5 us", "999 us", "1 ms", "2 s"]
    assert (units.count(None), units.duration(None), units.percent(None)) == ("-", "-", "-")


def test_a_mode_is_one_of_three() -> None:
    with pytest.raises(InvalidInput, match="must be one of eager, compiled, graph"):
        Program(command="", step="", torch="", mode="fast")
