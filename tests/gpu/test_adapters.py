"""Adapters on a GPU: the kernels beside fp64, in graphs too, and no compilation or capture once an engine has started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rooftile.engine import LLM, SamplingParams
from rooftile.engine.adapters.groups import FEW, group_rows
from rooftile.engine.adapters.kernels import add_in_kernels
from rooftile.engine.steps.graphs import DecodeGraphs
from rooftile.models import Decoder
from rooftile.runtime.early_weights import weights_stay
from rooftile_lab.bench.adapter_rates import write_adapter
from tests.gpu.test_compilations import SETTINGS, compilations
from tests.interpreter.test_adapters import EVEN, ODD, due, matrices
from tests.kernels.test_after_warm_up import config_named

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bounds", [ODD, EVEN], ids=["odd", "even"])
@pytest.mark.parametrize(
    ("rows", "R", "K"), [(1, 16, 4096), (64, 16, 1030), (64, 80, 512), (256, 256, 4096), (FEW + 9, 48, 4096)]
)
def test_rows_of_many_adapters(rows: int, R: int, K: int, bounds: tuple[int, ...]) -> None:
    """Eagerly, and in a graph, where matrices are read before the product in front has ended."""
    torch.manual_seed(rows)
    made = matrices(bounds, K, R, torch.bfloat16)
    on_gpu = made._replace(
        a=made.a.cuda(), b=made.b.cuda(), ranks=made.ranks.cuda(), blocks={rows: x.cuda() for rows, x in made.blocks.items()}
    )
    slots = torch.randint(-1, 5, (rows,)) if rows > 1 else torch.tensor([3])
    groups = group_rows(slots)
    groups = groups._replace(buffer=groups.buffer.cuda())
    x, w = torch.randn(rows, K, dtype=torch.bfloat16), torch.randn(bounds[-1], K, dtype=torch.bfloat16) / K**0.5
    given, weight = x.cuda(), w.cuda()

    def layer() -> torch.Tensor:
        y = given @ weight.T
        add_in_kernels(y, given, on_gpu, groups)
        return y

    base = (given @ weight.T).cpu()
    exact = due(base, x, made, slots)
    found = [layer()]
    graph = torch.cuda.CUDAGraph()
    with weights_stay(), torch.cuda.graph(graph):
        captured = [layer() for _ in range(3)]
    graph.replay()
    found += captured
    for y in found:
        # H is rounded to 16 bits, and the sum over ranks adds its errors up
        torch.testing.assert_close(y.cpu().double(), exact, rtol=2e-2, atol=1.5e-2 * R**0.5)
        assert torch.equal(y.cpu()[slots < 0], base[slots < 0])


@pytest.mark.parametrize("weights", ["auto", "fp8"])
def test_no_request_compiles_a_kernel_or_captures_a_graph(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    decoder, captures = Decoder.random(config_named("llama"), torch.bfloat16, "cuda"), list[Any]()
    for rank in (5, 16, 80):
        write_adapter(decoder, tmp_path / f"{rank}", rank)
    capture = DecodeGraphs._capture

    def counted(*given: Any, **named: Any) -> Any:
        captures.append(given[2:])
        return capture(*given, **named)

    monkeypatch.setattr(DecodeGraphs, "_capture", counted)
    with compilations() as started:
        llm = LLM(decoder, **SETTINGS, weights=weights, max_adapters=2, max_adapter_rank=80)
    assert started
    assert captures
    captures.clear()
    params, prompts = SamplingParams(max_tokens=4, ignore_eos=True), [[3] * n for n in (1, 7, 20, 600, 900, 17, 2, 2, 2)]
    with compilations() as found:
        for first, second in (("5", "16"), ("80", "5"), ("16", "80")):
            for rank in (first, second):
                llm.load_adapter(rank, tmp_path / rank)
            for names in ([first], [None], [first, second, None]):
                for count in (1, 3, len(prompts)):
                    outputs = llm.generate(prompts[:count], params, adapter=[names[n % len(names)] for n in range(count)])
                    assert [output.error for output in outputs] == [None] * count
            for rank in (first, second):
                llm.unload_adapter(rank)
    assert not found
    assert not captures
