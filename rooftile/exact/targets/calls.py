"""The way of a call whose mask has targets: checked whole, cut into calls without targets, and merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact import dispatch
from rooftile.exact.masks import FULL, Mask, check_targets
from rooftile.exact.normalise import completed
from rooftile.exact.reference.merge import merge
from rooftile.exact.spec import Call, decode
from rooftile.exact.targets import dense, packed
from rooftile.exact.targets.own_pair import own_pair

Result = tuple[Tensor, Tensor]


class Parts(NamedTuple):
    """The calls of a call with targets. An absent one has no query."""

    whole: Call  # checked, with its mask
    history: Call | None
    targets: dense.Targets | packed.Targets | None


def attend(call: Call, validate: bool, run: Callable[[Call], Result]) -> Result:
    """Returns o and lse of a dense or packed call whose mask has targets; `run` computes a call whose mask has no targets."""
    whole, history, targets = parts_of(call, validate)
    found = None if history is None else run(history)
    if targets is None:
        assert found is not None
        return found
    o, lse = run(targets.call)
    if targets.excess is not None:
        lse = lse + targets.excess
    parts = [(o, lse), own_pair(targets.call.q, targets.k, targets.v, whole.settings, targets.bias, targets.kept)]
    sinks = whole.options.sinks
    if sinks is not None:
        # a key with a value of zero, which counts once
        parts.append((torch.zeros_like(o), sinks.to(lse.dtype)[:, None].expand_as(lse)))
    return targets.joined(found, merge(parts))


def explained(call: Call) -> tuple[Call, str]:
    """Returns a call of its history, or of its targets if there is no history, and a line that says what runs beside it."""
    whole, history, targets = parts_of(call)
    if history is None or targets is None:
        found = history if targets is None else targets.call
        assert found is not None
        return found, f"targets  {whole.mask}: each sees the history and itself, whose pair is merged"
    spec = decode(completed(targets.call)[1])
    able = next((name for name, reasons in dispatch.verdicts(spec).items() if not reasons), "no backend")
    return history, f"targets  {able} runs the targets over the history, {spec}; their own pairs are merged; below is the history"


def parts_of(call: Call, validate: bool = False) -> Parts:
    """Returns the parts of a call, or raises InvalidInput or Unsupported.

    Args:
        validate: whether offsets on a GPU are read, and checked against the number of targets.
    """
    mask = call.mask
    assert mask is not None
    _check(mask, call)
    if call.is_packed:
        _check_lengths(mask, call, validate)
    # every argument is checked before it is cut
    whole = completed(call._replace(mask=FULL))[0]._replace(mask=mask)
    if not whole.is_packed:
        check_targets(mask, whole.q.shape[1], whole.k.shape[1])
        return Parts(whole, *dense.cut(whole, mask))
    return Parts(whole, *packed.cut(whole, mask))


def _check(mask: Mask, call: Call) -> None:
    """Raises Unsupported for what targets cannot be joined with."""
    settings, options = call.settings, call.options
    if settings.precision != "native":
        raise Unsupported(f"mask {mask} with precision {settings.precision}; has targets in the inputs' own dtype, 'native'")
    if options.block_counts is not None:
        raise Unsupported(f"mask {mask} with blocks=; lists of blocks have no targets: hide the other keys by Window or Chunk")
    if call.is_packed and options.alibi is not None and settings.dropout:
        raise Unsupported(f"mask {mask} with alibi and dropout in packed sequences; has one of them: write the slopes as bias")


def _check_lengths(mask: Mask, call: Call, validate: bool) -> None:
    """Checks that each sequence with queries has its targets among them, where the offsets may be read."""
    cu_q, cu_k = call.options.cu_q, call.options.cu_k
    if not isinstance(cu_q, Tensor) or not isinstance(cu_k, Tensor) or cu_q.shape != cu_k.shape or cu_q.ndim != 1:
        # the checks of every call say what is wrong
        return
    if torch.compiler.is_compiling() or not (validate or (cu_q.device.type == "cpu" and cu_k.device.type == "cpu")):
        return
    for b, (T, S) in enumerate(zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True)):
        if T and mask.targets > min(T, S):
            raise InvalidInput(
                f"mask {mask}, and sequence {b} has {T} queries and {S} keys; must have at least its targets of both, or no query"
            )
