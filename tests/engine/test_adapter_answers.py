"""Answers with adapters are those of models into which the adapters were merged, in fp32, whatever is answered beside them."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from rooftile.engine import LLM, RequestOutput, SamplingParams
from rooftile.engine.adapters.groups import group_rows
from rooftile.errors import InvalidInput
from rooftile.models import Decoder
from tests.engine.asking import GREEDY, ROOM, assert_clean, prompts, tokens_of
from tests.engine.made_adapters import merged, write_adapter

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# the projections of families, in one piece or in parts
TARGETS = {"llama": ALL, "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), "gpt2": ("c_attn", "c_fc")}
SETTINGS = {
    "together": ROOM,
    "in chunks": ROOM | {"max_batched_tokens": 13},
    "preempted": {"max_model_len": 96, "num_blocks": 14},
}  # fmt: skip


class Adapted:
    """A model, three adapters of different ranks and targets, and the answers of the models that they are merged into."""

    def __init__(self, peer, name: str, folder: Path) -> None:
        targets = TARGETS[name]
        model = peer.model
        added = {
            "all": write_adapter(folder / "all", model, targets, 5, seed=1),
            "two": write_adapter(folder / "two", model, targets[1:3], 16, seed=2, rooted=True, alpha=8),
            "few": write_adapter(folder / "few", model, targets[:2], 40, seed=3, ranks={targets[0]: 3}, alphas={targets[1]: 7}),
        }
        self.base = peer.folder
        self.folders = {each: folder / each for each in added}
        self.merged = {each: merged(model, delta, folder / f"merged {each}") for each, delta in added.items()}
        self._due: dict[str | None, LLM] = {}

    def due(self, asked: list[list[int]], adapter: str | None) -> list[list[int]]:
        if adapter not in self._due:
            self._due[adapter] = LLM(self.base if adapter is None else self.merged[adapter], **ROOM)
        return [tokens for (tokens,) in tokens_of(self._due[adapter], asked, GREEDY)]


def answered(outputs: list[RequestOutput]) -> list[list[int]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def adapted(peers, tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Adapted] = {}

    def get(name: str) -> Adapted:
        if name not in made:
            made[name] = Adapted(peers(name), name, tmp_path_factory.mktemp("adapters"))
        return made[name]

    return get


@pytest.mark.parametrize(
    ("name", "how"), [("llama", "together"), ("llama", "preempted"), ("phi3", "in chunks"), ("gpt2", "in chunks")]
)
def test_a_mixed_batch_is_answered_as_merged_models_answer(name: str, how: str, adapted) -> None:
    those = adapted(name)
    llm, asked = LLM(those.base, adapters=those.folders, **SETTINGS[how]), prompts(12)
    names = [(None, "all", "two", "few")[n % 4] for n in range(12)]
    found = answered(llm.generate(asked, GREEDY, adapter=names))
    for adapter in (None, *those.folders):
        mine = [n for n in range(12) if names[n] == adapter]
        due = those.due([asked[n] for n in mine], adapter)
        assert [found[n] for n in mine] == due
        if adapter is not None:
            assert due != those.due([asked[n] for n in mine], None), "the adapter changes nothing, so the test shows nothing"
    assert_clean(llm)
    if how == "preempted":
        assert llm.engine.scheduler.preemptions


def test_peft_merges_to_the_same_answers(adapted) -> None:
    peft = pytest.importorskip("peft")
    those = adapted("llama")
    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(those.base), those.folders["few"])
    folder = those.base.parent / "by peft"
    model.merge_and_unload().save_pretrained(folder)
    asked = prompts(4)
    assert tokens_of(LLM(folder, **ROOM), asked, GREEDY) == [[tokens] for tokens in those.due(asked, "few")]


def test_prefixes_are_shared_within_an_adapter_and_by_no_other(adapted) -> None:
    those = adapted("llama")
    llm, asked = LLM(those.base, adapters=those.folders, **ROOM), [list(range(1, 40))]
    names = [None, "all", "two"]
    for cached in (0, 32):
        for name in names:
            (output,) = llm.generate(asked, GREEDY, adapter=name)
            assert (output.num_cached_tokens, [output.outputs[0].token_ids]) == (cached, those.due(asked, name))
    # another adapter of the same name is another adapter
    llm.unload_adapter("two")
    llm.load_adapter("two", those.folders["few"])
    (output,) = llm.generate(asked, GREEDY, adapter="two")
    assert (output.num_cached_tokens, [output.outputs[0].token_ids]) == (0, those.due(asked, "few"))
    # nor does a salt that spells an adapter's
    salt = llm.engine.adapters.find("two").salt
    (output,) = llm.generate([{"prompt_token_ids": asked[0], "cache_salt": f"{salt}\0"}], GREEDY)
    assert output.num_cached_tokens in (0, 32)


def test_an_adapter_that_is_unloaded_answers_what_it_has_begun(adapted) -> None:
    those = adapted("llama")
    folder = those.folders["all"]
    llm, asked = LLM(those.base, adapters={"all": folder}, max_adapter_rank=40, **ROOM), prompts(3)
    stream = llm.stream(asked, GREEDY, adapter="all")
    place, output = next(stream)
    llm.unload_adapter("all")
    assert llm.adapters == {}
    # its slot is taken until it has answered
    with pytest.raises(InvalidInput, match="all 1 slots for adapters are taken, 1 of them by adapters that were unloaded"):
        llm.load_adapter("two", those.folders["two"])
    (refused,) = llm.generate(asked[:1], GREEDY, adapter="all")
    assert refused.error == "the adapter is 'all'; has no adapter"
    last = {place: output} | dict(stream)
    assert answered([last[n] for n in range(3)]) == those.due(asked, "all")
    llm.load_adapter("two", those.folders["two"])
    assert answered(llm.generate(asked, GREEDY, adapter="two")) == those.due(asked, "two")
    assert_clean(llm)


def test_samples_and_beams_have_their_adapter(adapted) -> None:
    those = adapted("llama")
    llm, asked = LLM(those.base, adapters=those.folders, **ROOM), prompts(3)
    for params in (
        SamplingParams(n=3, temperature=0.8, seed=5, max_tokens=9, ignore_eos=True),
        SamplingParams(beam_width=3, n=3, temperature=0, max_tokens=9, ignore_eos=True),
    ):  # fmt: skip
        found = llm.generate(asked, params, adapter=["few", None, "few"])
        for place, adapter in enumerate(("few", None, "few")):
            due = LLM(those.base if adapter is None else those.merged[adapter], **ROOM).generate(asked[place], params)[0]
            assert [each.token_ids for each in found[place].outputs] == [each.token_ids for each in due.outputs]


@pytest.mark.parametrize("weights", ["int4:row", "fp8", "int8"])
def test_a_projection_in_few_bits_is_the_quantised_product_and_the_adapter(weights: str, adapted) -> None:
    those = adapted("llama")
    llm = LLM(those.base, adapters={"few": those.folders["few"]}, weights=weights, **ROOM)
    slots = llm.engine.runner.adapters
    layer = llm.engine.runner.decoder.layers[1]
    with safe_open(those.folders["few"] / "adapter_model.safetensors", "pt") as file:
        a, b = (file.get_tensor(f"base_model.model.model.layers.1.self_attn.k_proj.lora_{side}.weight") for side in "AB")
    x = torch.randn(5, layer.qkv.inputs)
    with torch.inference_mode():
        plain = layer.qkv(x)
        with slots.reading(group_rows(torch.tensor([-1, 0, -1, 0, 0]))):
            found = layer.qkv(x)
    q = layer.queries * llm.engine.runner.decoder.config.head_dim
    due = plain.double()
    due[[1, 3, 4], q : q + len(b)] += (x.double() @ a.double().T @ b.double().T)[[1, 3, 4]] * 7 / 40
    # q_proj has rank 3 there
    torch.testing.assert_close(found[:, q:].double(), due[:, q:], rtol=1e-5, atol=1e-5)
    assert torch.equal(found[[0, 2]], plain[[0, 2]])
    assert not torch.equal(found[1, :q], plain[1, :q])
    # and the whole engine runs with it
    assert answered(llm.generate(prompts(4), GREEDY, adapter=["few", None] * 2))


def test_a_decoder_has_one_engine_with_adapters_at_a_time(adapted) -> None:
    those = adapted("llama")
    decoder = Decoder.from_folder(those.base)
    llm = LLM(decoder, max_adapters=1, **ROOM)
    with pytest.raises(InvalidInput, match="the decoder has the adapters of another LLM, which still uses it"):
        LLM(decoder, max_adapters=1, **ROOM)
    del llm
    gc.collect()
    assert all(projection.adapters is None for layer in decoder.layers for projection in layer.projections)
    LLM(decoder, max_adapters=1, **ROOM)
