"""Models that read images: tokens of a text are Transformers', what reads images is skipped, and images are refused."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rooftile import InvalidInput
from rooftile.engine import LLM
from rooftile.errors import Unsupported
from rooftile.models import Decoder, ModelConfig
from rooftile.models.checkpoints.write import quantise_folder
from rooftile.models.wrappers import WRAPPERS
from tests.engine.asking import GREEDY, ROOM, TOKENS, prompts, tokens_of
from tests.grids import swept
from tests.models.checkpoints import saved, theirs
from tests.models.wrappers import CONFIGS

SIZE = 8
SETTINGS = {"in chunks": ROOM | {"max_batched_tokens": 13}, "together": ROOM}


def changed_config(folder: Path, change: object) -> None:
    settings = json.loads((folder / "config.json").read_text())
    change(settings)
    (folder / "config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(("name", "how"), swept(product(CONFIGS, SETTINGS), lambda case: case))
def test_greedy_tokens_are_those_of_transformers(name: str, how: str, peers) -> None:
    peer, asked = peers(name), prompts(6)
    llm = LLM(peer.folder, block_size=SIZE, **SETTINGS[how])
    due = peer.greedy(asked, TOKENS)
    assert tokens_of(llm, asked, GREEDY) == [[row] for row in due]
    assert max(len(set(row)) for row in due) > 5
    assert llm.engine.runner.decoder.config.wrapper == name.partition(",")[0]


def test_every_wrapper_has_a_peer() -> None:
    assert {name.partition(",")[0] for name in CONFIGS} == set(WRAPPERS)


def renamed(folder: Path, *words: tuple[str, str]) -> None:
    """Gives the tensors of a folder other names, as other versions of Transformers wrote them."""
    stored = {}
    for name, x in load_file(folder / "model.safetensors").items():
        for old, new in words:
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        stored[name] = x
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gemma3", [("language_model.model.", "model.language_model."), ("vision_tower.", "model.vision_tower."),
                    ("multi_modal_projector.", "model.multi_modal_projector.")]),
        ("qwen2_vl", [("model.", "model.language_model."), ("visual.", "model.visual.")]),
        ("llava", [("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head.")]),
    ],
)  # fmt: skip
def test_names_of_other_versions(name: str, words: list[tuple[str, str]], peers, tmp_path: Path) -> None:
    saved(peers(name).model, tmp_path)
    renamed(tmp_path, *words)
    asked = prompts(3)
    assert tokens_of(LLM(tmp_path, **ROOM), asked, GREEDY) == [[row] for row in peers(name).greedy(asked, TOKENS)]


def test_a_second_predictor_is_skipped(peers, tmp_path: Path) -> None:
    saved(peers("qwen3_5").model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored |= {"mtp.fc.weight": torch.zeros(40, 80), "mtp.layers.0.mlp.up_proj.weight": torch.zeros(48, 40)}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    Decoder.from_folder(tmp_path)


def test_experts_in_one_tensor_are_those_of_many(peers, tmp_path: Path) -> None:
    """Qwen3.5's own files have all experts in one tensor, as Transformers has them in memory."""
    due = {name: x.clone() for name, x in Decoder.from_folder(peers("qwen3_5_moe").folder).tensors()}
    model = saved(peers("qwen3_5_moe").model, tmp_path)
    stored = load_file(model / "model.safetensors")
    for n in range(4):
        module = f"model.language_model.layers.{n}.mlp.experts"
        each = [{part: stored.pop(f"{module}.{e}.{part}_proj.weight") for part in ("gate", "up", "down")} for e in range(5)]
        stored[f"{module}.gate_up_proj"] = torch.stack([torch.cat((one["gate"], one["up"])) for one in each])
        stored[f"{module}.down_proj"] = torch.stack([one["down"] for one in each])
    save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
    found = dict(Decoder.from_folder(model).tensors())
    assert all(torch.equal(found[name], due[name]) for name in due)
    saved_turned = {name: x.mT.contiguous() if name.endswith(("gate_up_proj", "down_proj")) else x for name, x in stored.items()}
    save_file(saved_turned, model / "model.safetensors", metadata={"format": "pt"})
    found = dict(Decoder.from_folder(model).tensors())
    assert all(torch.equal(found[name], due[name]) for name in due)
    for strange in ((4, 40, 12), (40, 12)):
        stored["model.language_model.layers.2.mlp.experts.down_proj"] = torch.zeros(strange)
        save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
        sentence = f"experts.down_proj is {strange}; due are all experts, (5, 40, 12) or (5, 12, 40)"
        with pytest.raises(InvalidInput, match=re.escape(sentence)):
            Decoder.from_folder(model)


