"""A recorded step of a GPU: counts, gaps by cause, its step and the ceilings that it is compared with, by arithmetic."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import rooftile as rt
from rooftile.diagnosis.diagnosis import Diagnosis
from rooftile.errors import InvalidInput
from tests.diagnosis.recorded.gpu_trace import BF16, H100, WIDE, event, events, kernel, launch, operator, trace
from tests.diagnosis.schema import SCHEMA, breaches

NUMBERS = 4096 * 4096


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace()))
    return path


def rows(found: Diagnosis) -> dict[str, Any]:
    return {op.op.removeprefix("aten::"): op for op in found.ops}


def written(path: Path, **others: Any) -> Path:
    path.write_text(json.dumps(trace(**others)))
    return path


def test_the_gaps_of_a_step_have_their_causes(file: Path) -> None:
    found = rt.diagnosis.from_trace(file, step=4)
    # step 3's kernel ends 100 us into the step of the host
    assert found.step.time_us == pytest.approx(900)
    assert found.step.idle_us == pytest.approx({"host": 145 + 50, "exchange": 0, "sync": 110, "copy": 120, "dependency": 40})
    assert found.step.busy_us == pytest.approx(300 + 50 + 20 + 20 + 45)
    assert found.step.launches == 5
    assert (found.program.step.split(",")[0], found.program.command) == ("ProfilerStep#4 of rank 3 of 8 (nccl)", "trace.json")
    assert found.step.overhead_share == pytest.approx(195 / 900)


def test_operators_have_the_time_of_their_kernels_and_counts_by_their_shapes(file: Path) -> None:
    found = rows(rt.diagnosis.from_trace(file, step=4))
    times = {"addmm": 300, "gelu": 50, "add": 20, "mul": 20, "sum": 45, "copy_": 100, "_local_scalar_dense": 10}
    assert {name: op.time_us for name, op in found.items()} == pytest.approx(times)
    product = found["addmm"]
    assert (product.flops, product.calls, product.kernels) == (2 * 4096 * 8192 * 4096, 1, ("sm90_gemm_bf16",))
    assert product.bytes == 2 * (4096 + 2 * 4096 * 8192 + NUMBERS)
    assert (product.bound, product.unit, product.module) == ("compute", "tensor", "Linear")
    assert product.roof_share == pytest.approx(2 * 4096 * 8192 * 4096 / 989.4e12 / 300e-6)
    gelu = found["gelu"]
    assert (gelu.flops, gelu.special, gelu.bytes, gelu.bound) == (8 * NUMBERS, NUMBERS, 4 * NUMBERS, "memory")
    assert gelu.roof_share == pytest.approx(4 * NUMBERS / 3352e9 / 50e-6)
    assert found["add"].bytes == 6 * NUMBERS
    assert {op.phase for op in found.values()} == {"forward", "backward", "optimiser"}
    assert (found["mul"].phase, found["sum"].phase) == ("optimiser", "backward")
    assert found["_local_scalar_dense"].bound == "host"
    # recorded without shapes
    assert found["sum"].bytes is found["sum"].flops is found["sum"].bound is None
    assert "record_shapes=True" in found["sum"].confirmed_by


def test_every_place_says_that_nothing_was_tried(file: Path) -> None:
    found = rt.diagnosis.from_trace(file, step=4)
    assert {op.confidence for op in found.ops} == {"modelled"} == {found.step.confidence}
    assert all("a trace allows no experiment" in op.confirmed_by for op in found.ops)
    words = "a trace allows no experiment"
    assert words in found.sentence
    assert words in found.program.step
    page = found.to_html()
    assert words in page
    assert "datasheet of H100 SXM" in page
    assert "measured on this machine" not in page
    assert "the nearer limit of a datasheet" in page
    assert list(breaches(json.loads(found.to_json()), SCHEMA)) == []
    assert Diagnosis.from_json(found.to_json()) == found
    assert found.uncounted == ()
    with pytest.raises(InvalidInput, match="no trace"):
        found.to_trace()


def test_remedies_are_those_that_need_no_run(file: Path) -> None:
    found = rt.diagnosis.from_trace(file, step=4)
    prices = {remedy.name: remedy.predicted_us for remedy in found.remedies}
    assert prices["remove a synchronisation"] == pytest.approx(110)
    assert prices["pin and overlap a copy"] == pytest.approx(100)
    assert prices["CUDA graph"] == pytest.approx(900 - (435 + 5 * 1.5))
    assert {"compile", "another attention"}.isdisjoint(prices)
    assert any("have no price" in note for note in found.notes)
    how = next(remedy.how for remedy in found.remedies if remedy.name == "remove a synchronisation")
    assert how.startswith("train.py:30 (train_step)")


def test_the_other_step_ends_with_its_own_kernel(file: Path) -> None:
    found = rt.diagnosis.from_trace(file, step=3)
    assert found.step.time_us == pytest.approx(1100)
    assert {name: op.time_us for name, op in rows(found).items()} == {"relu": 150}


def test_a_trace_without_steps_is_taken_whole(tmp_path: Path) -> None:
    path = tmp_path / "whole.json.gz"
    without = [one for one in events() if not one["name"].startswith("ProfilerStep")]
    path.write_bytes(gzip.compress(json.dumps(trace(traceEvents=without)).encode()))
    found = rt.diagnosis.from_trace(path)
    assert found.program.step.startswith("the whole trace")
    assert {"relu", "addmm"} <= rows(found).keys()
    # from the host's first operator to the end of the last kernel
    assert found.step.time_us == pytest.approx(1950 - 890)


def test_an_unknown_gpu_has_counts_and_no_bound(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.json", deviceProperties=[H100 | {"name": "A Card of 2031"}])
    found = rt.diagnosis.from_trace(path, step=4)
    product = rows(found)["addmm"]
    assert (product.flops, product.bound, product.roof) == (2 * 4096 * 8192 * 4096, None, None)
    assert any("no datasheet of 'A Card of 2031' is known" in note for note in found.notes)
    assert "Operator by operator" in found.to_html()
    known = rows(rt.diagnosis.from_trace(path, step=4, device_name="A100 80GB SXM"))["addmm"]
    assert known.ceiling == pytest.approx(312e12)


def test_products_in_tf32_are_told_by_their_kernels(tmp_path: Path) -> None:
    shapes, words = [WIDE, WIDE], ["float", "float"]
    made = [
        event("user_annotation", "ProfilerStep#0", 0, 3000),
        operator("aten::mm", 10, 10, 1, shapes, words, ["", ""]), launch(12, 1, 101),
        kernel("cutlass_tensorop_s1688gemm", 20, 300, 1, 101),
        operator("aten::bmm", 30, 10, 2, [[1, *WIDE]] * 2, words, ["", ""]), launch(32, 2, 102),
        kernel("ampere_sgemm_128x128", 330, 2200, 2, 102),
    ]  # fmt: skip
    found = rows(rt.diagnosis.from_trace(written(tmp_path / "t.json", traceEvents=made)))
    assert found["mm"].ceiling == pytest.approx(989.4e12 / 2)
    assert found["bmm"].ceiling == pytest.approx(66.9e12)


def test_a_step_on_two_gpus_is_refused(tmp_path: Path) -> None:
    two = [*events(), launch(1960, 15, 109), kernel("add", 1965, 5, 15, 109, device=1)]
    with pytest.raises(InvalidInput, match=r"uses 2 GPUs \(0, 1\)"):
        rt.diagnosis.from_trace(written(tmp_path / "t.json", traceEvents=two), step=4)


def test_what_a_trace_does_not_say_is_not_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lists have no dtypes, masks no values, and operators of another program no rules."""
    dims = [[1000], [1000]]
    made = [
        event("user_annotation", "ProfilerStep#0", 0, 1000),
        operator("aten::add", 5, 5, 1, [[1000], [1000], []], ["float", "float", "Scalar"], ["", "", "1"]),
        operator("aten::relu", 15, 5, 2, [[1000]], [BF16], [""]),
        event("cpu_op", "aten::cat", 25, 5, **{
            "External id": 3, "Input Dims": [dims, []], "Input type": ["TensorList", "Scalar"],
            "Input Strides": [[[1], [1]], []], "Concrete Inputs": ["", "0"],
        }),
        # a profiler writes no shapes of the lists that an optimiser takes
        operator("aten::stack", 30, 3, 8, [[], []], ["TensorList", "Scalar"], ["", "0"]),
        operator("aten::nonzero", 35, 5, 4, [[1000]], ["float"], [""]),
        operator("theirs::rotate", 45, 5, 5, [[1000]], ["float"], [""]),
        operator("aten::mm", 55, 5, 6, [[4, 5], [6, 7]], ["float", "float"], ["", ""]),
        operator("aten::embedding", 65, 5, 7, [[100, 8], [30], [], [], []], ["float", "long int"] + ["Scalar"] * 3,
                 ["", "", "-1", "False", "False"]),
    ]  # fmt: skip
    found = rows(rt.diagnosis.from_trace(written(tmp_path / "t.json", traceEvents=made)))
    assert (found["add"].flops, found["add"].bytes) == (1000, 12_000)
    # two floating dtypes: which one the list has is unknown
    assert (found["cat"].flops, found["cat"].bytes) == (0, None)
    for name in ("stack", "nonzero", "theirs::rotate", "mm"):
        assert found[name].bytes is None, name
    # at most 30 different rows
    assert found["embedding"].bytes == 30 * 8 * 4 + 30 * 8 + 30 * 8 * 4
    # PyTorch logs an operator that fails, and the user would see it
    assert "failed while attempting" not in caplog.text
    one = [made[0], made[1], made[3]]
    found = rows(rt.diagnosis.from_trace(written(tmp_path / "u.json", traceEvents=one)))
    assert found["cat"].bytes == 2 * 2000 * 4


