"""Files that are no trace, or a damaged one, and options that a trace has no use for: one sentence each."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import rooftile as rt
from rooftile.cli.diagnose import diagnose
from rooftile.errors import InvalidInput
from tests.diagnosis.recorded.gpu_trace import event, operator, trace

WHOLE = json.dumps(trace())


def refused(path: Path, content: bytes | str) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InvalidInput) as error:
        rt.diagnosis.from_trace(path)
    words = str(error.value)
    assert "\n" not in words
    return words.removeprefix(str(path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("step,time\n1,2\n", "is not JSON"),
        ("\x00\x01\x02", "is not JSON"),
        (b"\xff\xfe\x00\x81", "is not JSON, as it is no text"),
        ('{"traceEvents": [}', "is not JSON"),
        ('{"a": 1, }\n{"b": 2}', "is not JSON"),
        ('{"form": "rooftile.diagnosis/1"}', "has no traceEvents"),
        ('{"traceEvents": 7}', "has no traceEvents"),
        ("17", "has no traceEvents"),
        ('"trace"', "has no traceEvents"),
        ("[" * 100_000, "brackets in brackets"),
        ('{"traceEvents": []}', "another program than torch.profiler"),
        ('[{"ph": "X", "cat": "toplevel", "name": "RunTask", "ts": 1, "dur": 2}]', "another program than torch.profiler"),
        ('{"traceEvents": [1, null, [], "x", {"ph": 3, "cat": []}]}', "another program than torch.profiler"),
        ('{"schemaVersion": 1, "deviceProperties": [], "traceEvents": []}', "has no operator in it"),
        (WHOLE[: len(WHOLE) // 2], "ends in the middle"),
        (WHOLE[:-2], "ends in the middle"),
        (gzip.compress(WHOLE.encode())[:-40], "ends in the middle"),
        (gzip.compress(WHOLE.encode())[:30] + b"damaged" * 20, "begins as gzip and is none"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_a_sentence(content: bytes | str, words: str, tmp_path: Path) -> None:
    assert words in refused(tmp_path / "trace.json", content)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none.json", "is not there"), (tmp_path, "is a folder")):
        with pytest.raises(InvalidInput, match=words):
            rt.diagnosis.from_trace(path)


def test_kernels_alone_are_no_program(tmp_path: Path) -> None:
    kernels = [one for one in trace()["traceEvents"] if one["cat"] == "kernel"]
    assert "has kernels and no operators" in refused(tmp_path / "t.json", json.dumps(trace(traceEvents=kernels)))


@pytest.mark.parametrize("value", [None, "1", True, [1], -1])
def test_an_event_without_a_time_is_damage(value: Any, tmp_path: Path) -> None:
    bad = operator("aten::mm", 5, 5, 1)
    bad["dur"] = value
    assert "the trace is damaged: the event 'aten::mm' has dur" in refused(tmp_path / "t.json", json.dumps([bad]))
    infinite = json.dumps([operator("aten::mm", 5, 5, 1)]).replace('"ts": 5', '"ts": Infinity')
    assert "has ts inf" in refused(tmp_path / "u.json", infinite)
    assert "has ts None" in refused(tmp_path / "v.json", infinite.replace('"ts": Infinity, ', ""))


def test_a_step_in_which_no_time_passes(tmp_path: Path) -> None:
    assert "no time" in refused(tmp_path / "t.json", json.dumps([operator("aten::mm", 5, 0, 1)]))
    marks = [event("user_annotation", "ProfilerStep#2", 0, 4), operator("aten::mm", 5, 5, 1)]
    assert "no operator in ProfilerStep#2" in refused(tmp_path / "t.json", json.dumps(marks))


ODD = [
    {"Input Dims": "x", "Input type": 3, "Input Strides": None, "Concrete Inputs": {}},
    {"Input Dims": [[-1, 5], [5, 7]], "Input type": ["float", "float"], "Input Strides": [[5, 1], [7, 1]]},
    {"Input Dims": [7, None], "Input type": ["float", ["float"]], "Input Strides": [1, "x"]},
    {"Input Dims": [[[[[2]]]], [[]]], "Input type": ["TensorList", "float"]},
    {"Input Dims": [[3, 4], [4, 5]], "Input type": ["no type", "float"], "Concrete Inputs": ["[", "nan"]},
    {"Input Dims": [[3, 4]], "Input type": ["float", "float", "float"]},
    {"Input Dims": [[1 << 40, 1 << 40], [1 << 40, 3]], "Input type": ["float", "float"]},
    {"Input Dims": [["a"], [4.5]], "Input type": ["float", "float"], "External id": "seven"},
]


@pytest.mark.parametrize("args", ODD)
def test_odd_inputs_are_not_counted(args: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    odd = event("cpu_op", "aten::mm", 5, 5, **args) | {"tid": [1], "pid": {}}
    path.write_text(json.dumps(trace(traceEvents=[odd, operator("aten::relu", 15, 5, 2)], deviceProperties="none", host_name=5)))
    found = {op.op: op for op in rt.diagnosis.from_trace(path).ops}
    assert found["aten::mm"].calls == 1
    assert found["aten::mm"].time_us == 5
    assert found["aten::mm"].bytes is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"apply": ["compile"]}, "--apply has no use with --from"),
        ({"budget": 5.0}, "--budget has no use with --from"),
        ({"ncu": True}, "--ncu has no use with --from"),
        ({"trace": Path("out.json")}, "--trace has no use with --from"),
        ({"step": "train_step"}, "--step train_step names a function"),
        ({"step": "-1"}, "--step -1 names a function"),
        ({"step": "7"}, "has no ProfilerStep#7; it has 3, 4"),
        ({"script": "train.py"}, "give one of them"),
        ({"tour": True}, "give one of them"),
        ({"device": "cuda"}, "no datasheet of 'cuda' is known"),
    ],
)
def test_the_command_refuses_what_needs_a_program(
    options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.json").write_text(WHOLE)
    with pytest.raises(InvalidInput) as error:
        diagnose(**({"recorded": Path("trace.json"), "ops": 3} | options))
    assert words in str(error.value)


def test_the_command_prints_a_recorded_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    path.write_text(WHOLE)
    diagnose(recorded=path, step="4", ops=2, json=tmp_path / "found.json", html=tmp_path / "found.html", device="H200")
    printed = capsys.readouterr().out
    assert (
        "By model only: a trace allows no experiment, and its profiler slows the host, so the overhead is an upper limit."
        in " ".join(printed.split())
    )
    assert "datasheet of H200" in printed
    assert json.loads((tmp_path / "found.json").read_text())["step"]["time_us"] == pytest.approx(900)
    assert "By model only" in (tmp_path / "found.html").read_text()
