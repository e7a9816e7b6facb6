"""Multi-head latent attention in the engine: tokens are Transformers', and both forms of it are the same."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from rooftile.approximate import Loki, LokiLayers
from rooftile.engine import LLM, EngineConfig
from rooftile.engine.mixers import trial
from rooftile.engine.mixers.latent import step as latent_step
from rooftile.engine.mixers.latent.mixer import LatentMixer
from rooftile.engine.mixers.latent.step import LatentAttention, LatentStep
from rooftile.engine.start import warm_up
from rooftile.errors import Unsupported
from rooftile.models import Decoder
from rooftile.models.config import config_of
from tests.engine.asking import GREEDY, ROOM, TOKENS, assert_clean, prompts, tokens_of
from tests.engine.kinds_of_layers import SETTINGS, SIZE, check_beams, check_forks, check_greedy, check_logprobs
from tests.grids import swept
from tests.models.latent import CONFIGS

NAMES = ["deepseek_v3", "deepseek_v3, dense", "deepseek_v2"]


# each way once, and each model with a preemption and without
@pytest.mark.parametrize(
    ("name", "how"), swept(product(NAMES, SETTINGS), lambda case: (case[1], (case[0], "preempted" in case[1])))
)
def test_greedy_tokens_are_those_of_transformers(name: str, how: str, peers) -> None:
    check_greedy(peers(name), how)


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_those_of_transformers(name: str, peers) -> None:
    check_logprobs(peers(name))


@pytest.mark.parametrize("name", NAMES)
def test_forks_are_answers_of_their_own(name: str, peers) -> None:
    check_forks(peers(name))


@pytest.mark.parametrize("room", [ROOM, {"max_model_len": 96, "num_blocks": 27, "max_batched_tokens": 20}], ids=["", "preempted"])
def test_beams_are_those_of_transformers(room: dict, peers) -> None:
    check_beams(peers("deepseek_v3, yarn"), room)


def test_prefixes_are_found(peers) -> None:
    peer, prefix = peers("deepseek_v3, yarn"), prompts(1, seed=3)[0] * 4
    llm, found = LLM(peer.folder, block_size=SIZE, **ROOM), []
    for prompt in (prefix[:45], [*prefix[:40], 5, 6, 7], [*prefix[:33], 5, 6], prefix[:40]):
        (output,) = llm.generate([prompt], GREEDY)
        assert [output.outputs[0].token_ids] == peer.greedy([prompt], TOKENS)
        found.append(output.num_cached_tokens)
        assert_clean(llm)
    assert found == [0, 40, 32, 32]


@pytest.mark.parametrize("most", [1, 3000, 20000])
def test_what_is_made_of_latents_is_bounded(most: int, monkeypatch: pytest.MonkeyPatch, peers) -> None:
    """In parts of heads, of answers and of prompts the tokens are the same."""
    peer, asked = peers("deepseek_v3, yarn"), prompts(8)
    monkeypatch.setattr(latent_step, "MOST_BYTES", most)
    parts: list[int] = []
    run = latent_step._parts
    monkeypatch.setattr(latent_step, "_parts", lambda *given: iter([parts.append(len(x := list(run(*given)))) or x][0]))
    assert tokens_of(LLM(peer.folder, block_size=SIZE, **ROOM), asked, GREEDY) == [[row] for row in peer.greedy(asked, TOKENS)]
    assert max(parts) > 1


@pytest.mark.parametrize("name", ["deepseek_v3, yarn", "deepseek_v2, whole queries"])
def test_absorbed_is_expanded(name: str, peers) -> None:
    """On the same cache, also of blocks in no order, beside a NaN that belongs to nobody, and for several lengths."""
    decoder = Decoder.from_folder(peers(name).folder)
    layer, config = decoder.layers[1], decoder.config
    sizes, H, lengths = layer.sizes, config.heads, [1, 8, 13, 27]
    cache = torch.full((40, 5, 1, sizes.kept), float("nan"))
    one = LatentAttention(layer, cache, config.scale)
    table = torch.randperm(40)[:24].view(4, 6).int()
    for blocks, length in zip(table, lengths, strict=True):
        n = torch.arange(length)
        cells = blocks[n // 5] * 5 + n % 5
        one.write(torch.randn(length, sizes.rank), torch.randn(length, sizes.rotated), cells)
    # a token that pads a step is written nowhere
    before = cache.clone()
    one.write(torch.randn(1, sizes.rank), torch.randn(1, sizes.rotated), torch.tensor([-1]))
    torch.testing.assert_close(cache, before, equal_nan=True, rtol=0, atol=0)
    q, turning = torch.randn(4, H, sizes.unrotated), torch.randn(4, H, sizes.rotated)
    found = one.absorbed(q, turning, table, torch.tensor(lengths))
    due = one.expanded(torch.cat((q, turning), -1), table, lengths, torch.arange(5, dtype=torch.int32))
    assert found.shape == due.shape == (4, H, sizes.value_dim)
    torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-5)


def test_the_cache_has_one_latent_a_token(peers) -> None:
    llm = LLM(peers("deepseek_v3, yarn").folder, dtype="bf16", block_size=SIZE, **ROOM)
    plane = llm.caches.pages.planes["latents"]
    # 14 of a latent and 6 of the key that rotates, whatever the number of heads
    assert (tuple(plane.shape), plane.dtype) == ((600, 3, SIZE, 20), torch.bfloat16)
    assert llm.caches.nbytes == 600 * 3 * SIZE * 20 * 2
    assert "600 blocks of 8 tokens, 4,800 in all: 600 x 3 x 8 x 20 x 2 bytes of latents = 576 kB" in str(llm.caches)


def test_bytes_of_deepseek_v3() -> None:
    """The paper's: 61 layers x (512 + 64) numbers."""
    values = {
        "model_type": "deepseek_v3", "vocab_size": 9, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "intermediate_size": 9, "max_position_embeddings": 4096, "first_k_dense_replace": 61,
    }  # fmt: skip
    (spec,) = LatentMixer(config_of(values, "here"), tuple(range(61)), EngineConfig()).specs()
    assert spec.block_bytes(16, torch.bfloat16) == 16 * 61 * 576 * 2
    assert math.prod(spec.shape) == 61 * 16 * 576


