"""`DraftPlan`: what drafts for a model, as far as it is known and checked before weights are read."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from rooftile.engine.mixers.mixer import Mixer
from rooftile.engine.settings.config import EngineConfig
from rooftile.engine.settings.table import SETTINGS
from rooftile.engine.speculation.settings import Speculation
from rooftile.engine.start.checkpoint import find_folder
from rooftile.engine.start.tokenizers import check_draft_tokenizer
from rooftile.errors import InvalidInput, Unsupported
from rooftile.models import Decoder, ModelConfig
from rooftile.models.drafts.eagle3_files import is_eagle3, plan_eagle3
from rooftile.models.drafts.head import HeadPlan
from rooftile.models.drafts.mtp_files import plan_mtp

# a checkpoint's folder, a decoder, or a configuration, whose weights are random
Model = str | Path | Decoder | ModelConfig


class DraftPlan(NamedTuple):
    """A draft model, or a head, that is asked for.

    Args:
        model: the draft model; of a head, the configuration of its layer.
        settings: the settings of an engine of its own.
        head: a head, whose weights are read when the model is there; None for a model by itself.
    """

    model: Model
    settings: EngineConfig
    head: HeadPlan | None


def plan_draft(
    model: Model, config: EngineConfig, device: torch.device, shape: ModelConfig, max_len: int
) -> DraftPlan | None:  # fmt: skip
    """Checks what is to draft for a model; returns None if nothing is, or only what was written before.

    Args:
        model: the model that is drafted for.
        config: its engine's settings.
        device: its device.
        shape: the model, with the dtype that it computes in.
        max_len: its longest sequence in tokens.

    Raises:
        InvalidInput, Unsupported: the two do not go together.
    """
    asked = Speculation.of(config.speculative)
    if asked is None or asked.method == "lookup":
        return None
    if asked.method == "mtp":
        head: HeadPlan | None = _mtp_of(model, shape)
    else:
        model, head = _draft_of(asked, model, config, shape)
    # the weights of a head are read when the model's embedding is there
    draft = model if head is None else replace(head.config, dtype=shape.dtype)
    found = ModelConfig.from_folder(draft) if isinstance(draft, str | Path) else draft
    own = found.config if isinstance(found, Decoder) else found
    settings = replace(
        config, speculative=None, adapters=None, max_adapters=None, max_adapter_rank=None, tokenizer=None, chat_template=None,
        weights="auto", dtype="auto" if isinstance(draft, Decoder) or head is not None else config.dtype, device=device,
        kv_dtype="fp8" if config.kv_dtype == "fp8" else "auto", num_blocks=None, max_model_len=min(max_len, own.max_len),
        **{name: SETTINGS[name].default for name in ("state_dtype", "state_every", "state_share")},
    )  # fmt: skip
    return DraftPlan(draft, settings, head)


def check_takes_drafts(mixers: tuple[Mixer, ...], shape: ModelConfig, *, of_draft: bool = False) -> None:
    """Refuses drafts for a model, or by one, whose layers cannot take a token back."""
    for mixer in mixers:
        if not mixer.takes_drafts:
            kind = shape.mixers[mixer.layers[0]]
            said = "the draft model" if of_draft else "speculative is given, and the model"
            due = "give one with attention alone" if of_draft else "leave it out"
            raise Unsupported(
                f"{said} has layers of the kind {kind!r}, which cannot take back what a refused token has left: {due}"
            )


def _mtp_of(model: Model, shape: ModelConfig) -> HeadPlan:
    """Returns the plan of the model's own layer of multi-token prediction."""
    if not isinstance(model, str | Path):
        raise InvalidInput(
            'speculative has the method "mtp", whose layer is in the checkpoint, and the model is in memory: give its folder'
        )
    plan = plan_mtp(Path(model), shape)
    if plan.there > 1:
        logging.getLogger(__name__).warning(
            "%s has %d layers of MTP: the first one drafts every token, and the others are not read", model, plan.there
        )
    return plan


def _draft_of(asked: Speculation, model: Model, config: EngineConfig, shape: ModelConfig) -> tuple[Model, HeadPlan | None]:
    """Returns the draft model that is named, or the folder of a head and its plan."""
    draft = asked.model
    if isinstance(draft, str | Path):
        try:
            draft = find_folder(draft, download=config.download)
        except InvalidInput as error:
            raise InvalidInput(f"of the draft model: {error}") from error
    elif not isinstance(draft, Decoder | ModelConfig):
        raise InvalidInput(f"speculative has the model {repr(draft)[:60]}; must be a folder, a name on the Hub, or a decoder")
    if isinstance(draft, Path) and is_eagle3(draft):
        if config.deterministic:
            raise Unsupported(
                "deterministic is True and a head of EAGLE-3 drafts, whose features are joined otherwise: leave one out"
            )
        return draft, plan_eagle3(draft, shape)
    if asked.method == "eagle3":
        raise InvalidInput(f"speculative has the method 'eagle3', and {draft} is no head of EAGLE-3: name it as a draft model")
    check_draft_tokenizer(model, config, draft)
    return draft, None
