"""`Blueprint`: what an engine is built of, as far as it is known and checked before weights are read."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from rooftile.engine.adapters.names import adapters_of
from rooftile.engine.adapters.peft_config import PeftConfig
from rooftile.engine.caches.layout import CacheLayout
from rooftile.engine.mixers.mixer import Mixer
from rooftile.engine.mixers.registry import mixers_of
from rooftile.engine.ranks.place import Place
from rooftile.engine.settings.config import EngineConfig
from rooftile.engine.settings.table import SETTINGS
from rooftile.engine.start.draft_plan import check_takes_drafts, plan_draft
from rooftile.errors import InvalidInput, Unsupported
from rooftile.models import Decoder, ModelConfig
from rooftile.models.drafts.head import HeadPlan
from rooftile.models.parts import deals_experts
from rooftile.weights.files.plan import check_device, plan_of, quantiser_of

# a checkpoint's folder, a decoder, or a configuration, whose weights are random
Model = str | Path | Decoder | ModelConfig


class Blueprint(NamedTuple):
    """An engine, or a rank's part of one, that can be built.

    Args:
        model: the model.
        config: the settings.
        device: the device of this rank.
        shape: the model, with the dtype that it computes in; of several ranks, the part of each.
        max_len: the longest sequence in tokens that the model allows and the caller asks for.
        mixers: one for each kind of layer.
        layout: what the layers keep.
        whole: the model that all ranks hold together.
        deal_experts: whether each of several ranks holds whole experts.
        draft: the draft model; None for none.
        head: of a draft that is a head, its folder and what it reads of the model; None for a model by itself.
    """

    model: Model
    config: EngineConfig
    device: torch.device
    shape: ModelConfig
    max_len: int
    mixers: tuple[Mixer, ...]
    layout: CacheLayout
    whole: ModelConfig
    deal_experts: bool = False
    draft: Blueprint | None = None
    head: HeadPlan | None = None

    def bytes_beside(self) -> int:
        """Returns the bytes that it keeps in each block as a draft model."""
        keys = self.layout.block_bytes(self.config.cache_dtype(self.shape.dtype))
        return keys if self.head is None else keys + self.config.block_size * self.shape.hidden * self.shape.dtype.itemsize

    @classmethod
    def of(cls, model: Model, config: EngineConfig, place: int = 0) -> Blueprint:
        """Checks a model and settings.

        Args:
            model: the model.
            config: the settings.
            place: this rank's number among those on this machine.

        Raises:
            InvalidInput: the model or a setting cannot be used; the sentence says why.
            Unsupported: the device, or a setting, is not supported.
        """
        given = Place.found()
        device = find_device(model, config, place if given is None else given.local_rank)
        _check_ranks(model, config, device)
        found = ModelConfig.from_folder(model) if isinstance(model, str | Path) else model
        whole = found.config if isinstance(found, Decoder) else found
        deal_experts = _deals_experts(whole, config)
        ranks = config.tensor_parallel_size
        shape = whole if isinstance(found, Decoder) else whole.part(ranks, deal_experts=deal_experts)
        max_len = longest_sequence(shape, config)
        if config.max_model_len is None and config.num_blocks is not None:
            max_len = min(max_len, config.num_blocks * config.block_tokens)
        # a state may have the dtype that the model computes in, which need not be the checkpoint's
        shape = replace(shape, dtype=_computed(model, shape, config))
        mixers = mixers_of(shape, config)
        config.cache_dtype(shape.dtype)
        specs = tuple(spec for mixer in mixers for spec in mixer.specs())
        layout = CacheLayout(config.block_size, specs, config.context_parallel_size)
        _check_caches(layout, config)
        _check_weights(model, config, device)
        for path in adapters_of(config.adapters).values():
            PeftConfig.of(path)
        if config.speculative is not None:
            check_takes_drafts(mixers, shape)
        draft = cls._draft_of(model, config, device, shape, max_len)
        if draft is not None:
            layout = replace(layout, drafted=draft.bytes_beside())
        return cls(model, config, device, shape, max_len, mixers, layout, whole, deal_experts, draft)

    @classmethod
    def _draft_of(
        cls, model: Model, config: EngineConfig, device: torch.device, shape: ModelConfig, max_len: int
    ) -> Blueprint | None:  # fmt: skip
        """Returns the blueprint of the draft model that is asked for, checked against the model; None if none is."""
        plan = plan_draft(model, config, device, shape, max_len)
        if plan is None:
            return None
        try:
            found = cls.of(plan.model, plan.settings)
        except (InvalidInput, Unsupported) as error:
            raise type(error)(f"of the draft model: {error}") from None
        check_takes_drafts(found.mixers, found.shape, of_draft=True)
        return found._replace(head=plan.head)


def find_device(model: Model, config: EngineConfig, place: int = 0) -> torch.device:
    """Returns the device of the model. A decoder must already have the dtype and device that are asked for.

    Args:
        model: the model.
        config: the settings.
        place: this rank's number among those on this machine.
    """
    wanted = None if config.device is None else torch.device(config.device)
    if isinstance(model, Decoder):
        its = model.embedding
        if config.dtype not in ("auto", its.dtype):
            raise InvalidInput(
                f"dtype is {config.dtype} and the decoder's {its.dtype}; make it with that dtype, or leave dtype out"
            )
        if wanted is not None and (wanted.type != its.device.type or wanted.index not in (None, its.device.index)):
            raise InvalidInput(f"device is {wanted} and the decoder is on {its.device}; make it there, or leave device out")
        return its.device
    if wanted is None:
        wanted = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.type not in ("cuda", "cpu"):
        raise Unsupported(f'device is {str(wanted)!r}; has "cuda" and "cpu"')
    if wanted.type == "cpu":
        return wanted
    if not torch.cuda.is_available():
        raise InvalidInput(f'device is {str(wanted)!r}, and PyTorch finds no GPU; has "cpu"')
    if config.ranks > 1:
        return torch.device("cuda", place)
    # each thread has its own current device, so the number is fixed here
    return torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)


def _computed(model: Model, shape: ModelConfig, config: EngineConfig) -> torch.dtype:
    """Returns the dtype that the model computes in."""
    if isinstance(model, Decoder):
        return model.embedding.dtype
    return config.dtype if isinstance(config.dtype, torch.dtype) else shape.dtype


def longest_sequence(shape: ModelConfig, config: EngineConfig) -> int:
    """Returns the longest sequence in tokens that the model allows and the caller asks for."""
    longest = config.max_model_len
    if longest is None:
        return shape.max_len
    if not 2 <= longest <= shape.max_len:
        raise InvalidInput(f"max_model_len is {longest:,}; the model has positions for 2 to {shape.max_len:,}")
    return longest


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the thread's current device, on which kernels are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _deals_experts(whole: ModelConfig, config: EngineConfig) -> bool:
    """Returns whether ranks hold whole experts, as asked for, or by default as the fewest bytes are read."""
    asked, ranks = config.enable_expert_parallel, config.tensor_parallel_size
    if asked and ranks == 1:
        raise InvalidInput("enable_expert_parallel is True and tensor_parallel_size is 1; give at least 2, or leave it out")
    if asked and whole.experts is None:
        raise InvalidInput("enable_expert_parallel is True and the model has no experts; leave it out")
    return deals_experts(whole, ranks) if asked is None else asked


def _check_ranks(model: Model, config: EngineConfig, device: torch.device) -> None:
    """Refuses ranks that cannot be there."""
    ranks = config.ranks
    if ranks == 1:
        return
    setting = "tensor_parallel_size" if config.tensor_parallel_size > 1 else "context_parallel_size"
    if isinstance(model, Decoder):
        raise InvalidInput(
            f"{setting} is {ranks} and a decoder is given, which is whole; give a checkpoint's folder, of which each rank reads "
            "its part"
        )
    if isinstance(model, ModelConfig) and quantiser_of(config.weights) is not None:
        raise Unsupported(f"{setting} is {ranks}, and weights are to be quantised; ranks share random weights in 16 bits")
    given = Place.found()
    if given is not None and given.ranks != ranks:
        raise InvalidInput(f"{setting} is {ranks}, and torchrun has started {given.ranks} ranks; make them equal")
    if device.type == "cuda":
        wanted = config.device
        if wanted is not None and torch.device(wanted).index is not None:
            raise InvalidInput(f"device is {wanted} and {setting} is {ranks}: rank r takes cuda:r; leave device out")
        here, there = ranks if given is None else given.local_ranks, torch.cuda.device_count()
        if here > there:
            raise InvalidInput(
                f"{setting} is {ranks}, so {here} GPUs are needed on this machine, and PyTorch finds {there}: give at "
                "most that many, or run torchrun on several machines"
            )


def _check_caches(layout: CacheLayout, config: EngineConfig) -> None:
    """Refuses settings of caches that the model does not have."""
    if config.kv_dtype == "fp8" and not layout.places:
        raise Unsupported('kv_dtype is "fp8" and no layer of the model keeps keys and values: leave kv_dtype out')
    if not layout.has_states:
        for name in ("state_dtype", "state_every", "state_share"):
            given = getattr(config, name)
            if given != SETTINGS[name].default:
                said = f'"{given}"' if isinstance(given, str) else given
                raise Unsupported(f"{name} is {said} and no layer of the model has a state: leave {name} out")


def _check_weights(model: Model, config: EngineConfig, device: torch.device) -> None:
    """Refuses weights in a format that the GPU has no products for, before anything is loaded or compiled."""
    if device.type == "cuda":
        reader = plan_of(config.weights, Path(model)) if isinstance(model, str | Path) else quantiser_of(config.weights)
        check_device(reader, device)
