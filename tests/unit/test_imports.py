"""`import rooftile` waits for no torch, and a program that has torch sees no difference."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import rooftile

CALL = """
@torch.compile(fullgraph=True, backend="aot_eager")
def call(q):
    return rooftile.attention(q, q, q, rooftile.CAUSAL)

q = torch.randn(1, 8, 2, 16)
assert torch.allclose(call(q), rooftile.attention(q, q, q, rooftile.CAUSAL))
"""


def run(program: str) -> str:
    """Returns what a program prints in a process of its own."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_rooftile_does_not_import_torch() -> None:
    program = "import sys, rooftile; rooftile.CAUSAL, rooftile.InvalidInput, dir(rooftile); print('torch' in sys.modules)"
    assert run(program) == "False"


def test_no_module_imports_dynamo() -> None:
    """It takes seconds, of which a server that starts and a short script have none to lose."""
    names = "approximate, diagnosis, fused, kvcache, models, nn, numerics, optim, planning, qat, engine, sparsity"
    program = f"import sys; from rooftile import {names}; import rooftile.engine.llm; print('torch._dynamo' in sys.modules)"
    assert run(program) == "False"


@pytest.mark.parametrize(
    "order", ["import torch, rooftile", "import rooftile", "import rooftile, importlib.util; importlib.util.find_spec('torch')"],
    ids=["torch first", "rooftile first", "asked for, then imported"],
)  # fmt: skip
def test_torch_has_the_operators_in_either_order(order: str) -> None:
    """An exported program needs them, and calls nothing by its name in Python."""
    late = "[name for name in rooftile.__all__ if name not in vars(rooftile)]"
    found = run(f"{order}; import torch; print(torch.ops.rooftile.attention.default, {late})")
    assert found == "rooftile.attention.default ['LLM', 'SamplingParams', 'diagnose', 'doctor', 'plan']"


def test_products_with_gates_are_operators_after_the_import() -> None:
    assert run("import torch, rooftile; print(torch.ops.rooftile.linear_gated.default)") == "rooftile.linear_gated.default"


def test_transformers_without_the_interface_stays_usable(tmp_path: Path) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "modeling_utils.py").write_text("class PreTrainedModel: ...")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import rooftile; from transformers import modeling_utils as m"
    assert run(f"{program}; print(m.__file__)") == str(package / "modeling_utils.py")


def test_a_module_that_imports_torch_itself_leaves_the_other_names_for_later() -> None:
    program = "import rooftile.approximate; import rooftile; print(rooftile.nn.Attention, rooftile.exact.masks, rooftile.LLM)"
    assert run(program).split() == [
        "<class", "'rooftile.nn.attention.Attention'>", "<module", "'rooftile.exact.masks'", "from",
        f"'{Path(rooftile.__file__).parent / 'exact/masks.py'}'>", "<class", "'rooftile.engine.llm.LLM'>",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "imports", ["import rooftile, torch", "import rooftile.approximate, rooftile, torch"], ids=["names there", "names late"]
)
def test_the_first_use_may_be_in_a_compiled_function(imports: str) -> None:
    assert run(f"{imports}\n{CALL}\nprint('same')") == "same"


def test_what_was_pickled_is_read_in_a_fresh_process() -> None:
    made = [
        rooftile.Precision(pv="native"), rooftile.CAUSAL & rooftile.Window(3), rooftile.attention, rooftile.SamplingParams(n=2)
    ]  # fmt: skip
    program = f"""
import pickle, sys
found = pickle.loads({pickle.dumps(made)!r})
import rooftile as rt
print(isinstance(found[0], rt.Precision), found[1] == rt.CAUSAL & rt.Window(3), found[2] is rt.attention)
print(found[3] == rt.SamplingParams(n=2))
"""
    assert run(program).split() == ["True"] * 4


def test_packages_with_late_names_have_no_others() -> None:
    program = """
from rooftile import *
import rooftile, rooftile.models, rooftile.engine
assert all(name in globals() for name in rooftile.__all__)
for each in (rooftile, rooftile.models, rooftile.engine):
    assert all(hasattr(each, name) for name in dir(each))
    try:
        each.nonsense
    except AttributeError as error:
        print(error)
"""
    due = [f"module '{name}' has no attribute 'nonsense'" for name in ("rooftile", "rooftile.models", "rooftile.engine")]
    assert run(program).splitlines() == due


def test_an_error_of_torch_is_not_hidden() -> None:
    program = """
import sys, rooftile
sys.modules["torch"] = None
try:
    rooftile.attention
except ImportError as error:
    print(error.name)
"""
    assert run(program) == "torch"
