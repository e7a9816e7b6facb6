"""Kernels are compiled by threads before the first request; what they run is tests/gpu's."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
