"""Counts how often a call moves from one room of the package into another: `python -m tests.unit.moves` prints a JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import rooftile as rt
from rooftile.engine import LLM
from rooftile.models import Decoder
from rooftile_lab.bench.models import MODELS

PACKAGE = f"{Path(rt.__file__).parent}/"


def room_of(frame: FrameType | None) -> str | None:
    """Returns the room of the nearest frame that is a function of the package."""
    while frame is not None:
        code = frame.f_code
        # comprehensions are frames of their own in Python 3.11 and none in 3.12; modules run at the first import
        if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            return code.co_filename.removeprefix(PACKAGE).partition("/")[0]
        frame = frame.f_back
    return None


def moves(call: Callable[[], Any]) -> int:
    """Returns how many calls within `call` enter another room than their caller's."""
    count = 0

    def watch(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            count += room_of(frame) != room_of(frame.f_back)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def found() -> dict[str, int]:
    """Returns the moves of five calls."""
    q, k, v = (torch.randn(1, 64, 2, 16) for _ in range(3))
    lines, cu = [x[0] for x in (q, k, v)], torch.tensor([0, 30, 64], dtype=torch.int32)
    weight = rt.quantise_weight(torch.randn(64, 64), "w8")
    x = torch.randn(3, 64)
    mask = rt.CAUSAL & rt.Window(9)
    first = moves(lambda: rt.attention(q, k, v, mask))
    llm = LLM(Decoder.random(MODELS["tiny"], torch.float32, "cpu"), device="cpu", num_blocks=16, max_model_len=64)
    again: dict[str, Callable[[], Any]] = {
        "rt.attention, second": lambda: rt.attention(q, k, v, mask),
        "rt.attention_packed, second": lambda: rt.attention_packed(*lines, cu, cu, mask),
        "LLM.generate of two tokens, second": lambda: llm.generate([1, 2, 3], rt.SamplingParams(max_tokens=2)),
        "rt.linear, second": lambda: rt.linear(x, weight),
    }
    for call in again.values():
        call()
    return {"rt.attention, first": first} | {name: moves(call) for name, call in again.items()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(found()))