@pytest.mark.parametrize(
    ("settings", "due"),
    [
        ({"deterministic": True}, "deterministic is True and the model has latent layers"),
        ({"kv_dtype": "fp8"}, 'kv_dtype is "fp8" and the model has latent layers'),
        (
            {"approximate": LokiLayers([Loki.fit(torch.randn(50, 2, 8))] * 3)},
            "approximate is given and the model has latent layers",
        ),
        ({"state_dtype": "bf16"}, 'state_dtype is "bf16" and no layer of the model has a state'),
    ],
)
def test_what_does_not_go_with_latents(settings: dict, due: str, peers) -> None:
    with pytest.raises(Unsupported, match=due) as refused:
        LLM(peers("deepseek_v3, dense").folder, **ROOM | settings)
    assert "\n" not in str(refused.value)


def test_steps_are_run_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of three lengths, and single tokens."""
    config, read, run = config_of(CONFIGS["deepseek_v3, yarn"]().to_dict(), "here"), [], LatentStep.__call__
    monkeypatch.setattr(LatentStep, "__call__", lambda self, layer, q, *more: read.append(len(q)) or run(self, layer, q, *more))
    found = warm_up.jobs(config, torch.float32, torch.device("cpu"), size=8, kv_dtype=torch.float32, longest=100)
    with torch.inference_mode():
        for job in found:
            job()
    assert sorted(read) == sorted([100, trial.USUAL, trial.SHORT, trial.ROWS, trial.ROWS])
