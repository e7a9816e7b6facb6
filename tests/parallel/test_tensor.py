"""Models that ranks share: each holds and reads its part of the weights, and all compute what one process does."""

from pathlib import Path

import pytest
import torch
import transformers

from rooftile.errors import InvalidInput
from rooftile.models import Decoder, ModelConfig
from rooftile.models.placement import Placement
from tests.parallel import tensor_cases as cases
from tests.parallel.processes import run_on


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_compute_what_one_process_does(ranks, saved):
    """From the same files, of which each rank reads the bytes that it holds; modules that are quantised are read whole."""
    folders = {name: str(cases.save(name, saved)) for name in cases.CASES[ranks]}
    each, alone = run_on(ranks, cases.shared, ranks, folders), cases.shared(0, 1, folders)
    wrong = []
    for name, due in alone.items():
        for rank, found in enumerate(each):
            one = found[name]
            off = max(_off(one.hidden, due.hidden), _off(one.logits, due.logits))
            if not off <= (2e-5 if cases.QUANTISED.get(name, True) else 0.25):
                wrong.append(f"{name}, rank {rank}: {off}")
            if name.removeprefix(cases.DEALT) not in cases.QUANTISED and one.read != one.held:
                wrong.append(f"{name}, rank {rank}: {one.read} bytes were read, and {one.held} are held")
            if cases.weights_of(name) != "auto" and one.read > 0.65 * due.read:
                wrong.append(f"{name}, rank {rank}: {one.read} bytes were read of {due.read}")
            if name in cases.SERVED and ranks == 2 and one.answers != due.answers:
                wrong.append(f"{name}, rank {rank}: answers are {one.answers}, due {due.answers}")
    assert not wrong, "\n".join(wrong)


def _off(found: torch.Tensor, due: torch.Tensor) -> float:
    return float((found - due).abs().max() / due.abs().max())


def test_random_weights_are_those_of_one_rank(saved):
    """A part of each table, and of each layer's projections, experts and decays, from the same seed."""
    names = ("gpt2", "gpt2, untied, unscaled", "granitemoehybrid, rope, groups", "mamba, untied, biases", "deepseek_v3")
    for name in names:
        config = ModelConfig.from_folder(cases.save(name, saved))
        alone = Decoder.random(config, torch.float32, "cpu", 3)
        parts = [Decoder.random(config, seed=3, placement=_rank(rank, 2)) for rank in range(2)]
        for (label, whole), *held in zip(alone.tensors(), *(part.tensors() for part in parts), strict=True):
            sizes = [{*x.shape} for _, x in held]
            numbers = torch.cat([x.flatten() for _, x in held]) if held[0][1].shape != whole.shape else held[0][1].flatten()
            assert numbers.sort()[0].equal(whole.flatten().sort()[0]), (name, label, sizes)
        if config.experts is not None:
            dealt = Decoder.random(config, seed=3, placement=_rank(1, 2)._replace(deal_experts=True))
            layer, whole = (next(one for one in each.layers if hasattr(one.feed_forward, "centroids")) for each in (dealt, alone))
            assert layer.feed_forward.down.equal(whole.feed_forward.down[config.experts.experts // 2 :])
        assert torch.equal(parts[0].head, alone.head[:56])
        assert torch.equal(parts[1].head, alone.head[56:])


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("gptq, act-order", r"o_proj\.weight has sorted columns \(act-order\), and is cut along them; give the model to fewer"),
        ("fp8, tiles", r"q_proj\.weight is cut at rows 0 to 32, of which 128 share a scale; give the model to fewer ranks"),
    ],
)
def test_a_cut_through_what_lies_together_is_refused(kind, sentence, tmp_path):
    cases.quantised.quantised(kind, tmp_path)
    with pytest.raises(InvalidInput, match=sentence):
        Decoder.from_folder(tmp_path, placement=_rank(0, 2))


def _rank(rank: int, ranks: int) -> Placement:
    """A rank that computes nothing."""
    return Placement(torch.float32, torch.device("cpu"), rank, ranks)


SMALL = cases.checkpoints.SMALL


@pytest.mark.parametrize(
    ("config", "ranks", "sentence"),
    [
        (
            transformers.LlamaConfig(**SMALL | {"num_attention_heads": 5, "num_key_value_heads": 5}), 2,
            "2 ranks are to share the model, which has 5 heads of attention; give it to 1$",
        ),
        (
            transformers.LlamaConfig(**SMALL | {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6}), 4,
            "which has 6 heads of keys and values; give it to 1 or 2 or 3 or 6 or 12$",
        ),
        (transformers.LlamaConfig(**SMALL | {"intermediate_size": 46}), 4, "which has 46 columns in its feed-forwards"),
        (transformers.MixtralConfig(**SMALL | {"intermediate_size": 46}), 4, "which has 46 columns in each expert"),
        (transformers.MixtralConfig(**SMALL, num_local_experts=5), -4, "which has 5 experts; give it to 1$"),
        (transformers.MambaConfig(**cases.recurrent.MAMBA), 3, "which has 80 channels of Mamba"),
        (transformers.Mamba2Config(**cases.recurrent.MAMBA2), 3, "which has 8 heads of Mamba-2"),
        (transformers.Qwen3NextConfig(**cases.DELTA | {"linear_num_key_heads": 2}), 4, "2 heads of keys in its delta nets"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_a_file_is_opened(config, ranks, sentence, tmp_path):
    """Below 0 is a number of ranks that are to hold whole experts."""
    config.save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match=sentence):
        Decoder.from_folder(tmp_path, placement=_rank(0, abs(ranks))._replace(deal_experts=ranks < 0))


def test_a_placement_contradicts_nothing(saved):
    folder = cases.save("llama, tied", saved)
    for given in ({"dtype": "bf16"}, {"device": "meta"}):
        with pytest.raises(InvalidInput, match=r"and the placement has torch\.float32 on cpu; give the placement alone"):
            Decoder.from_folder(folder, placement=_rank(1, 2), **given)
    with pytest.raises(InvalidInput, match="the rank is 2 of 2 ranks; must be from 0 to 1"):
        Decoder.from_folder(folder, placement=_rank(2, 2))
    with pytest.raises(InvalidInput, match="dtype is None and no placement is given"):
        Decoder(ModelConfig.from_folder(folder))
