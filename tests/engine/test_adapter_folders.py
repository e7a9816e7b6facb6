"""Folders of adapters: what is read, and what is refused by name before anything has changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rooftile.cli.engine_flags import checked
from rooftile.engine import LLM
from rooftile.engine.adapters.names import adapters_of
from rooftile.engine.adapters.peft_config import PeftConfig
from rooftile.errors import InvalidInput, Unsupported
from tests.engine.asking import ROOM
from tests.engine.made_adapters import write_adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj"
Change = Callable[[dict[str, Any], dict[str, Any]], None]


@pytest.fixture(scope="module")
def llm(peers) -> LLM:
    return LLM(peers("llama").folder, max_adapters=2, **ROOM)


def said(**values: object) -> Change:
    return lambda config, _: config.update(values)


def renamed(old: str, new: str) -> Change:
    def change(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def put(name: str, tensor: torch.Tensor) -> Change:
    return lambda _, tensors: tensors.update({name: tensor})


REFUSED: dict[str, tuple[Change, type[Exception], str]] = {
    "DoRA": (said(use_dora=True), Unsupported, "has use_dora True; DoRA, which scales the rows of the merged weight"),
    "modules": (said(modules_to_save=["lm_head"]), Unsupported, r"has modules_to_save \['lm_head'\]; whole modules cannot"),
    "bias": (said(bias="lora_only"), Unsupported, "has bias 'lora_only'; biases cannot change with a request: merge it"),
    "tokens": (said(trainable_token_indices=[1]), Unsupported, r"has trainable_token_indices \[1\]; embeddings cannot change"),
    "experts": (said(target_parameters=["w"]), Unsupported, r"has target_parameters \['w'\]; adapters of bare parameters"),
    "pissa": (said(init_lora_weights="pissa_niter_4"), Unsupported, "has init_lora_weights 'pissa_niter_4'; it changes the base"),
    "another kind": (said(peft_type="IA3"), Unsupported, "has peft_type 'IA3'; has \"LORA\""),
    "a rank of 0": (said(r=0), InvalidInput, r"has a rank of 0 \(r\); must be a whole number from 1 to 256"),
    "a large rank": (said(r=257), InvalidInput, r"has a rank of 257 \(r\); must be"),
    "alpha": (said(lora_alpha=float("nan")), InvalidInput, r"has an alpha of nan \(lora_alpha\); must be a number"),
    "a slow pattern": (said(alpha_pattern={"(a*)*b": 1}), Unsupported, "in alpha_pattern; regular expressions are not read"),
    "no object": (said(rank_pattern=[1]), InvalidInput, r"has rank_pattern \[1\]; must be an object"),
    "no room": (said(r=17), InvalidInput, "has a rank of 17, and there is room for 16: make max_adapter_rank larger"),
    "another rank": (said(r=9), InvalidInput, r"is \(4, 40\); this model and a rank of 9 .* need \(9, 40\)"),
    "a wider base": (put(f"{Q}.lora_A.weight", torch.zeros(4, 48)), InvalidInput, r"is \(4, 48\); this model and a rank of 4"),
    "a taller base": (put(f"{Q}.lora_B.weight", torch.zeros(64, 4)), InvalidInput, r"lora_B.weight in .* is \(64, 4\)"),
    "integers": (put(f"{Q}.lora_A.weight", torch.zeros(4, 40).long()), InvalidInput, "is I64; must be one of F64, F32, BF16"),
    "NaN": (put(f"{Q}.lora_A.weight", torch.full((4, 40), torch.nan)), InvalidInput, "has NaN or infinity; train the adapter"),
    "overflow": (
        put(f"{Q}.lora_B.weight", torch.full((40, 4), 1e300, dtype=torch.float64)), InvalidInput, "numbers that fp32, the mod",
    ),
    "a terminal's words": (
        renamed("self_attn.q_proj", "a\n\x1b[31mb"), InvalidInput, r"part for 'model.layers.0.a\\n\\x1b\[31mb', and",
    ),
    "half": (renamed("layers.0.self_attn.q_proj.lora_B", "layers.1.self_attn.v_proj.lora_B"), InvalidInput, "and no lora_"),
    "more layers": (renamed("layers.1.", "layers.7."), InvalidInput, r"part for model.layers.7.self_attn.q_proj, and"),
    "another module": (renamed("self_attn.q_proj", "mixer.in_proj"), InvalidInput, "part for model.layers.0.mixer.in_proj, and"),
    "a magnitude": (put(f"{Q}.lora_magnitude_vector", torch.ones(4)), Unsupported, "lora_magnitude_vector; DoRA, which"),
    "embeddings": (put("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4)), Unsupported, "embeddings cannot"),
    "a head": (put("base_model.model.lm_head.lora_A.weight", torch.ones(4, 40)), Unsupported, "the output head cannot change"),
    "other names": (put("q.lora_up.weight", torch.ones(4)), InvalidInput, "has q.lora_up.weight, which is no part of an adapter"),
    "twice": (
        lambda _, t: t.update({name.replace("model.model.l", "model.l"): x.clone() for name, x in t.items()}), InvalidInput,
        "has two parts for one module, under two names",
    ),
    "nothing": (lambda _, tensors: tensors.clear(), InvalidInput, "has no tensors; save the adapter again"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_by_name(case: str, llm: LLM, peers, tmp_path: Path) -> None:
    change, kind, sentence = REFUSED[case]
    write_adapter(tmp_path, peers("llama").model, ("q_proj",), 4)
    config, tensors = (
        json.loads((tmp_path / "adapter_config.json").read_text()),
        load_file(tmp_path / "adapter_model.safetensors"),
    )
    change(config, tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(kind, match=sentence) as raised:
        llm.load_adapter("hostile", tmp_path)
    assert str(tmp_path) in str(raised.value)
    assert llm.adapters == {}
    assert not any(beside.matrices.ranks.any() for beside in llm.engine.runner.adapters._beside)


def test_files_that_are_missing_broken_or_pickles(llm: LLM, peers, tmp_path: Path) -> None:
    folder, file = tmp_path / "it", tmp_path / "it" / "adapter_model.safetensors"
    with pytest.raises(InvalidInput, match="is not a folder; give one of an adapter"):
        llm.load_adapter("it", folder)
    folder.mkdir()
    with pytest.raises(InvalidInput, match=r"has no adapter_config.json; give the folder"):
        llm.load_adapter("it", folder)
    write_adapter(folder, peers("llama").model, ("q_proj",), 4)
    whole = file.read_bytes()
    for broken in (b"", whole[:50], whole[:-9], b"\xff" * 99):
        file.write_bytes(broken)
        with pytest.raises(InvalidInput, match=r"adapter_model.safetensors cannot be read: .*; save the adapter again"):
            llm.load_adapter("it", folder)
    file.unlink()
    with pytest.raises(InvalidInput, match=r"has no adapter_model.safetensors; give"):
        llm.load_adapter("it", folder)
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/never'\ntR.")
    with pytest.raises(InvalidInput, match=r"has adapter_model.bin, a pickle, which can run any code; only safetensors are read"):
        llm.load_adapter("it", folder)
    assert llm.adapters == {}


def test_names_and_slots(llm: LLM, peers, tmp_path: Path) -> None:
    write_adapter(tmp_path, peers("llama").model, ("q_proj",), 4)
    for name in ("", "a\nb", "x" * 129, 7):
        with pytest.raises(InvalidInput, match=r"the adapter's name is .*; must be 1 to 128 characters"):
            llm.load_adapter(name, tmp_path)
    llm.load_adapter("a", tmp_path)
    with pytest.raises(InvalidInput, match="an adapter 'a' is loaded already; unload it first"):
        llm.load_adapter("a", tmp_path)
    llm.load_adapter("b", tmp_path)
    with pytest.raises(InvalidInput, match="all 2 slots for adapters are taken: unload one, or make max_adapters larger"):
        llm.load_adapter("c", tmp_path)
    assert llm.adapters == {"a": tmp_path, "b": tmp_path}
    for name in ("a", "b"):
        llm.unload_adapter(name)
    with pytest.raises(InvalidInput, match="the adapter is 'a'; has no adapter"):
        llm.unload_adapter("a")
    for wrong, sentence in ((["a"], "there are 1 adapters for 2 prompts"), (7, "adapter is 7; must be the name")):
        with pytest.raises(InvalidInput, match=sentence):
            llm.generate([[1], [2]], adapter=wrong)
    with pytest.raises(InvalidInput, match="the engine has no room for adapters: give max_adapters"):
        LLM(peers("llama").folder, **ROOM).load_adapter("a", tmp_path)


def test_settings(peers, tmp_path: Path) -> None:
    write_adapter(tmp_path, peers("llama").model, ("q_proj",), 4)
    assert checked({"adapters": [f"a={tmp_path}"]}) == {"adapters": [f"a={tmp_path}"]}
    assert adapters_of([f"a={tmp_path}"]) == adapters_of({"a": str(tmp_path)}) == {"a": tmp_path}
    asked = {"adapters": {"a": tmp_path}}
    for wrong, kind, sentence in (
        (asked | {"max_adapters": 0}, InvalidInput, "max_adapters is 0; must be a whole number of at least 1"),
        (
            {"adapters": {"a": tmp_path, "b": tmp_path}, "max_adapters": 1},
            InvalidInput,
            "2 adapters are given, and max_ad",
        ),
        ({"adapters": ["a"]}, InvalidInput, "must be a dictionary {name: folder}, or words name=folder"),
        ({"adapters": {"a": tmp_path / "none"}}, InvalidInput, "for 'a', which is no folder"),
        ({"max_adapter_rank": 8}, InvalidInput, "max_adapter_rank is given and no adapters"),
        (
            asked | {"deterministic": True},
            Unsupported,
            "adapters are asked for, and deterministic is True; has no",
        ),
    ):
        with pytest.raises(kind, match=sentence):
            LLM(peers("llama").folder, **ROOM | wrong)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "use_dora": True}))
    with pytest.raises(Unsupported, match="has use_dora True"):
        LLM(peers("llama").folder, **ROOM, **asked)
    with pytest.raises(Unsupported, match="latent attention, which folds projections together"):
        LLM(peers("deepseek_v3").folder, **ROOM, max_adapters=1)


def test_scales_follow_patterns(tmp_path: Path) -> None:
    written = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": {"v_proj": 16, "^model.layers.1.self_attn.k_proj": 2},
        "alpha_pattern": {"layers.0.self_attn.v_proj": 1},
    }  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(written))
    config = PeftConfig.of(tmp_path)
    found = {
        f"{n}.{name}": config.scale_of(f"model.layers.{n}.self_attn.{name}_proj") for n in range(2) for name in ("q", "k", "v")
    }
    assert found == {"0.q": 2.0, "0.k": 2.0, "0.v": 1 / 16, "1.q": 2.0, "1.k": 4.0, "1.v": 0.5}
    (tmp_path / "adapter_config.json").write_text(json.dumps(written | {"use_rslora": True}))
    assert PeftConfig.of(tmp_path).scale_of("model.layers.1.self_attn.v_proj") == 2.0
