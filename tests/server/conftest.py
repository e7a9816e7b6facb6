"""A tiny checkpoint with a tokenizer and a chat template, and a server for the tests that leave it as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from rooftile.engine import LLM
from tests.engine.folders import core, save
from tests.server.agents import agents_server
from tests.server.live import Server
from tests.server.small import KEY, LINE, OTHER_LINE, ROOM

# the model has more logits than its tokenizer has tokens, as published ones have
SPARE = 7


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "tiny"
    tokens = core("byte_level")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokens.get_vocab_size() + SPARE, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192, initializer_range=0.2, bos_token_id=None,
        eos_token_id=tokens.token_to_id("<|end|>"), pad_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(path)
    return save("byte_level", path)


@pytest.fixture(scope="session")
def server(folder: Path):
    with Server(folder) as made:
        yield made


@pytest.fixture(scope="session")
def small(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """A server that runs two answers, and lets three wait."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{LINE}\n{OTHER_LINE}\n")
    with Server(folder, *ROOM, "--api-key-file", str(keys), "--json") as made:
        made.client.headers["Authorization"] = f"Bearer {KEY}"
        yield made


@pytest.fixture(scope="session")
def agents(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """A server whose model says what a test has given it to say."""
    with agents_server(folder, tmp_path_factory.mktemp("agents")) as made:
        yield made


@pytest.fixture(scope="session")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu", num_blocks=600, max_model_len=2048)
