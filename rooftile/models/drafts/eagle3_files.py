"""Reads a head of EAGLE-3 from its folder: config.json, and model.safetensors with `midlayer.*`, `fc`, `d2t` and `t2d`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from rooftile.errors import InvalidInput
from rooftile.models.checkpoints.stored import StoredTensor
from rooftile.models.checkpoints.weights import opened
from rooftile.models.config import ModelConfig, config_of
from rooftile.models.decoder import Decoder
from rooftile.models.drafts.eagle3 import TAPS, Eagle3Head
from rooftile.weights.files.folder import files_of
from rooftile.weights.files.settings import read_json

# tables that say which tokens it can guess; the embedding is the decoder's
TABLES = ("d2t", "t2d")


class Eagle3Plan(NamedTuple):
    """A head of EAGLE-3, before its weights are read.

    Args:
        folder: where it is.
        config: its layer, with the decoder's vocabulary and positions.
        drafted: how many tokens it can guess.
        taps: the layers of the decoder whose streams it reads, as they reach the layer.
    """

    folder: Path
    config: ModelConfig
    drafted: int
    taps: tuple[int, ...]

    @torch.inference_mode()
    def read(self, decoder: Decoder) -> Eagle3Head:
        """See `HeadPlan.read`."""
        head = Eagle3Head(self.config, self.drafted, decoder.embedding, self.taps)
        with ExitStack() as stack:
            files = [stack.enter_context(opened(path)) for path in files_of(self.folder)]
            stored = {name: StoredTensor(file, name) for file in files for name in file.keys()}  # noqa: SIM118
            self._fill(head, stored)
            rows = torch.arange(self.drafted)
            tokens = rows + (stored["d2t"].get_tensor().long() if "d2t" in stored else 0)
            if "embed_tokens.weight" in stored:
                own = stored["embed_tokens.weight"].get_tensor().to(decoder.embedding)
                head.embedding = nn.Parameter(own, requires_grad=False)
        shape, vocabulary = decoder.embedding.shape, self.config.vocab_size
        if head.embedding.shape != shape or not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise InvalidInput(f"{self.folder} has a d2t or an embedding of another vocabulary than {vocabulary:,} tokens")
        head.tokens.copy_(tokens)
        return head

    def _fill(self, head: Eagle3Head, stored: dict[str, StoredTensor]) -> None:
        due = dict(head.tensors())
        unknown = sorted(set(stored) - set(due) - set(TABLES) - {"embed_tokens.weight"})
        missing = sorted(set(due) - set(stored))
        if missing or unknown:
            which = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which no head of EAGLE-3 has"
            raise InvalidInput(f"{self.folder} {which}; a head has fc, midlayer, norm, lm_head, d2t and t2d")
        for name, place in due.items():
            found = stored[name].get_tensor()
            if found.shape != place.shape:
                raise InvalidInput(f"{self.folder} has {name} of the shape {tuple(found.shape)}; must be {tuple(place.shape)}")
            place.copy_(found)


def is_eagle3(folder: Path) -> bool:
    """Tells whether a folder has a head of EAGLE-3, by its config.json."""
    settings = _settings(folder)
    named = settings.get("architectures")
    return "draft_vocab_size" in settings or (isinstance(named, list) and any("Eagle3" in str(name) for name in named))


def plan_eagle3(folder: Path, target: ModelConfig) -> Eagle3Plan:
    """Checks a head's configuration against the decoder that it drafts for.

    Raises:
        InvalidInput: they do not go together.
    """
    settings = _settings(folder)
    # whatever the decoder is, the head has a layer of Llama's
    config = config_of(settings | {"architectures": ["LlamaForCausalLM"]}, str(folder))
    for name, own, due in (
        ("vocab_size", config.vocab_size, target.vocab_size), ("hidden_size", config.hidden, target.hidden),
        ("num_hidden_layers", config.layers, 1),
    ):  # fmt: skip
        if own != due:
            raise InvalidInput(f"{folder} is a head of EAGLE-3 with {name} {own:,}; must be {due:,} for this model")
    drafted = settings.get("draft_vocab_size") or config.vocab_size
    if not isinstance(drafted, int) or not 1 <= drafted <= config.vocab_size:
        raise InvalidInput(f"{folder} has draft_vocab_size {drafted!r}; must be from 1 to {config.vocab_size:,}")
    section = settings.get("eagle_config")
    taps = section.get("eagle_aux_hidden_state_layer_ids") if isinstance(section, dict) else None
    # those that EAGLE-3 was published with: early, in the middle, and late
    taps = (2, target.layers // 2, target.layers - 3) if taps is None else taps
    if len(taps) != TAPS or any(not isinstance(n, int) or not 0 <= n < target.layers for n in taps):
        raise InvalidInput(f"{folder} reads the layers {list(taps)}; must be {TAPS} of the {target.layers} that the model has")
    return Eagle3Plan(folder, replace(config, max_len=target.max_len), drafted, tuple(taps))


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return read_json(file) if file.is_file() else {}
