"""Reads the outputs of models, and computes losses of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils._pytree import tree_leaves

from rooftile.errors import InvalidInput

KINDS = (
    "a function of the model, a tensor of token ids (B, T), or batches of it: dictionaries of arguments that give a loss, or "
    "pairs (input, target)"
)


def first_tensor(result: Any) -> Tensor:
    """Returns the first floating-point tensor of what a model returned: its logits, where it says which they are.

    Raises:
        InvalidInput: there is no such tensor.
    """
    logits = getattr(result, "logits", None)
    found = [logits] if isinstance(logits, Tensor) else [x for x in tree_leaves(_plain(result)) if isinstance(x, Tensor)]
    floating = [x for x in found if x.is_floating_point()]
    if not floating:
        raise InvalidInput(f"the model returns {type(result).__name__} without a floating-point tensor; give data with a loss")
    return floating[0]


def batches_of(data: Any) -> list[Any]:
    """Returns the batches of `data`, which is read once.

    Raises:
        InvalidInput: it is no data.
    """
    is_one = isinstance(data, Tensor | Mapping) or (isinstance(data, tuple) and len(data) == 2)
    if not is_one and not isinstance(data, Iterable):
        raise InvalidInput(f"data is {type(data).__name__}; must be {KINDS}")
    batches = [data] if is_one else list(data)
    if not batches:
        raise InvalidInput(f"data has no batch; must be {KINDS}")
    return batches


def loss_over(model: nn.Module, batches: Sequence[Any]) -> float:
    """Returns the mean loss of batches; each target counts once."""
    total, count = 0.0, 0
    for batch in batches:
        loss, targets = _loss(model, batch)
        total, count = total + float(loss) * targets, count + targets
    return total / count


def _loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """The mean loss of a batch, and its targets."""
    if isinstance(batch, Mapping):
        loss = getattr(model(**batch), "loss", None)
        if loss is None:
            raise InvalidInput(f"the model gives no loss for the arguments {', '.join(batch)}; give labels too, or a function")
        return loss, 1
    if isinstance(batch, Tensor):
        if batch.is_floating_point() or batch.ndim != 2 or batch.shape[1] < 2:
            raise InvalidInput(f"data has {batch.dtype} {tuple(batch.shape)}; must be token ids (B, T), or {KINDS}")
        input, target = batch[:, :-1], batch[:, 1:]
    elif isinstance(batch, Sequence) and len(batch) == 2:
        input, target = batch
    else:
        raise InvalidInput(f"data has a batch of {type(batch).__name__}; must be {KINDS}")
    y = first_tensor(model(input))
    if target.is_floating_point():
        return mse_loss(y.float(), target.float()), target.numel()
    return cross_entropy(y.flatten(0, -2).float(), target.flatten()), target.numel()


def relative_error(y: Tensor, exact: Tensor) -> float:
    """Returns the norm of the difference between y and the exact output, over the norm of the exact output."""
    size = exact.double().norm().item()
    return (y.double() - exact.double()).norm().item() / size if size else 0.0


def _plain(result: Any) -> Any:
    return result.to_tuple() if hasattr(result, "to_tuple") else result


def token_ids(data: Any) -> list[Tensor]:
    """Returns the texts of a decoder's data: token ids (T,) each.

    Raises:
        InvalidInput: it is something else.
    """
    rows = [data] if isinstance(data, Tensor) else list(data) if isinstance(data, Sequence) and data else None
    if rows is not None and all(isinstance(x, int) for x in rows):
        rows = [torch.tensor(rows)]
    if rows is None or not all(isinstance(x, Tensor) and not x.is_floating_point() and 1 <= x.ndim <= 2 for x in rows):
        raise InvalidInput(f"data is {type(data).__name__}; must be token ids of a text (T,) or of several (B, T)")
    found = [text for x in rows for text in (x if x.ndim == 2 else [x])]
    if any(len(text) < 2 for text in found):
        raise InvalidInput("data has a text of fewer than two tokens, which has no next one; must have two and more")
    return found
