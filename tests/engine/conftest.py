"""Tiny models that engines are compared on, made once a worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.models.checkpoints import saved, theirs

PADDING = 0


class Peer:
    """A model of Transformers with random weights, and its folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.model = theirs(name)
        self.folder = saved(self.model, folder)
        # where a test wants an end of text it says so
        self.model.generation_config.eos_token_id = None
        self._greedy: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Returns the greedy continuation by `generate`, past the end of text; prompts of one length are one batch."""
        for length in {len(prompt) for prompt in prompts}:
            fresh = [prompt for prompt in prompts if len(prompt) == length and (*prompt, tokens) not in self._greedy]
            if fresh:
                found = self.generate(fresh, max_new_tokens=tokens, do_sample=False)
                self._greedy |= {(*prompt, tokens): row for prompt, row in zip(fresh, found, strict=True)}
        return [self._greedy[(*prompt, tokens)] for prompt in prompts]

    def generate(self, prompts: list[list[int]], **settings: object) -> list[list[int]]:
        """New tokens of prompts of one length."""
        ids = torch.tensor(prompts)
        config = transformers.GenerationConfig(**settings, pad_token_id=PADDING)
        found = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return found[:, ids.shape[1] :].tolist()


@pytest.fixture(scope="session")
def peers(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Peer] = {}

    def peer(name: str) -> Peer:
        if name not in made:
            made[name] = Peer(name, tmp_path_factory.mktemp("model"))
        return made[name]

    return peer
