"""The sampler on a GPU: the definition's sets and tokens, rows that know no neighbours, and graphs that wait for nothing."""

from __future__ import annotations

import pytest
import torch

from rooftile.engine.sampling import sampling_kernels
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.sampling.sampler import SamplingFeatures, features_of, penalised, sample, sample_as_defined, thresholds
from tests.engine.sampling import HOSTILE, KINDS, MAY, Batch, assert_nothing_is_drawn, assign

pytestmark = pytest.mark.gpu

PARAMS = list(KINDS.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [7, 1000, 32000, 151936, 262144])
def test_the_kept_sets(vocab: int, dtype: torch.dtype) -> None:
    """The same scores to the bit; the same sets, but for a token at which top-p's mass is reached to within rounding."""
    batch = Batch(PARAMS, vocab, "cuda")
    logits = batch.logits.to(dtype)
    x = penalised(logits, batch.index, batch.state, batch.features)
    on_host = Batch(PARAMS, vocab)
    assert torch.equal(x.cpu(), penalised(logits.cpu(), on_host.index, on_host.state, on_host.features))
    found = x >= sampling_kernels.thresholds(logits, batch.index, batch.state, batch.features)[:, None]
    due = x >= thresholds(x, batch.index, batch.state)
    wrong = (found != due).sum(1).tolist()
    for params, count, kept in zip(PARAMS, wrong, due.sum(1).tolist(), strict=True):
        if params.top_p == 1:
            assert count == 0, params
        # many bf16 values are equal, and are kept or dropped together
        assert count <= (1 if dtype == torch.float32 else max(1, kept // 20)), params


@pytest.mark.parametrize("k", [1, 2, 50, 1000, 4096, 4097, 30000, 151935])
def test_top_k_is_exact(k: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        batch = Batch([SamplingParams(top_k=k)] * 5, 151936, "cuda")
        x = batch.logits.to(dtype).float()
        found = x >= sampling_kernels.thresholds(x.to(dtype), batch.index, batch.state, batch.features)[:, None]
        assert torch.equal(found, x >= x.topk(k).values[:, -1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 7, 1000, 32000, 151936])
def test_tokens_and_counts(vocab: int, dtype: torch.dtype) -> None:
    """Over many positions: another token than the definition's only where two scores are equal to within rounding."""
    params = [each if not each.logit_bias or vocab > 6 else SamplingParams() for each in PARAMS]
    batch, other = Batch(params, vocab, "cuda"), Batch(params, vocab, "cuda")
    logits, steps, differ = batch.logits.to(dtype), 50, 0
    for _ in range(steps):
        found = sample(logits, batch.index, batch.positions, batch.state, batch.features)
        due = sample_as_defined(logits, other.index, batch.positions, other.state, other.features)
        differ += (found != due).sum().item()
        if batch.state.counts is not None:
            assert batch.state.counts.sum() == other.state.counts.sum()
            other.state.counts.copy_(batch.state.counts)
        batch.positions += 1
    assert differ <= 0.01 * steps * len(params)


@pytest.mark.parametrize("n", [1, 3, 64, 512])
def test_a_row_does_not_depend_on_its_slot_or_its_neighbours(n: int) -> None:
    params = (PARAMS * 40)[:n]
    batch = Batch(params, 32000, "cuda")
    other = Batch(params, 32000, "cuda", slots=[2 * n - i for i in range(n)])
    together = sample(batch.logits, batch.index, batch.positions, batch.state, batch.features)
    order = torch.randperm(n).tolist()
    assert torch.equal(sample(*other.of(order), other.state, batch.features), together[order])
    alone = Batch(params, 32000, "cuda")
    for row in range(min(n, len(PARAMS))):
        assert sample(*alone.of([row]), alone.state, features_of(params[row])).item() == together[row]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_rows(name: str) -> None:
    kinds = [params for params in PARAMS if not params.logit_bias and params.structured is None]
    batch = Batch(kinds, 6, "cuda")
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.tensor([HOSTILE[name]] * len(kinds), device="cuda").to(dtype)
        tokens = sample(logits, batch.index, batch.positions, batch.state, batch.features)
        assert set(tokens.tolist()) <= MAY[name]


@pytest.mark.parametrize(
    "features",
    [
        SamplingFeatures(), SamplingFeatures(chance=True), SamplingFeatures(True, True), SamplingFeatures(True, False, True),
        SamplingFeatures(True, True, True, True), SamplingFeatures(True, False, False, False, True),
    ],
    ids=str,
)  # fmt: skip
def test_it_is_captured(features: SamplingFeatures) -> None:
    """A graph reads new logits, positions and requests, and the host never waits."""
    vocab = 32000
    batch, plain = Batch(PARAMS, vocab, "cuda"), Batch(PARAMS, vocab, "cuda")
    logits, positions = batch.logits.clone(), batch.positions.clone()
    sample(logits, batch.index, positions, batch.state, features)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample(logits, batch.index, positions, batch.state, features)
    batch.set()
    for step in range(4):
        if step == 2:
            for each in (batch, plain):
                assign(each.state, [3, 5], [KINDS["everything"]] * 2, [1, 2], [[1], [2]], [[3], [4]])
        logits.copy_(batch.logits.roll(step, 1))
        positions.copy_(batch.positions + step)
        graph.replay()
        assert torch.equal(out, sample(logits, plain.index, positions, plain.state, features))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_wait() -> None:
    batch = Batch(PARAMS, 32000, "cuda")
    sample(batch.logits, batch.index, batch.positions, batch.state, batch.features)
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        sample(batch.logits, batch.index, batch.positions, batch.state, batch.features)
        assign(batch.state, batch.slots, batch.params, batch.seeds, list(batch.prompts), list(batch.generated))
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("kind", ["greedy", "all_three", "penalties"])
def test_a_row_without_a_token(kind: str) -> None:
    assert_nothing_is_drawn(sample, kind, "cuda")
