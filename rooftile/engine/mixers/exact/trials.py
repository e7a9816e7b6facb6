"""Runs exact attention for the sake of its kernels, on a cache of two blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rooftile.engine.mixers.exact.masks import masks_of
from rooftile.engine.mixers.trial import ROWS, SHORT, USUAL, TrialSetup
from rooftile.exact.api import prepare_paged
from rooftile.exact.masks import FULL, Mask
from rooftile.exact.paged_route import LONG_PROMPT, Route, route
from rooftile.exact.spec import CallSettings, Options
from rooftile.kvcache import Copy, PagedKV, Pages
from rooftile.models import Decoder


def trials(trial: TrialSetup) -> list[Callable[[], None]]:
    """Returns the jobs that compile the kernels of a model's exact layers, longest first."""
    config, size = trial.config, trial.size
    decoder = Decoder(trial.small(), dtype=trial.dtype, device=trial.device)
    # one block to read and write, and one to copy it to
    pages = Pages(2, 1, config.kv_heads, config.head_dim, block_size=size, dtype=trial.kv_dtype, device=trial.device)
    masks = tuple(dict.fromkeys(masks_of(config)))
    settings = CallSettings(
        config.scale, config.softcap, deterministic=trial.deterministic or None, partial=trial.context_ranks > 1
    )
    if trial.deterministic:
        # one kernel reads chunks of any length, and no other attention runs
        read = partial(_read_prompts, decoder, pages, settings=settings)
        return [
            *(partial(read, mask, (SHORT,), room=room) for mask in masks for room in (0, trial.longest)),
            partial(_decode_alone, decoder, pages, (), settings),
        ]
    # lengths that take the same route share their kernels, so they are one job
    together: dict[Route, list[int]] = {}
    for tokens in (trial.longest, USUAL, SHORT):
        way = route(tokens, 1, size, fp8=trial.kv_dtype == torch.float8_e4m3fn, copy_bytes=0)
        together.setdefault(way, []).append(tokens)
    # the keys before a chunk, of which a rank has some, are seen by all of its tokens
    read, seen = partial(_read_prompts, decoder, pages, settings=settings), (*masks, FULL) if settings.partial else masks
    return [
        *(partial(read, mask, tuple(lengths)) for lengths in together.values() for mask in seen),
        *(partial(read, mask, (SHORT,), room=LONG_PROMPT) for mask in seen),
        partial(_decode_alone, decoder, pages, masks, settings),
    ]


def _read_prompts(
    decoder: Decoder, pages: Pages, mask: Mask, lengths: tuple[int, ...], *, settings: CallSettings, room: int = 0
) -> None:
    """Runs attention of prompts, all of them in the first block, since the values do not matter.

    With `room` the tables have columns for that many tokens: a kernel may be chosen by how long a sequence could be, since the
    lengths are known only on the GPU.
    """
    device = decoder.embedding.device
    for tokens in lengths:
        table = torch.zeros(1, -(-max(tokens, room) // pages.storage.shape[3]), dtype=torch.int32, device=device)
        ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        q, _, _ = _projected(decoder, tokens)
        _attend(decoder, mask, q.contiguous(), pages.view(0, table, ends[1:], ends), settings)


def _decode_alone(decoder: Decoder, pages: Pages, masks: tuple[Mask, ...], settings: CallSettings) -> None:
    """Runs cache writes, copies of blocks, and attention of single tokens."""
    pages.copy([Copy(0, 1)])
    q, k, v = _projected(decoder, ROWS)
    padding = torch.full((ROWS,), -1, device=decoder.embedding.device)
    q = pages.write_and_rotate(0, q, k, v, padding, decoder.rotation(padding.clamp(min=0)))
    table = torch.zeros(ROWS, 1, dtype=torch.int32, device=decoder.embedding.device)
    for mask in masks:
        _attend(decoder, mask, q[:, None], pages.view(0, table, padding.int() + 1), settings)


def _projected(decoder: Decoder, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values in the layout that a layer's projection gives them."""
    config = decoder.config
    heads = (config.heads, config.kv_heads, config.kv_heads)
    x = torch.zeros(tokens, sum(heads), config.head_dim, dtype=decoder.embedding.dtype, device=decoder.embedding.device)
    q, k, v = x.split(heads, dim=1)
    return q, k, v


def _attend(decoder: Decoder, mask: Mask, q: Tensor, cache: PagedKV, settings: CallSettings) -> None:
    config = decoder.config
    # over a part of the keys there are none: they are added when parts are merged
    has_sinks = config.sinks and not settings.partial
    sinks = torch.zeros(config.heads, dtype=q.dtype, device=q.device) if has_sinks else None
    prepare_paged(q, cache, mask, Options(sinks=sinks), settings)(q, cache)
