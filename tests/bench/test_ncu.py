"""Reading what Nsight Compute prints, with a program of its name that prints the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from rooftile.diagnosis.counts import ncu

PRINTED = """==PROF== Connected to process 1
"ID","Kernel Name","time.sum","cycles.avg"
"","","nsecond","cycle"
"0","first","1,250","3.5"
"1","second","10","1,000,000"
"""


def pretend(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "ncu"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_a_row_for_each_kernel_without_the_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "printed").write_text(PRINTED)
    pretend(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/asked; cat {tmp_path}/printed')
    found = ncu.kernels(("time.sum", "cycles.avg"), "some.module", "--once", "x", clocks="base")
    assert found == [{"time.sum": 1250.0, "cycles.avg": 3.5}, {"time.sum": 10.0, "cycles.avg": 1e6}]
    asked = (tmp_path / "asked").read_text()
    assert "--clock-control base --metrics time.sum,cycles.avg" in asked
    assert asked.endswith("-m some.module --once x\n")


def test_what_was_not_counted_and_what_failed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "printed").write_text(PRINTED.replace("3.5", "n/a"))
    pretend(tmp_path, monkeypatch, f"cat {tmp_path}/printed")
    with pytest.raises(ValueError, match="n/a"):
        ncu.kernels(("time.sum", "cycles.avg"), "some.module", clocks="none")
    pretend(tmp_path, monkeypatch, "echo no permission >&2; exit 3")
    with pytest.raises(RuntimeError, match=r"ncu failed on some\.module y: no permission"):
        ncu.kernels(("time.sum",), "some.module", "y", clocks="none")
