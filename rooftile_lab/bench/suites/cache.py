"""Writing to a paged cache: the part of the paged suite that is no attention.

A prompt's keys and values go into their slots, rotated or not; queries are rotated; blocks are copied. As in an engine there
are LAYERS layers of 8 key heads, and a replay goes through all of them, each with tensors of its own and other blocks to copy:
what one writes is long out of the L2 cache when it is written again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from rooftile.cost import memory_roof, traffic
from rooftile.cost.session import Session
from rooftile.hardware.clock import Clock, ReplayClock, medians, take_turns
from rooftile.kvcache import Pages, Rotation, rotate
from rooftile.kvcache.operators import copy_blocks
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import timed_row, with_measures

LAYERS, BLOCKS, BLOCK, HEADS, GROUP, DIM, TOKENS, COPIES = 8, 8192, 16, 8, 4, 128, 16_384, 512


def cache(session: Session, clock: Clock) -> Iterator[Row]:
    """A row for each operation; its time is the time of one layer."""
    steps = operations(session)
    itemsize = torch.bfloat16.itemsize
    moved = {
        "append": traffic.cache_write(TOKENS, HEADS, DIM, itemsize),
        "append-rotated": traffic.cache_write(TOKENS, HEADS, DIM, itemsize, rotated=True),
        "rotate-queries": traffic.rotate(TOKENS, GROUP * HEADS, DIM, itemsize),
        "copy-blocks": traffic.copy(COPIES * LAYERS * 2 * BLOCK * HEADS * DIM * itemsize),
    }
    alone = medians({name: partial(step, 3) for name, step in steps.items()}, clock)
    replayed = take_turns({name: partial(_all_layers, step) for name, step in steps.items()}, ReplayClock(times=2), 6)
    for name, samples in replayed.items():
        row = timed_row(
            session, [us / LAYERS for us in samples], roof=memory_roof(moved[name], session.ceilings), suite="paged", case=name,
            backend="rooftile", phase="cache", settings={"timed": "replayed"},
        )  # fmt: skip
        yield with_measures(row, alone_us=alone[name])


def operations(session: Session) -> dict[str, Callable[[int], Any]]:
    """The operations by name: what each does in one of the layers."""
    device = session.device
    held = Pages(BLOCKS, LAYERS, HEADS, DIM, device=device)
    layers = torch.randn(LAYERS, TOKENS, (GROUP + 2) * HEADS * DIM, device=device, dtype=torch.bfloat16).unflatten(2, (-1, DIM))
    queries, keys, values = layers.split([GROUP * HEADS, HEADS, HEADS], 2)
    blocks = torch.randperm(BLOCKS, device=device)[: TOKENS // BLOCK, None]
    slots = (blocks * BLOCK + torch.arange(BLOCK, device=device)).flatten()
    angles = torch.rand(TOKENS, DIM // 2, device=device)
    rotation = Rotation(angles.cos(), angles.sin())
    pairs = torch.randperm(BLOCKS, device=device).view(-1, COPIES, 2)
    return {
        "append": lambda i: held.write(i, keys[i], values[i], slots),
        "append-rotated": lambda i: held.write(i, keys[i], values[i], slots, rotation),
        "rotate-queries": lambda i: rotate(queries[i], rotation),
        "copy-blocks": lambda i: copy_blocks(held.storage, pairs[i]),
    }


def _all_layers(step: Callable[[int], Any]) -> None:
    for i in range(LAYERS):
        step(i)
