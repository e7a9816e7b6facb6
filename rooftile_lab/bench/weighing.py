"""Weighs a model of Transformers in each format of weights: the bytes of its projections, and nats per byte of a text.

Projections are the projections of the layers, as in `LLM(weights=...)`: embedding, head and norms stay as they are.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import rooftile as rt
from rooftile.engine import LLM, SamplingParams
from rooftile.nn import QuantisedLinear

# these are the words of `rooftile.quantise_weight`; groups of 32 and 64 divide the rows of small models
FORMATS = ("fp8", "int8", "w8", "int4:64", "int4:32", "mxfp8", "mxfp4", "nvfp4")
# tokens of an answer whose rate is measured
ANSWER = 64


class Weighed(NamedTuple):
    """The weight of a model in one format."""

    format: str  # or the model's own dtype
    nbytes: int  # the projections alone
    nats: float  # per token of the text


def quantised(model: Any, word: str) -> tuple[Any, int]:
    """A copy of a Llama of Transformers whose projections are quantised, and their bytes.

    Args:
        model: the model; it stays as it is.
        word: a format and perhaps its group, such as "int4:64".

    Raises:
        InvalidInput: a projection cannot be quantised so.
    """
    format, _, group = word.partition(":")
    changed, nbytes = copy.deepcopy(model), 0
    for layer in changed.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    weight = rt.quantise_weight(child.weight.detach(), format, group=int(group) if group else None)
                    setattr(parent, name, QuantisedLinear(weight, child.bias))
                    nbytes += weight.nbytes
    return changed, nbytes


def plain_bytes(model: Any) -> int:
    """Bytes of the projections as they are."""
    return sum(x.weight.nbytes for x in model.model.layers.modules() if isinstance(x, nn.Linear))


@torch.no_grad()
def nats_per_token(model: Any, tokens: Tensor, targets: Tensor, rows: int = 8) -> float:
    """The mean loss of tokens (batch, length) whose next ones are `targets`; `rows` of them are read at once."""
    total = 0.0
    for x, y in zip(tokens.split(rows), targets.split(rows), strict=True):
        logits = model(input_ids=x, use_cache=False).logits
        total += float(functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum"))
    return total / targets.numel()


def weigh(model: Any, tokens: Tensor, targets: Tensor, formats: Sequence[str] = FORMATS) -> list[Weighed]:
    """The model as it is, and then in each format."""
    model = model.eval()
    own = str(next(model.parameters()).dtype).removeprefix("torch.")
    found = [Weighed(own, plain_bytes(model), nats_per_token(model, tokens, targets))]
    for word in formats:
        changed, nbytes = quantised(model, word)
        found.append(Weighed(word, nbytes, nats_per_token(changed, tokens, targets)))
    return found


def tokens_per_second(folder: Path, word: str, device: str, count: int = ANSWER) -> float:
    """The rate of one greedy answer, after one that compiles what it needs."""
    llm = LLM(folder, weights=word, device=device, max_num_seqs=1, num_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    taken = []
    for _ in range(2):
        began = time.perf_counter()
        (output,) = llm.generate([[1, 2, 3]], params)
        taken.append(len(output.outputs[0].token_ids) / (time.perf_counter() - began))
    return taken[-1]
