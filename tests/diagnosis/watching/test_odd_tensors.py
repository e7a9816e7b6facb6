"""Sparse, nested, wrapped, meta and inference tensors: counted by what they store, and no diagnosis ends at one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rooftile as rt
from rooftile.diagnosis.programs.diagnose_script import diagnose_script
from rooftile.diagnosis.records import OperatorRow
from rooftile.diagnosis.watching.watch import Watch
from rooftile.errors import InvalidInput

pytestmark = pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse|quantized tensor creation).*")
INDEX = 8  # bytes of an index


def watched(step) -> dict[str, OperatorRow]:
    """Returns the rows of a step by the names of their operators."""
    with Watch() as watch:
        step()
    return {row.op.removeprefix("aten::"): row for row in watch.operations}


def graph(nodes: int = 30, edges: int = 70) -> Tensor:
    torch.manual_seed(1)
    return torch.sparse_coo_tensor(torch.randint(nodes, (2, edges)), torch.rand(edges), (nodes, nodes)).coalesce()


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_a_product_of_a_sparse_matrix_counts_its_values(layout: str) -> None:
    matrix = graph()
    count = matrix.values().numel()
    pointers = {"coo": 2 * count, "csr": count + 31, "csc": count + 31}[layout]
    matrix = matrix if layout == "coo" else getattr(matrix, f"to_sparse_{layout}")()
    x = torch.rand(30, 6)
    (row,) = watched(lambda: torch.mm(matrix, x)).values()
    assert row.flops == 2 * count * 6
    assert row.bytes == pointers * INDEX + count * 4 + 2 * x.nbytes


def test_a_sparse_gradient_is_counted_and_its_optimiser_too() -> None:
    bag = nn.EmbeddingBag(50, 4, sparse=True)
    optimiser = torch.optim.SparseAdam(bag.parameters())
    words = torch.tensor([[1, 2, 3], [4, 5, 6]])

    def step() -> None:
        bag(words).sum().backward()
        optimiser.step()

    rows = watched(step)
    assert {row.phase for row in rows.values()} == {"forward", "backward", "optimiser"}
    # the optimiser takes square roots of the gradient's six rows only
    assert rows["sqrt_"].special == 6 * 4
    assert rows["sqrt_"].bytes == 2 * 6 * 4 * 4


def test_a_jagged_tensor_is_watched_by_the_operators_on_its_values() -> None:
    x = torch.nested.nested_tensor([torch.rand(n, 4) for n in (3, 5)], layout=torch.jagged)
    linear = nn.Linear(4, 6)
    rows = watched(lambda: linear(x))
    assert rows["addmm"].flops == 2 * 8 * 4 * 6
    rows = watched(lambda: x.cos())
    assert (rows["cos"].special, rows["cos"].bytes) == (8 * 4, 2 * 8 * 4 * 4)


def test_a_nested_tensor_counts_its_values() -> None:
    x = torch.nested.nested_tensor([torch.rand(n, 4) for n in (3, 5)])
    rows = watched(lambda: torch.relu(x))
    assert (rows["relu"].flops, rows["relu"].bytes) == (8 * 4, 2 * 8 * 4 * 4)


def test_a_meta_tensor_runs_nothing() -> None:
    meta = torch.ones(3, device="meta")
    assert list(watched(lambda: (meta + 1, torch.ones(3) * 2))) == ["ones", "mul"]


def test_complex_and_quantised_tensors_are_watched() -> None:
    x, q = torch.rand(6, dtype=torch.complex64), torch.quantize_per_tensor(torch.rand(6), 0.1, 0, torch.qint8)
    rows = watched(lambda: (x.conj() * 2, q.dequantize()))
    assert rows["mul"].bytes == 2 * 6 * 8
    assert rows["dequantize"].bytes == 6 + 6 * 4


@pytest.mark.parametrize("kind", ["graph", "jagged", "nested", "inference"])
def test_a_diagnosis_ends_with_a_table(kind: str) -> None:
    x, linear = torch.rand(30, 6), nn.Linear(6, 6)
    with torch.inference_mode():
        made = torch.rand(30, 6)
    sequences = [torch.rand(n, 6) for n in (3, 5)]
    given = {
        "graph": graph(), "jagged": torch.nested.nested_tensor(sequences, layout=torch.jagged),
        "nested": torch.nested.nested_tensor(sequences), "inference": made,
    }[kind]  # fmt: skip
    before = given.clone()

    def step(tensor: Tensor) -> Tensor:
        with torch.inference_mode(kind == "inference"), torch.no_grad():
            return torch.relu(tensor @ x if kind == "graph" else linear(tensor))

    found = rt.diagnose(step, given, budget=0.5)
    assert "relu" in {op.op.removeprefix("aten::") for op in found.ops}
    assert found.step.time_us > 0
    whole = [x.to_dense() if x.layout == torch.sparse_coo else x for x in (given, before)]
    pairs = zip(*[x.unbind() if x.is_nested else [x] for x in whole], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_sparse_factor_is_not_padded() -> None:
    matrix, x = graph(nodes=31), torch.rand(31, 5)
    found = rt.diagnose(lambda: matrix @ x, apply=["pad"], budget=0.5)
    assert len(found.ops) >= 1


SCRIPT = """
import sys, torch
from torch import nn
kind = sys.argv[1]
if kind == "fails":
    model = nn.Linear(8, 8)
    model(torch.rand(4, 9))
else:
    model = nn.Linear(8, 8)
    with torch.inference_mode():
        x = torch.rand(4, 8)
        for _ in range(3):
            x = model(x)
"""


def test_a_script_that_fails_at_once_is_told_by_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    with pytest.raises(InvalidInput, match=r"failed with RuntimeError: mat1 and mat2 shapes .* \(.*script.py:7\)"):
        diagnose_script(str(path), ["fails"], budget=0.2)


def test_inputs_that_were_made_in_inference_mode_are_put_back(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    assert "addmm" in {op.op.removeprefix("aten::") for op in diagnose_script(str(path), ["serves"], budget=0.2).ops}
