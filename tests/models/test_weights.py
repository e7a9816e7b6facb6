"""Checkpoints that are whole are loaded in one piece of memory; others are refused in a sentence, before anything is loaded."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rooftile import InvalidInput
from rooftile.models import Decoder, ModelConfig
from rooftile.models.checkpoints import weights
from rooftile.weights.files.folder import files_of
from tests.models.checkpoints import assert_same, logits_of_ours, logits_of_theirs, prompts, saved, theirs

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints that tests copy."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in ("llama", "llama, tied", "gpt2"):
        saved(theirs(name), folder / name)
    saved(theirs("llama"), folder / "shards", max_shard_size="20KB")
    return folder


def copied(checkpoints: Path, name: str, target: Path) -> Path:
    return Path(shutil.copytree(checkpoints / name, target, dirs_exist_ok=True))


def changed(folder: Path, change: Any) -> Path:
    """The folder, with its tensors changed."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def refused(folder: Path, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence) as error:
        Decoder.from_folder(folder)
    assert len(str(error.value)) < 400


def test_what_nobody_needs_is_ignored(checkpoints: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.rotary_emb.inv_freq"] = torch.ones(5)
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(5)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    decoder = Decoder.from_folder(changed(copied(checkpoints, "llama, tied", tmp_path), change))
    assert_same(logits_of_ours(decoder, prompts()), logits_of_theirs(theirs("llama, tied"), prompts()))


def test_a_weight_may_not_be_there_twice(checkpoints: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["norm.weight"] = tensors["model.norm.weight"] + 1

    folder = changed(copied(checkpoints, "llama", tmp_path), change)
    refused(folder, r"the checkpoint has both (model\.)?norm.weight and (model\.)?norm.weight, for one weight; remove one of")


def test_weights_that_may_not_be_read(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, opened = copied(checkpoints, "llama", tmp_path), Path.open

    def denied(self: Path, *given: Any, **named: Any) -> Any:
        if self.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied")
        return opened(self, *given, **named)

    monkeypatch.setattr(Path, "open", denied)
    refused(folder, r"model.safetensors cannot be read: Permission denied; let this user read it")


def test_rotary_positions_are_those_that_will_be_read(checkpoints: Path, tmp_path: Path) -> None:
    """A checkpoint that allows 16 million positions costs no memory for those beyond the longest sequence."""
    folder = copied(checkpoints, "llama", tmp_path)
    whole = Decoder.from_folder(folder)
    settings = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 1 << 24}
    (folder / "config.json").write_text(json.dumps(settings))
    cut = Decoder.from_folder(folder, max_len=70)
    assert whole.rotary is not None
    assert cut.rotary is not None
    assert torch.equal(cut.rotary, whole.rotary[:70])
    assert_same(logits_of_ours(cut, prompts()), logits_of_ours(whole, prompts()))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_prefix_may_be_missing(name: str, checkpoints: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for key in list(tensors):
            tensors[key.removeprefix("transformer.").removeprefix("model.")] = tensors.pop(key)
        if name == "gpt2":
            tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
            tensors["h.0.attn.masked_bias"] = torch.ones(())

    decoder = Decoder.from_folder(changed(copied(checkpoints, name, tmp_path), change))
    assert_same(logits_of_ours(decoder, prompts()), logits_of_theirs(theirs(name), prompts()))


def test_a_tied_embedding_may_be_saved_under_the_name_of_the_head(checkpoints: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")

    decoder = Decoder.from_folder(changed(copied(checkpoints, "gpt2", tmp_path), change))
    assert_same(logits_of_ours(decoder, prompts()), logits_of_theirs(theirs("gpt2"), prompts()))


def test_a_tied_head_of_its_own_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    folder = changed(copied(checkpoints, "llama, tied", tmp_path), change)
    refused(folder, "lm_head.weight differs from model.embed_tokens.weight, to which config.json ties it; if the head")


def test_missing_tensors(checkpoints: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            del tensors[f"model.layers.1.self_attn.{name}.weight"]

    names = r"layers.1.self_attn.q_proj.weight, \S+k_proj.weight, \S+v_proj.weight and 1 more"
    refused(changed(copied(checkpoints, "llama", tmp_path), change), f"lacks {names}; its config.json asks for them")


def test_an_untied_head_must_be_there(checkpoints: Path, tmp_path: Path) -> None:
    folder = changed(copied(checkpoints, "llama", tmp_path), lambda tensors: tensors.pop("lm_head.weight"))
    refused(folder, "the checkpoint lacks lm_head.weight; its config.json asks")


def test_unexpected_tensors(checkpoints: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(10)
        tensors["model.layers.3.input_layernorm.weight"] = torch.ones(40)

    names = "model.layers.0.self_attn.q_norm.weight, model.layers.3.input_layernorm.weight"
    refused(changed(copied(checkpoints, "llama", tmp_path), change), f"has {names}, which its config.json has no place for")


def test_wrong_shapes(checkpoints: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        name = "model.layers.0.mlp.down_proj.weight"
        tensors[name] = tensors[name].T.contiguous()

    sentence = r"shapes differ from its config.json: model.layers.0.mlp.down_proj.weight \(48, 40\), due \(40, 48\)"
    refused(changed(copied(checkpoints, "llama", tmp_path), change), sentence)


def test_integers_for_weights(checkpoints: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = torch.ones(40, dtype=torch.int8)

    folder = changed(copied(checkpoints, "llama", tmp_path), change)
    refused(folder, "has model.norm.weight I8; must be bfloat16, float16 or float32, not quantised")


def test_files(checkpoints: Path, tmp_path: Path) -> None:
    folder = copied(checkpoints, "llama", tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    refused(folder, r"model.safetensors is not a complete safetensors file \(.*\); download it again")
    (folder / "model.safetensors").unlink()
    refused(folder, "has neither model.safetensors nor model.safetensors.index.json; give the folder of a Hugging Face")
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(
        folder,
        r"has pytorch_model.bin, a pickle, which can run any code; only safetensors .* convert it .*save_pretrained",
    )


def test_shards_that_are_not_all_there(checkpoints: Path, tmp_path: Path) -> None:
    folder = copied(checkpoints, "shards", tmp_path)
    first, *_ = sorted(folder.glob("model-*.safetensors"))
    first.unlink()
    refused(folder, f"lacks {first.name}, which model.safetensors.index.json names; download it again")
    (folder / "model.safetensors.index.json").write_text("{}")
    refused(folder, "model.safetensors.index.json has no weight_map of files beside it; download it again")
    (folder / "model.safetensors.index.json").write_text("")
    refused(folder, "model.safetensors.index.json is not JSON")


def test_an_index_that_leaves_its_folder_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    folder = copied(checkpoints, "llama", tmp_path / "inside")
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "has no weight_map of files beside it; download it again")


def test_a_dtype_is_a_dtype_of_weights(checkpoints: Path) -> None:
    for dtype in ("int8", torch.int8):
        with pytest.raises(InvalidInput, match=r"dtype is '(torch\.)?int8'; must be one of auto, bf16 \(bfloat16\), fp16"):
            Decoder.from_folder(checkpoints / "llama", dtype=dtype)


@pytest.mark.parametrize("more", [{"vocab_size": 1 << 30}, {"num_hidden_layers": 1000}, {"intermediate_size": 1 << 32}], ids=str)
def test_no_memory_is_asked_for_what_the_checkpoint_has_not(more: dict[str, int], checkpoints: Path, tmp_path: Path) -> None:
    folder = copied(checkpoints, "llama", tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | more))
    with Allocations() as made, pytest.raises(InvalidInput, match="checkpoint"):
        Decoder.from_folder(folder)
    assert made.largest < 1 << 20


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that operations make in memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        owned = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        if isinstance(result, Tensor) and result.device.type != "meta" and result.untyped_storage().data_ptr() not in owned:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("name", ["llama", "gpt2", "shards"])
def test_loading_needs_no_second_model_in_memory(name: str, checkpoints: Path) -> None:
    decoder = Decoder(ModelConfig.from_folder(checkpoints / name), dtype=torch.bfloat16)
    files = files_of(checkpoints / name)
    with Allocations() as made:
        weights.load(decoder.config, decoder.tensors(), files)
    biggest = max(weight.numel() for weight in decoder.parameters())
    assert made.largest <= biggest * torch.float32.itemsize
    assert not any(weight.isnan().any() for weight in decoder.parameters())


def test_nothing_is_loaded_of_a_checkpoint_that_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    folder = changed(copied(checkpoints, "llama", tmp_path), lambda tensors: tensors.pop("model.norm.weight"))
    decoder = Decoder(ModelConfig.from_folder(folder), dtype=torch.float32)
    with pytest.raises(InvalidInput, match=r"lacks norm.weight"):
        weights.load(decoder.config, decoder.tensors(), files_of(folder))
    assert all(weight.isnan().all() for weight in decoder.parameters())


def test_without_safetensors(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refused(checkpoints / "llama", r"needs the package safetensors, which is not installed; pip install safetensors")
