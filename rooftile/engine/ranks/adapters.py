"""Loads an adapter on all ranks, or on none: each reads its part, and then hears whether another has refused."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch
from torch import Tensor

from rooftile.engine.ranks.group import RankGroup
from rooftile.engine.steps.runner import Runner
from rooftile.errors import InvalidInput, Unsupported


def order_of(slot: int, path: str | Path) -> Tensor:
    """Returns the numbers of an order to load an adapter; the other ranks need not have this one's folder."""
    return torch.tensor([slot, *os.fsencode(Path(path).absolute())])


def load_part(runner: Runner, group: RankGroup, numbers: Tensor) -> None:
    """Reads a rank's part of an adapter as rank 0 orders, and says whether it fits.

    Whatever goes wrong while it is read is said, and ends no rank: the others wait for the word.
    """
    assert runner.adapters is not None
    slot, path = int(numbers[0]), os.fsdecode(bytes(numbers[1:].tolist()))
    reason = ""
    try:
        runner.load_adapter(slot, path)
    except (InvalidInput, Unsupported) as error:
        reason = str(error)
    except Exception as error:
        logging.getLogger(__name__).exception("an adapter could not be loaded")
        reason = f"{path} could not be read: {type(error).__name__}"
    if any(group.tell_all(reason)):
        runner.adapters.clear(slot)
