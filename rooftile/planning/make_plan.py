"""`plan`: finds what bounds each layer, what each format saves and costs there, and chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rooftile.diagnosis.programs.unchanged import state_of, unchanged
from rooftile.errors import InvalidInput
from rooftile.hardware.device import describe, device_of
from rooftile.models import Decoder
from rooftile.planning.building import Builder
from rooftile.planning.formats import check_formats
from rooftile.planning.losses import ByData, ByError
from rooftile.planning.plan import Plan
from rooftile.planning.targets.decoders import DecoderTarget, Phase
from rooftile.planning.targets.modules import ModuleTarget
from rooftile.planning.targets.target import Target
from rooftile.planning.timing import Times, stopwatch_for
from rooftile.qat.patterns import SKIPPED, patterns_of
from rooftile.runtime.words import answers_foreign_words

PHASES = ("decode", "prompt")
# tokens of a sequence where the caller names none
CONTEXT = 1024


@answers_foreign_words
def plan(
    model: nn.Module | str | Path, *inputs: Any, rows: Mapping[str, int] | None = None,
    formats: Sequence[str] | None = None, data: Any = None, max_loss: float | None = None, measure: bool = True,
    backward: bool = False, shares: Mapping[str, float] | None = None, context: int | None = None,
    skip: Sequence[str] = SKIPPED, device: str = "auto",
) -> Plan:  # fmt: skip
    """Chooses a format for each linear layer of a model: the least time on this machine for a loss that you allow.

    The time of a layer in a format follows from its FLOPs and bytes and this machine's measured ceilings, and is measured, too.
    What bounds the layer is checked by running it with twice the rows. Its loss is the loss of the model with this layer alone
    rounded. The choice is exact: a knapsack with one choice for each layer. The model is as before afterwards: parameters,
    buffers, gradients, streams of random numbers, training flags and hooks.

    Args:
        model: a module; or a checkpoint's folder or a `rooftile.models.Decoder`, with `rows`.
        inputs: of the module's forward, or one dictionary of them by their names, as a tokenizer returns them; its layers are
            seen while it runs on them.
        rows: of a checkpoint: {"decode": sequences that decode at once, "prompt": tokens of prompts that are read at once}, or
            one of them.
        formats: words of `rooftile.quantise_weight` to choose from; "bf16" is a layer as it is, in its own dtype. "2:4", which is
            for plans without `backward`, keeps two of each four weights without training, as `rooftile.sparsity.two_four` chooses
            them. By default "bf16", "fp8", "int8", "int4", and "2:4" where `max_loss` is given: without training it loses so much
            that a choice by time alone must not take it.
        data: for the losses. Of a module: a function of the model that returns a loss; token ids (B, T); or batches, each of them
            a dictionary of arguments (the model returns a loss, as Transformers' do), a pair (input, target) or token ids. Of a
            checkpoint: token ids (B, T) or a list of texts' token ids (T,). None: the relative error of a layer's output
            stands for its loss.
        max_loss: the largest sum of losses. 0 keeps formats that cost nothing measurable; None chooses by time alone.
        measure: whether layers and the whole are timed; else times follow from the ceilings.
        backward: of a module: whether a step trains: it also has the backward of the sum of the outputs, and layers in a format
            are as in `rooftile.qat.prepare`.
        shares: of steps, by the words of `rows`; by default alike.
        context: tokens of each sequence of a checkpoint; None: 1,024, or as many positions as it has.
        skip: patterns of a module's layers that stay as they are; all but the default must match one.
        device: of a checkpoint's folder: "cpu", "cuda" or "auto".

    Returns:
        A `rooftile.planning.Plan`: print it, `apply` it to the model, `prepare` the model to be trained for it, give its
        `weights` to `rooftile.LLM`, or keep it as JSON.

    Raises:
        InvalidInput: the model has no linear layer, its inputs reach none, it is on several devices, an argument is wrong, or
            every choice loses more than max_loss.
        Unsupported: formats has 2:4 with `backward`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
        >>> chosen = rooftile.plan(model, torch.randn(4, 64), max_loss=0.02, measure=False)
        >>> print(chosen)
        >>> y = chosen.apply(model)(torch.randn(4, 64))

    Williams, Waterman and Patterson, Roofline, 2009; Yao et al., HAWQ-V3, arXiv:2011.10680, for choosing by sensitivity.
    """
    allowed = _checked_loss(max_loss)
    words = check_formats(formats, backward=backward, counts_losses=allowed is not None)
    if isinstance(model, nn.Module) and not isinstance(model, Decoder):
        for name, value in (("rows", rows), ("shares", shares), ("context", context)):
            if value is not None:
                raise InvalidInput(f"{name} is {value} and the model a module; leave it out: rows come from the inputs")
        if device != "auto":
            raise InvalidInput(f"device is {device!r} and the model a module; move it and its inputs there, and leave device out")
        if not inputs:
            raise InvalidInput("no inputs are given for the module; give its forward's arguments, as in rooftile.plan(model, x)")
        on = _device_of(model, inputs)
        with unchanged(state_of(model, inputs)):
            target = ModuleTarget(model, inputs, skip, backward=backward)
            return _planned(target, on, words, data, allowed, measure)
    if inputs:
        raise InvalidInput(f"{len(inputs)} inputs are given for a checkpoint; write rows={{'decode': 256}} in place of them")
    if backward:
        raise InvalidInput("backward is True and the model a checkpoint, which only serves; plan a module to train")
    if patterns_of(skip) != SKIPPED:
        raise InvalidInput(f"skip is {skip!r} and the model a checkpoint; leave it out: its embedding and head always stay")
    phases, positions = _phases(rows, shares), None if context is None else _count("context", context)
    decoder, name = _decoder(model, device)
    tokens = min(CONTEXT, decoder.config.max_len) if positions is None else positions
    with unchanged([]):
        there = DecoderTarget(decoder, name, phases, tokens)
        return _planned(there, decoder.embedding.device, words, data, allowed, measure)


def _planned(
    target: Target, device: torch.device, words: tuple[str, ...], data: Any, max_loss: float | None, measure: bool
) -> Plan:  # fmt: skip
    times = Times(stopwatch_for(device), device) if measure else None
    judge = ByError(target) if data is None else ByData(target, data)
    return Builder(target, device, times, judge).plan(words, max_loss, describe(device).name)


def _decoder(model: object, device: str) -> tuple[Decoder, str]:
    if isinstance(model, Decoder):
        return model, f"a decoder ({model.config.family})"
    if not isinstance(model, str | Path):
        raise InvalidInput(f"model is {type(model).__name__}; must be a module, a checkpoint's folder or a Decoder")
    return Decoder.from_folder(model, device=device_of(device)), str(model)


def _device_of(model: nn.Module, inputs: Sequence[Any]) -> torch.device:
    """The one device of a model and its inputs."""
    tensors = [*model.parameters(), *model.buffers(), *(x for x in tree_leaves(inputs) if isinstance(x, Tensor))]
    found = list(dict.fromkeys(x.device for x in tensors))
    if len(found) > 1:
        raise InvalidInput(f"the model and its inputs are on {' and '.join(map(str, found))}; must be on one device: move them")
    if found == [torch.device("meta")]:
        raise InvalidInput("the model and its inputs are on meta, where tensors have no numbers; move them to a CPU or a GPU")
    return found[0] if found else torch.device("cpu")


def _phases(rows: object, shares: object) -> list[Phase]:
    due = "must be such as {'decode': 256, 'prompt': 8192}, or one of them"
    if not isinstance(rows, Mapping) or not rows:
        raise InvalidInput(f"rows is {rows!r}; of a checkpoint {due}")
    other = next((name for name in rows if name not in PHASES), None)
    if other is not None:
        raise InvalidInput(f"rows has {other!r}; {due}")
    if shares is not None and (not isinstance(shares, Mapping) or set(shares) != set(rows)):
        raise InvalidInput(f"shares is {shares!r}; must have a number for each of {', '.join(rows)}")
    other_share = next((share for share in (shares or {}).values() if not isinstance(share, Real)), None)
    if other_share is not None:
        raise InvalidInput(f"shares has {other_share!r}; must have a number for each of {', '.join(rows)}")
    given = dict.fromkeys(rows, 1.0) if shares is None else {name: float(share) for name, share in shares.items()}
    if min(given.values()) < 0 or not 0 < sum(given.values()) < float("inf"):
        raise InvalidInput(f"shares is {shares}; must be numbers that are not negative, and not all 0")
    total = sum(given.values())
    return [Phase(name, _count(f"rows[{name!r}]", count), given[name] / total) for name, count in rows.items()]


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or index(value) < 1:
        raise InvalidInput(f"{name} is {value!r}; must be a whole number, 1 or more")
    return index(value)


def _checked_loss(max_loss: Any) -> float | None:
    if max_loss is None:
        return None
    try:
        found = float(max_loss)
    except (TypeError, ValueError):
        found = -1.0
    if isinstance(max_loss, bool) or not 0 <= found < float("inf"):
        raise InvalidInput(f"max_loss is {max_loss!r}; must be a number, 0 or more, or None for any loss")
    return found