def test_a_machine_that_has_the_gpu_gives_its_own_ceilings(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rooftile.diagnosis.recorded import machine

    class Properties:
        name, total_memory = H100["name"], H100["totalGlobalMem"]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: Properties)
    assert machine._same_gpu(machine._described(H100)) == torch.device("cuda", 0)
    assert machine._same_gpu(machine._described(H100 | {"totalGlobalMem": 1})) is None
    assert machine._same_gpu(machine._described(H100 | {"name": "NVIDIA H100 NVL"})) is None


def test_compiled_code_has_rows_of_its_own(tmp_path: Path) -> None:
    """On a CPU a graph's time between its operators; on a GPU each kernel that the host names."""
    square = [[64, 64], [64, 64]]
    on_cpu = [
        event("user_annotation", "## Call CompiledFxGraph f3ab ##", 10, 100),
        operator("aten::mm", 40, 20, 1, square, ["float", "float"], ["", ""]), operator("aten::relu", 130, 5, 2),
    ]  # fmt: skip
    found = rt.diagnosis.from_trace(written(tmp_path / "t.json", traceEvents=on_cpu))
    times = {name: (op.calls, op.time_us) for name, op in rows(found).items()}
    assert times == {"mm": (1, 20), "inductor::compiled_graph": (2, 80), "relu": (1, 5)}
    assert found.step.idle_us["host"] == pytest.approx(20)
    assert found.program.mode == "compiled"
    assert any("compiled_graph is all that a graph computes" in note for note in found.notes)

    on_gpu = [
        operator("triton_poi_fused_add_0", 10, 20, 1, square, ["float", "float"], ["", ""]),
        event("cuda_driver", "cuLaunchKernel", 15, 3, correlation=101, **{"External id": 1}),
        kernel("triton_poi_fused_add_0", 20, 30, 1, 101),
    ]  # fmt: skip
    found = rt.diagnosis.from_trace(written(tmp_path / "u.json", traceEvents=on_gpu))
    (row,) = found.ops
    assert (row.op, row.time_us, row.flops) == ("inductor::triton_poi_fused_add_0", 30, None)
    assert found.program.mode == "compiled"