def test_images_are_refused(peers) -> None:
    llm = LLM(peers("qwen3_5").folder, **ROOM)
    (output,) = llm.generate([{"prompt_token_ids": [1, 2], "multi_modal_data": {"image": None}}], GREEDY)
    assert "has 'prompt_token_ids', 'multi_modal_data'; must have" in str(output.error)


def test_an_image_in_a_message_is_refused() -> None:
    from rooftile.engine.text.chat_template import text_of

    with pytest.raises(Unsupported, match="content has a part of type 'image_url'; a model reads text, and nothing is fetched"):
        text_of([{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": "x.png"}}])


def test_sizes_that_a_section_leaves_out() -> None:
    """Gemma 3's published folders name no vocabulary, and LLaVA's no sizes of a 7B Llama."""
    from rooftile.models.config import config_of

    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    said = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
            "torch_dtype": "bfloat16", "eos_token_id": [1, 106], "vision_config": {}}  # fmt: skip
    config = config_of(said, "here")
    assert (config.vocab_size, config.heads, config.kv_heads, config.head_dim, config.tie) == (262_208, 8, 4, 256, True)
    assert (config.dtype, config.eos_ids, config.windows[:6]) == (torch.bfloat16, (1, 106), (1024,) * 5 + (None,))
    text = {"max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 32064}
    said = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
    config = config_of(said, "here")
    assert (config.layers, config.hidden, config.ffn, config.vocab_size) == (32, 4096, 11_008, 32_064)


def test_an_older_folder_of_qwen_has_no_section(peers, tmp_path: Path) -> None:
    saved(peers("qwen2_5_vl").model, tmp_path)

    def flat(settings: dict) -> None:
        text = settings.pop("text_config")
        text.pop("model_type")
        settings |= {name: value for name, value in text.items() if name not in settings}
        settings["rope_scaling"] = settings.pop("rope_parameters") | {"type": "mrope", "rope_type": "mrope"}

    changed_config(tmp_path, flat)
    assert ModelConfig.from_folder(tmp_path) == ModelConfig.from_folder(peers("qwen2_5_vl").folder)


@pytest.mark.parametrize(
    ("change", "due"),
    [
        (lambda one: one.pop("text_config"), "has no text_config; a llava must have one, with the settings of its text model"),
        (lambda one: one.update(text_config=7), "has text_config 7; must be a JSON object"),
        (lambda one: one["text_config"].update(model_type="gemma"), "has model_type gemma; supported are the families llama, "),
        (lambda one: one["text_config"].update(hidden_size=-1), "has hidden_size -1; must be a whole number of at least 1"),
        (
            lambda one: one.update(architectures=["Idefics2ForConditionalGeneration"]),
            "Idefics2.*, and text parts of models that read images",
        ),
        (
            lambda one: one["text_config"].update(num_hidden_layers=5),
            r"the checkpoint lacks layers\.4\.",
        ),
    ],
)
def test_what_makes_no_sense_is_one_sentence(change: object, due: str, peers, tmp_path: Path) -> None:
    saved(peers("llava").model, tmp_path)
    changed_config(tmp_path, change)
    with pytest.raises(InvalidInput, match=due) as refused:
        Decoder.from_folder(tmp_path)
    assert "\n" not in str(refused.value)


def test_strange_tensors_are_named(tmp_path: Path) -> None:
    saved(theirs("qwen3_5"), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.audio.weight"] = torch.zeros(3)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=r"the checkpoint has model\.audio\.weight, which its config\.json has no place for"):
        Decoder.from_folder(tmp_path)


def test_projections_are_quantised_while_they_are_read(peers, tmp_path: Path) -> None:
    read = Decoder.from_folder(peers("qwen3_5").folder, weights={"*.linear_attn.out_proj": "int8"})
    assert [part.format for part in read.layers[0].o.parts] == ["int8"]
    with pytest.raises(InvalidInput, match="the checkpoint is a qwen3_5, whose text part is served, and no layout is written"):
        quantise_folder(peers("qwen3_5").folder, tmp_path / "out", "int8")
