"""Decoders of our own in the engine on a GPU, in graphs and a step ahead: the tokens that it finds on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rooftile.engine import LLM, SamplingParams
from rooftile.models import TrainableDecoder
from tests.engine.asking import GREEDY, ROOM, assert_clean, prompts
from tests.models.checkpoints import VOCABULARY

pytestmark = pytest.mark.gpu
EXPERTS = {"name": "experts", "experts": 8, "active": 2, "hidden": 64, "shared": 1}
MAMBA2 = {"name": "mamba2", "head_dim": 64, "state_size": 64}
MODELS = {
    "linear": {"mixers": "linear"},
    "performer": {"mixers": {"name": "performer", "m": 64}},
    "performer, trigonometric": {"mixers": {"name": "performer", "m": 64, "kind": "trigonometric"}},
    "hybrid": {"mixers": [MAMBA2, "attention", "linear"], "feed_forwards": [None, "dense", EXPERTS], "layers": 3},
    "experts": {"feed_forwards": EXPERTS},
}  # fmt: skip


def engines(name: str, folder: Path, **settings) -> tuple[LLM, LLM]:
    """The same weights on a CPU and on the GPU, in fp32."""
    torch.manual_seed(0)
    model = TrainableDecoder(VOCABULARY, **{"hidden": 128, "heads": 4, "kv_heads": 2, "max_len": 128} | MODELS[name])
    with torch.no_grad():
        for one, weight in model.named_parameters():
            # so large that the tokens of a text differ
            if weight.ndim > 1 and not one.endswith("A_log"):
                weight.mul_(2.0)
    model.save(folder)
    return LLM(folder, device="cpu", block_size=16, **ROOM), LLM(folder, device="cuda", block_size=16, **ROOM | settings)


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"max_batched_tokens": 13}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_the_cpus(name: str, settings: dict, tmp_path: Path) -> None:
    here, there = engines(name, tmp_path, **settings)
    assert (there.engine.runner._graphs is None) == ("enforce_eager" in settings)
    asked = prompts(20)
    due, found = here.generate(asked, GREEDY), there.generate(asked, GREEDY)
    assert [output.error for output in found] == [None] * 20
    same = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(due, found, strict=True)]
    # a sum in another order may turn the order of two tokens that are nearly alike
    assert sum(same) >= 19
    assert max(len(set(output.outputs[0].token_ids)) for output in due) > 4
    assert_clean(there)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", ["linear", "performer", "hybrid"])
def test_a_step_does_not_wait_for_itself(name: str, tmp_path: Path) -> None:
    _, there = engines(name, tmp_path)
    params = SamplingParams(temperature=0.5, max_tokens=30, ignore_eos=True)
    there.generate(prompts(6), params)
    engine = there.engine
    for prompt in prompts(6):
        engine.add(prompt, params)
    for _ in range(4):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while not engine.idle:
        engine.step()
    assert_clean(there)