def test_kernels_of_a_graph_are_said_to_have_no_operator(tmp_path: Path) -> None:
    made = [
        operator("aten::relu", 5, 5, 1), event("cuda_runtime", "cudaGraphLaunch", 10, 5, correlation=101),
        kernel("gemm", 20, 50, 0, 101), kernel("elementwise", 70, 30, 0, 101),
    ]  # fmt: skip
    found = rt.diagnosis.from_trace(written(tmp_path / "t.json", traceEvents=made))
    assert found.program.mode == "graph"
    assert any("replayed from a CUDA graph" in note for note in found.notes)


def test_older_words_of_a_trace_are_read(tmp_path: Path) -> None:
    older = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel", "gpu_memcpy": "Memcpy"}
    renamed = [one | {"cat": older.get(one["cat"], one["cat"])} for one in events()]
    for one in renamed:
        if "External id" in one["args"]:
            one["args"]["external id"] = one["args"].pop("External id")
    now = rt.diagnosis.from_trace(written(tmp_path / "now.json"), step=4)
    then = rt.diagnosis.from_trace(written(tmp_path / "then.json", traceEvents=renamed), step=4)
    assert then.ops == now.ops
    assert then.step == now.step


def test_an_argument_that_is_no_tensor_at_all_is_left_out(tmp_path: Path) -> None:
    """The backward of attention takes a bias and lengths, which a program without them leaves undefined."""
    shape, sizes = [2, 4, 64, 32], [[2, 4, 64, 32]] * 5 + [[2, 4, 64, 1], [], [], [], [], [], [], [], [], [], []]
    types = [BF16] * 5 + ["float", "long int", "long int", "", "", "", "Scalar", "Scalar", "Scalar", "Scalar", ""]
    words = [""] * 11 + ["64", "64", "0.", "True", ""]
    name = "aten::_scaled_dot_product_cudnn_attention_backward"
    made = [event("user_annotation", "ProfilerStep#0", 0, 1000), operator(name, 5, 50, 1, sizes, types, words)]
    (op,) = rt.diagnosis.from_trace(written(tmp_path / "t.json", traceEvents=made)).ops
    pairs = 2 * 4 * 64 * 65 // 2
    assert op.flops == 2 * (32 + 32) * pairs * 5 // 2
    assert op.bytes == (5 + 3) * 2 * math.prod(shape) + 2 * 4 * 64 * 4 + 2 * 8
