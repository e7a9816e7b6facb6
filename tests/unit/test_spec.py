"""A spec in another process."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import torch

import rooftile as rt
from rooftile.exact.spec import Spec

SPEC = Spec(
    dtype=torch.bfloat16, dim=64, dim_v=32, group=4, mask=rt.Window(9) & rt.CAUSAL, scale=0.3, has_sinks=True,
    precision=rt.Precision(qk="int8"), device="sm90",
)  # fmt: skip

PROGRAM = """
import pickle, sys
from rooftile.exact.spec import decode
spec = pickle.load(sys.stdin.buffer)
fresh = decode(spec.code)
assert spec == fresh and hash(spec) == hash(fresh) and {spec: 1}[fresh] == 1
assert repr(spec) == repr(fresh)
"""


def test_an_unpickled_spec_equals_and_hashes_as_a_fresh_one() -> None:
    root = str(Path(rt.__file__).parents[1])
    environment = os.environ | {"PYTHONHASHSEED": "123", "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=pickle.dumps(SPEC), env=environment, capture_output=True, cwd=root
    )
    assert done.returncode == 0, done.stderr.decode()


def test_a_copy_is_the_same() -> None:
    assert copy.deepcopy(SPEC) == SPEC
    assert hash(copy.copy(SPEC)) == hash(SPEC)
