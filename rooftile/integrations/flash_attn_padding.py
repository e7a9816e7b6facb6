"""flash_attn.bert_padding: rows of a padded batch without their padding, and back.

from rooftile.integrations.flash_attn_padding import pad_input, unpad_input    # was: from flash_attn.bert_padding import ...
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.exact.ops.unpad import put_rows, take_rows
from rooftile.runtime.arguments import shown

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def unpad_input(
    hidden_states: Tensor,  # (B, S, ...)
    attention_mask: Tensor,  # (B, S), 1 or True where there is a token
    unused_mask: Tensor | None = None,  # (B, S), 1 or True for tokens that are allocated and not used
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Rows with a token, back to back, and their places. Reads their number, which waits for a GPU.

    Returns:
        rows (total, ...) of both masks; their indices (total,) into the B S rows; offsets (B + 1,), int32; the longest length, an
        int; and the tokens of attention_mask alone (B,), int32.

    Example:
        >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        >>> rows, indices, offsets, longest, used = unpad_input(torch.randn(2, 3, 8), mask)
        >>> indices.tolist(), offsets.tolist(), longest
        ([0, 1, 3], [0, 2, 3], 2)
    """
    if attention_mask.shape != hidden_states.shape[:2]:
        raise InvalidInput(
            f"attention_mask is {shown(attention_mask)}; must be (B, S) as in hidden_states, {tuple(hidden_states.shape[:2])}"
        )
    there = attention_mask != 0
    every = there if unused_mask is None else there | (unused_mask != 0)
    lengths = every.sum(-1, dtype=torch.int32)
    indices = every.flatten().nonzero()[:, 0]
    longest = int(lengths.max()) if lengths.numel() else 0
    offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return take_rows(hidden_states.flatten(0, 1), indices), indices, offsets, longest, there.sum(-1, dtype=torch.int32)


def pad_input(
    hidden_states: Tensor,  # (total, ...)
    indices: Tensor,  # (total,)
    batch: int,
    seqlen: int,
) -> Tensor:
    """Undoes `unpad_input`: (batch, seqlen, ...), zero where there is no token.

    Example:
        >>> pad_input(torch.tensor([[7.0], [8.0]]), torch.tensor([0, 3]), 2, 2)[:, :, 0]
        tensor([[7., 0.],
                [0., 8.]])
    """
    return put_rows(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def index_first_axis(
    x: Tensor,  # (N, ...)
    indices: Tensor,  # (M,)
) -> Tensor:
    """x[indices], (M, ...). An index may occur twice: its gradients are added, where flash-attn keeps one of them.

    Example:
        >>> index_first_axis(torch.arange(5), torch.tensor([3, 1]))
        tensor([3, 1])
    """
    return x.index_select(0, indices)


def index_put_first_axis(
    values: Tensor,  # (M, ...)
    indices: Tensor,  # (M,), none twice
    first_axis_dim: int,
) -> Tensor:
    """Zeros (first_axis_dim, ...) with `values` in the given rows.

    Example:
        >>> index_put_first_axis(torch.tensor([7, 8]), torch.tensor([3, 1]), 5)
        tensor([0, 8, 0, 7, 0])
    """
    return put_rows(values, indices, first_axis_dim)
