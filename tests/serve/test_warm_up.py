"""Kernels are compiled by threads before the first request; what they run is tests/gpu's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest
import torch

from rooftile.errors import InvalidInput
from rooftile.serve import llm

pytest.importorskip("triton", reason="Triton is not installed on this platform")

PROGRAM = """
import sys
from rooftile.serve.warm_up import import_kernels
import_kernels()
print(*sorted(name for name in sys.modules if name.startswith("rooftile.")))
"""


def test_threads_find_all_modules_imported() -> None:
    """Two that import the same module at once may find half of it."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    kernels = {
        "rooftile.backends.hopper.flash_fwd", "rooftile.backends.hopper.launch", "rooftile.backends.hopper.launch_decode",
        "rooftile.backends.hopper.paged_decode", "rooftile.backends.triton.paged_decode", "rooftile.backends.triton.paged_fwd",
        "rooftile.kvcache.kernels", "rooftile.models.kernels", "rooftile.serve.sampling_kernels",
    }  # fmt: skip
    assert kernels <= found


def test_who_hears_of_a_bad_folder_does_not_wait_for_kernels(peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(peers("llama").folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    begun, told, compiled = Event(), Event(), []

    def compile_slowly(*_: object, **__: object) -> None:
        begun.set()
        compiled.append(told.wait(10))

    monkeypatch.setattr(llm, "compile_kernels", compile_slowly)
    monkeypatch.setattr(llm, "_device_of", lambda *_: torch.device("cuda", 0))
    with pytest.raises(InvalidInput, match=r"safetensors"):
        llm.LLM(folder)
    assert begun.wait(10)
    assert not compiled
    told.set()
