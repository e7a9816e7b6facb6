"""Adapters on several ranks: each holds its part, answers are those of one rank, and a refusal leaves nobody waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rooftile.engine import LLM
from rooftile.engine.adapters.groups import group_rows
from rooftile.engine.adapters.slots import AdapterSlots
from rooftile.engine.adapters.targets import Targets
from rooftile.engine.ranks import leading_runner
from rooftile.engine.ranks.failures import RankEnded
from rooftile.errors import InvalidInput
from rooftile.models import Decoder, ModelConfig
from rooftile.models.placement import Placement
from tests.engine.asking import GREEDY, assert_clean, prompts
from tests.engine.made_adapters import merged, write_adapter

ROOM: dict[str, Any] = {"dtype": "fp32", "max_model_len": 96, "num_blocks": 99, "max_batched_tokens": 40}
PROJECTIONS = ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj")


def part_of(folder: Path, rank: int, ranks: int) -> Decoder:
    return Decoder.from_folder(
        folder, placement=Placement(torch.float32, torch.device("cpu"), rank, ranks, lambda x: x, lambda x: x)
    )


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("llama", 2), ("llama", 4), ("phi3", 2), ("gpt2", 2), ("bamba", 2), ("qwen3_next", 2), ("falcon_mamba", 2)],
)
def test_a_rank_adds_what_merging_adds_to_its_part_of_the_weights(name: str, ranks: int, peers, tmp_path: Path) -> None:
    peer, config = peers(name), ModelConfig.from_folder(peers(name).folder)
    ends = [*dict.fromkeys(each.rpartition(".")[2] for each in Targets(Decoder(config, dtype=config.dtype)).modules)]
    added = write_adapter(tmp_path / "adapter", peer.model, ends, 5, seed=1)
    whole = merged(peer.model, added, tmp_path / "merged")
    changed = 0
    for rank in range(ranks):
        base, due = part_of(peer.folder, rank, ranks), part_of(whole, rank, ranks)
        slots = AdapterSlots(base, 2, 8, config)
        slots.write(1, slots.read(tmp_path / "adapter"))
        for layer, theirs in zip(base.layers, due.layers, strict=True):
            for mine, its in zip(layer.projections, theirs.projections, strict=True):
                if mine.adapters is None:
                    continue
                found, rows = torch.zeros(mine.inputs, mine.outputs), torch.eye(mine.inputs)
                with slots.reading(group_rows(torch.ones(mine.inputs).long())):
                    mine.adapters.add(found, rows)
                torch.testing.assert_close(found.T, its.weight - mine.weight, rtol=1e-4, atol=1e-5)
                changed += bool(found.any())
    assert changed >= len(ends) * ranks // 2


def answered(llm: LLM, asked: list[list[int]], names: list[str | None]) -> list[list[int]]:
    outputs = llm.generate(asked, GREEDY, adapter=names)
    assert [output.error for output in outputs] == [None] * len(asked)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"context_parallel_size": 2}], ids=lambda x: next(iter(x)))
def test_two_ranks_answer_as_one(
    ranks: dict[str, int], peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    peer, asked = peers("llama"), prompts(9)
    for seed, (name, rank) in enumerate((("a", 4), ("b", 16), ("c", 9))):
        write_adapter(tmp_path / name, peer.model, PROJECTIONS[seed:], rank, seed=seed)
    named: list[str | None] = [("a", "b", None)[n % 3] for n in range(9)]
    two = LLM(peer.folder, adapters={"a": tmp_path / "a"}, max_adapters=2, **ROOM, **ranks)
    one = LLM(peer.folder, adapters={name: tmp_path / name for name in "abc"}, **ROOM)
    two.load_adapter("b", tmp_path / "b")
    due = answered(one, asked, named)
    assert answered(two, asked, named) == due
    # while it is answered an adapter goes and another comes; each request ends with its own
    stream = two.stream(asked, GREEDY, adapter=named)
    last = dict([next(stream)])
    two.unload_adapter("b")
    with pytest.raises(InvalidInput, match="all 2 slots for adapters are taken, 1 of them by adapters that were unloaded"):
        two.load_adapter("c", tmp_path / "c")
    last |= dict(stream)
    assert [last[n].outputs[0].token_ids for n in range(9)] == due
    # one that rank 0 refuses is heard of by no other; one that another refuses is nowhere
    with pytest.raises(InvalidInput, match=r"none is not a folder; give one"):
        two.load_adapter("c", tmp_path / "none")
    with monkeypatch.context() as patch:
        elsewhere = tmp_path / "only there"
        patch.setattr(leading_runner, "order_of", lambda slot, path, order=leading_runner.order_of: order(slot, elsewhere))
        with pytest.raises(InvalidInput, match=r"^rank 1 of 2 has refused the adapter: .*only there is not a folder; give one"):
            two.load_adapter("c", tmp_path / "c")
    slots = two.engine.runner.adapters
    assert slots is not None
    assert [*two.adapters] == ["a"]
    assert not any(beside.matrices.ranks[1].any() for beside in slots._beside)
    two.load_adapter("c", tmp_path / "c")
    named = ["c", None, "a"] * 3
    assert answered(two, asked, named) == answered(one, asked, named) != due
    assert_clean(two)
    runner: Any = two.engine.runner
    runner.leader.processes._processes[0].kill()
    two.unload_adapter("c")
    with pytest.raises(RankEnded, match="rank 1 of 2 has ended"):
        two.load_adapter("b", tmp_path / "b")
    two.close()
