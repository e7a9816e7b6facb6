"""Users in pages on a GPU: appended histories against the models that read them anew, in every format of pages."""

from __future__ import annotations

import pytest
import torch

from rooftile.recommend import HSTURecommender, Scorer, TargetRecommender

pytestmark = pytest.mark.gpu
ERRORS = {"auto": 2e-2, "fp8": 0.12, "int8": 6e-2}


def made(dim: int, buckets: int, dtype: torch.dtype) -> HSTURecommender:
    torch.manual_seed(0)
    model = HSTURecommender(500, dim=2 * dim, heads=2, layers=2, longest=1200, buckets=buckets, device="cuda").eval()
    for layer in model.layers:
        for table in (layer.position_table, layer.time_table):
            if table is not None:
                torch.nn.init.normal_(table, std=0.3)
    return model.to(dtype)


@pytest.mark.parametrize("kv_dtype", ERRORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "buckets"), [(32, 0), (64, 17), (128, 17)])
def test_states_are_the_model_s(dim: int, buckets: int, dtype: torch.dtype, kv_dtype: str) -> None:
    model = made(dim, buckets, dtype)
    scorer = Scorer(model, room=6000, kv_dtype=kv_dtype)
    histories = {}
    for n, length in enumerate((1100, 1, 37, 700)):
        events = torch.randint(500, (length,))
        histories[n] = events, torch.randint(10**9, 10**9 + 10**6, (length,)).sort().values
    for cut in (slice(0, 600), slice(600, 601), slice(601, None)):
        scorer.append_many([(user, events[cut], times[cut]) for user, (events, times) in histories.items()])
    candidates = torch.randint(500, (70,))
    for user, (events, times) in histories.items():
        together, at = torch.cat([events, candidates]).cuda(), int(times[-1]) + 60
        when = torch.cat([times, torch.full((70,), at)]).cuda()
        with torch.no_grad():
            due = model(together, torch.tensor([0, len(together)], device="cuda"), when, targets=70).double()
        found = scorer.candidate_states(user, candidates, at).double()
        error = 1e-4 if (dtype, kv_dtype) == (torch.float32, "auto") else ERRORS[kv_dtype]
        assert (found - due[-70:]).norm() <= error * due[-70:].norm()
        assert (scorer.state(user).double() - due[-71]).norm() <= error * due[-71].norm()
        alone = torch.cat([scorer.candidate_states(user, candidates[n : n + 1], at) for n in range(3)]).double()
        assert (alone - found[:3]).norm() <= error * found[:3].norm()


CLICKS = {
    "DIN": {"weights": "silu"},
    "SIM, soft": {"search": "embedding", "top_k": 30},
    "SIM, hard": {"search": "category", "top_k": 30, "categories": torch.arange(500) // 20},
    "ETA": {"search": "lsh", "top_k": 30, "bits": 72},
    "TWIN": {"search": "exact", "top_k": 30, "buckets": 17},
    "the last 300": {"last": 300, "buckets": 17},
}


@pytest.mark.parametrize("kv_dtype", ERRORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CLICKS)
def test_probabilities_are_the_model_s(kind: str, dtype: torch.dtype, kv_dtype: str) -> None:
    torch.manual_seed(0)
    model = TargetRecommender(500, dim=96, heads=2, device="cuda", **CLICKS[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
        if model.age_table is not None:
            model.age_table.normal_()
    model = model.to(dtype)
    scorer = Scorer(model, room=6000, kv_dtype=kv_dtype)
    histories = {}
    for n, length in enumerate((1100, 1, 37, 700, 0)):
        histories[n] = torch.randint(500, (length,)), torch.randint(10**9, 10**9 + 10**6, (length,)).sort().values
    for cut in (slice(0, 600), slice(600, 601), slice(601, None)):
        batch = [(user, events[cut], times[cut]) for user, (events, times) in histories.items()]
        scorer.append_many(batch if model.timed else [x[:2] for x in batch])
    candidates = torch.randint(500, (70,))
    found = scorer.score_many([(user, candidates) for user in histories])
    for user, (events, times) in histories.items():
        with torch.no_grad():
            due = model.scores(
                events.cuda(), torch.tensor([0, len(events)], device="cuda"), candidates[None].cuda(),
                times.cuda() if model.timed else None,
            )[0]  # fmt: skip
        worst = (found[user] - due).abs()
        if kv_dtype == "auto":
            assert worst.max() <= (1e-4 if dtype == torch.float32 else 2e-2)
        else:
            # a search by rounded keys may choose other events for a few candidates
            assert worst.square().mean().sqrt() <= 0.06
