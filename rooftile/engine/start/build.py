"""Builds an engine from a checkpoint folder or a decoder, in the order of `build_engine`.

Whatever can be refused is refused before gigabytes of weights are read. On a GPU kernels compile in threads while weights load,
and memory for the cache is measured after both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from rooftile.engine.adapters.names import adapters_of
from rooftile.engine.adapters.peft_config import room_for
from rooftile.engine.adapters.slots import AdapterSlots
from rooftile.engine.caches import memory
from rooftile.engine.caches.layout import CacheLayout, PeakLoad
from rooftile.engine.engine import Engine
from rooftile.engine.ranks.group import RankGroup
from rooftile.engine.ranks.late_group import LateGroup
from rooftile.engine.settings.config import EngineConfig
from rooftile.engine.speculation.settings import Speculation
from rooftile.engine.start.blueprint import Blueprint, Model, current_device
from rooftile.engine.start.drafts import add_draft, speculator_of
from rooftile.engine.start.loading import load_decoder, load_draft
from rooftile.engine.start.tokenizers import find_tokenizer
from rooftile.engine.steps.runner import Runner
from rooftile.errors import InvalidInput
from rooftile.kvcache.caches import Caches
from rooftile.kvcache.context_share import ContextShare
from rooftile.models import Decoder
from rooftile.models.drafts.head import DraftHead


def build_engine(model: Model, config: EngineConfig) -> Engine:
    """Builds the engine of a model in this process.

    Raises:
        InvalidInput: the model or a setting cannot be used; the sentence says why.
        Unsupported: the device, or a setting, is not supported.
    """
    blueprint = Blueprint.of(model, config)
    return engine_of(blueprint, build_runner(blueprint))


def build_runner(
    blueprint: Blueprint, late: LateGroup | None = None, make: Callable[..., Runner] = Runner
) -> tuple[Runner, Sizes]:
    """Builds what runs steps: reads the weights, compiles kernels and allocates the caches.

    Args:
        blueprint: what to build.
        late: the ranks among which the model is shared; all of them build it at the same time. None for one process.
        make: makes the runner.
    """
    config, layout, mixers = blueprint.config, blueprint.layout, blueprint.mixers
    decoder = load_decoder(blueprint, late)
    draft = None if blueprint.draft is None else load_draft(blueprint.draft, decoder)
    # before memory is measured, and before any prompt
    adapters = adapters_for(decoder, blueprint)
    for mixer in mixers:
        mixer.check_decoder(decoder)
    # without a state that was kept no prefix can begin
    prefixes = config.enable_prefix_caching and (config.state_share > 0 or not layout.has_states)
    load = PeakLoad(config.max_num_seqs, config.max_batched_tokens, paged=config.allocator == "paged", prefixes=prefixes)
    # before memory is measured: what connects the ranks takes some
    group = None if late is None else late.ready()
    fit = count_blocks(decoder, blueprint, load, group, draft)
    load = replace(load, answers=fit.answers, kept=fit.kept)
    max_len = blueprint.max_len
    if config.max_model_len is None:
        max_len = min(max_len, fit.blocks * layout.tokens)
    caches = allocate_caches(decoder, layout, config, load, fit.blocks)
    if group is not None and layout.ranks > 1:
        caches.share = ContextShare(group.rank, group.ranks, layout.size, group.stack, group.first)
    speculation = Speculation.of(config.speculative)
    drafted = 0 if speculation is None else speculation.tokens
    runner = make(
        decoder, caches, mixers, fit.answers, max_len, graphs=not config.enforce_eager, deterministic=config.deterministic,
        adapters=adapters, drafted=drafted,
    )  # fmt: skip
    if blueprint.draft is not None and draft is not None:
        own = allocate_caches(draft, blueprint.draft.layout, blueprint.draft.config, load, fit.blocks)
        add_draft(runner, blueprint.draft, draft, own, fit.answers, drafted)
    if adapters is not None:
        # the decoder may be a caller's, who makes another engine of it
        weakref.finalize(runner, adapters.detach).atexit = False
    return runner, Sizes(load, fit.blocks, max_len)


class Sizes(NamedTuple):
    """The sizes of an engine, as its memory allows."""

    load: PeakLoad
    blocks: int
    max_len: int


def engine_of(blueprint: Blueprint, built: tuple[Runner, Sizes]) -> Engine:
    """Returns the engine that plans the steps of a runner."""
    (runner, sizes), config, layout = built, blueprint.config, blueprint.layout
    pool = layout.pool(sizes.blocks, sizes.load, sizes.max_len)
    engine = Engine(
        runner,
        pool,
        max_len=sizes.max_len,
        max_answers=sizes.load.answers,
        max_batched_tokens=config.max_batched_tokens,
        tokenizer=find_tokenizer(blueprint.model, config),
        seed=config.seed,
        # else the keys that a request finds in the prefix cache would depend on the requests before it
        shares_answers=not runner.layers.separates_prompts,
        states=layout.state_rows(sizes.load),
        state_every=config.state_every,
        reasoning_parser=config.reasoning_parser,
        tool_call_parser=config.tool_call_parser,
        speculator=speculator_of(blueprint, runner, pool),
    )
    for name, path in adapters_of(config.adapters).items():
        engine.load_adapter(name, path)
    return engine


def adapters_for(decoder: Decoder, blueprint: Blueprint) -> AdapterSlots | None:
    """Allocates the memory of adapters; None if none are asked for."""
    config = blueprint.config
    if not config.adapter_slots:
        return None
    rank = config.max_adapter_rank
    if rank is None:
        rank = room_for(adapters_of(config.adapters).values())
    slots = AdapterSlots(decoder, config.adapter_slots, rank, blueprint.whole)
    slots.compile()
    return slots


def count_blocks(
    decoder: Decoder, blueprint: Blueprint, load: PeakLoad, group: RankGroup | None, draft: Decoder | DraftHead | None
) -> memory.Fit:  # fmt: skip
    """Returns how many blocks and states the caches get; one sequence of the asked length fits into the blocks."""
    config, max_len, size = blueprint.config, blueprint.max_len, blueprint.layout.tokens
    with current_device(decoder.embedding.device):
        fit = memory.what_fits(
            decoder, blueprint.layout, blueprint.mixers, config.cache_dtype(decoder.embedding.dtype), load,
            utilization=config.gpu_memory_utilization, longest=max_len, num_blocks=config.num_blocks,
            state_share=config.state_share,
            # a head's step takes less memory than the model's
            draft=(draft, blueprint.draft.mixers) if isinstance(draft, Decoder) and blueprint.draft is not None else None,
        )  # fmt: skip
    if config.num_blocks is None:
        fit = fit._replace(blocks=min(fit.blocks, *(mixer.most_blocks for mixer in blueprint.mixers)))
    if group is not None:
        fit = memory.Fit(*group.least(fit))
    if config.max_model_len is not None and fit.blocks * size < max_len:
        raise InvalidInput(
            f"{fit.blocks:,} blocks of {size} are room for {fit.blocks * size:,} tokens; a sequence may have "
            f"{max_len:,}: make num_blocks larger, or max_model_len smaller"
        )
    return fit


def allocate_caches(
    decoder: Decoder | DraftHead, layout: CacheLayout, config: EngineConfig, load: PeakLoad, num_blocks: int
) -> Caches:
    """Allocates the memory of what the layers keep."""
    cached = config.cache_dtype(decoder.embedding.dtype)
    try:
        return layout.allocate(num_blocks, load, cached, decoder.embedding.device)
    except RuntimeError as error:
        taken = layout.page_bytes(num_blocks, cached, load) + layout.state_bytes(load)
        raise InvalidInput(
            f"no memory for a cache: {num_blocks:,} blocks (num_blocks) of {layout.block_bytes(cached):,} bytes take "
            f"{taken / 1e9:,.1f} GB{_states(layout, load)}"
        ) from error


def _states(layout: CacheLayout, load: PeakLoad) -> str:
    """Says which part of the caches is states, if any is."""
    rows = layout.state_rows(load)
    if rows is None:
        return ""
    return f", with {rows.total:,} states of {layout.states_in_words()}: make num_blocks or max_num_seqs smaller"
