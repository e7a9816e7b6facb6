"""Counters beside predictions, with a program that prints what Nsight Compute prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rooftile.diagnosis.counts import counters
from rooftile.diagnosis.records import OperatorRow, Sample

METRICS = (*counters.DRAM, counters.L2, counters.TIME, *counters.BUSY.values())
ROWS = [
    ("ID", "Kernel Name", *METRICS),
    ("", "", "byte", "byte", "byte", "ns", "%", "%", "%"),
    ("0", "first", "4,000", "1,000", "9,000", "3,000", "80", "40", "20"),
    ("1", "second", "96", "4", "100", "1,000", "40", "20", "60"),
]
PRINTED = "".join(",".join(f'"{word}"' for word in row) + "\n" for row in ROWS)


def sample() -> Sample:
    operation = OperatorRow(
        module="head", op="aten::add", phase="forward", calls=3, flops=1000, special=0, bytes=5000, where="", dtype="fp32",
        device="cuda", key=(), indices=(0,),
    )  # fmt: skip
    return Sample(operation, torch.ops.aten.add.Tensor, (torch.ones(10), 1), {})


def pretend(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "ncu"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_a_call_with_a_memory_format_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "printed").write_text(PRINTED)
    pretend(tmp_path, monkeypatch, f"cat {tmp_path}/printed")
    contiguous = {"memory_format": torch.contiguous_format}
    copied = replace(sample(), function=torch.ops.aten.clone.default, args=(torch.ones(10),), kwargs=contiguous)
    rows, notes = counters.count([copied])
    assert (len(rows), notes) == (1, [])


def test_a_row_for_each_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "printed").write_text(PRINTED)
    pretend(tmp_path, monkeypatch, f"cat {tmp_path}/printed")
    rows, notes = counters.count([sample()])
    assert notes == []
    (row,) = rows
    assert (row["bytes"], row["dram_bytes"], row["l2_bytes"], row["kernels"]) == (5000, 5100, 32 * 9100, 2)
    assert row["tensor_flops"] is None
    # each kernel counts by its time
    assert (row["dram_percent"], row["l2_percent"], row["sm_percent"]) == (70.0, 35.0, 30.0)


@pytest.mark.parametrize(
    ("dram", "l2", "sm", "bound"),
    [
        (80, 40, 20, "memory"), (20, 70, 30, "memory"), (20, 40, 90, "compute"), (70, 40, 65, None), (30, 20, 10, None),
        (10, 10, 39, None), (20, 75, 52, "compute"), (15, 50, 45, "compute"), (15, 50, 39, "memory"),
    ],
)  # fmt: skip
def test_the_bound_by_what_was_busy(dram: float, l2: float, sm: float, bound: str | None) -> None:
    assert counters.busiest({"dram_percent": dram, "l2_percent": l2, "sm_percent": sm}) == bound


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo ERR_NVGPUCTRPERM; exit 1", "ncu could not count aten::add: no rights to the GPU's counters"),
        ("echo broken >&2; exit 1", "broken"),
    ],
)
def test_what_could_not_be_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str) -> None:
    pretend(tmp_path, monkeypatch, script)
    rows, (note,) = counters.count([sample()])
    assert rows == []
    assert words in note


def test_without_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    rows, (note,) = counters.count([sample()])
    assert rows == []
    assert "not on the PATH" in note


def test_the_recorded_operator_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, results = tmp_path / "samples.pt", []
    torch.save(("aten::add", "Tensor", (torch.ones(3), 2), {}), path)
    monkeypatch.setattr(counters.ncu, "show_once", lambda work: results.append(work()))
    counters.main(str(path))
    assert torch.equal(results[0], torch.full((3,), 3.0))
