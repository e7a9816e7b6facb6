"""mamba-ssm's and causal-conv1d's functions, with their arguments and layouts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.recurrent.convolution import causal_conv, conv_step
from rooftile.recurrent.selective import selective_scan, selective_scan_step
from rooftile.recurrent.state_space import ssd, ssd_step
from rooftile.runtime.words import answers_foreign_words


@answers_foreign_words
def selective_scan_fn(
    u: Tensor,  # (B, D, L)
    delta: Tensor,  # (B, D, L)
    A: Tensor,  # (D, N)
    B: Tensor,  # (B, N, L) or (B, G, N, L)
    C: Tensor,  # (B, N, L) or (B, G, N, L)
    D: Tensor | None = None,  # (D,)
    z: Tensor | None = None,  # (B, D, L)
    delta_bias: Tensor | None = None,  # (D,)
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """The scan of Mamba-1 in mamba-ssm's layout: see `rooftile.recurrent.selective_scan`.

    Returns:
        out (B, D, L) in the dtype of u; with return_last_state (out, state), state (B, D, N) in float32.

    Raises:
        InvalidInput: a shape is wrong.
        Unsupported: B or C is the same for all tokens, or complex.

    Example:
        >>> u, delta, A = torch.randn(2, 32, 50), torch.rand(2, 32, 50), -torch.rand(32, 16)
        >>> selective_scan_fn(u, delta, A, torch.randn(2, 16, 50), torch.randn(2, 16, 50)).shape
        torch.Size([2, 32, 50])
    """
    for name, x in (("A", A), ("B", B), ("C", C)):
        if x.is_complex():
            raise Unsupported(f"{name} is {x.dtype}; has real numbers only")
    for name, x in (("B", B), ("C", C)):
        if x.ndim == 2:
            raise Unsupported(f"{name} is {tuple(x.shape)}, the same for all tokens; has (B, N, L) and (B, G, N, L)")
    y, state = selective_scan(
        _tokens_first(u), _tokens_first(delta), A, _tokens_first(B), _tokens_first(C), D=D,
        z=None if z is None else _tokens_first(z), dt_bias=delta_bias, softplus=delta_softplus,
    )  # fmt: skip
    return (y.mT, state) if return_last_state else y.mT


@answers_foreign_words
def mamba_chunk_scan_combined(
    x: Tensor,  # (B, L, H, P)
    dt: Tensor,  # (B, L, H)
    A: Tensor,  # (H,)
    B: Tensor,  # (B, L, G, N)
    C: Tensor,  # (B, L, G, N)
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,  # (B, H, P, N)
    seq_idx: Tensor | None = None,  # (B, L), int32
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """The recurrence of Mamba-2 with mamba-ssm's arguments: see `rooftile.recurrent.ssd`.

    `chunk_size` changes no result and is not used. With a batch of one, `seq_idx` or `cu_seqlens` gives packed sequences; each
    begins from zero, but for the first, which begins from initial_states.

    Returns:
        out (B, L, H, P); with return_final_states the state after the last token (B, H, P, N), float32; with return_varlen_states
        the state after each sequence of cu_seqlens, too.

    Raises:
        InvalidInput: a shape is wrong, or seq_idx falls.
        Unsupported: packed sequences in a batch of more than one; states in another dtype than float32.

    Example:
        >>> x, dt, A = torch.randn(1, 50, 4, 16), torch.rand(1, 50, 4), -torch.rand(4)
        >>> B, C = torch.randn(1, 50, 1, 32), torch.randn(1, 50, 1, 32)
        >>> mamba_chunk_scan_combined(x, dt, A, B, C, 64).shape
        torch.Size([1, 50, 4, 16])
    """
    if state_dtype not in (None, torch.float32):
        raise Unsupported(f"state_dtype is {state_dtype}; has torch.float32")
    options: dict[str, Any] = {"D": D, "dt_bias": dt_bias, "softplus": dt_softplus, "dt_limit": dt_limit}
    first = None if initial_states is None else initial_states.float()
    if seq_idx is None and cu_seqlens is None:
        if return_varlen_states:
            raise InvalidInput("return_varlen_states is True and cu_seqlens is None; pass the offsets of the sequences")
        y, last = ssd(x, dt, A, B, C, z=z, state=first, **options)
        return (y, last) if return_final_states else y
    if x.shape[0] != 1:
        raise Unsupported(f"packed sequences in a batch of {x.shape[0]}; has a batch of 1: pack all into one row")
    cu = cu_seqlens if cu_seqlens is not None else offsets_of(seq_idx, x.shape[1])
    count = cu.shape[0] - 1
    if first is not None:
        first = torch.cat((first, first.new_zeros(count - 1, *first.shape[1:])))
    y, states = ssd(x[0], dt[0], A, B[0], C[0], z=None if z is None else z[0], state=first, cu=cu, **options)
    found = [y[None]] + [states[-1:]] * return_final_states + [states] * return_varlen_states
    return tuple(found) if len(found) > 1 else found[0]


@answers_foreign_words
def selective_state_update(
    state: Tensor,  # (B, D, N) or (B, H, P, N)
    x: Tensor,  # (B, D) or (B, H, P)
    dt: Tensor,  # as x
    A: Tensor,  # (D, N) or (H, P, N)
    B: Tensor,  # (B, N) or (B, G, N)
    C: Tensor,  # (B, N) or (B, G, N)
    D: Tensor | None = None,  # (D,) or (H, P)
    z: Tensor | None = None,  # as x
    dt_bias: Tensor | None = None,  # (D,) or (H, P)
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,  # (B,), int32
) -> Tensor:
    """One token of each sequence with mamba-ssm's arguments: see `rooftile.recurrent.selective_scan_step`. The state is changed.

    With heads, dt, A, D and dt_bias are mostly expanded views of a number for each head, as mamba-ssm's own layer passes them.

    Example:
        >>> state, x, dt = torch.zeros(2, 32, 16), torch.randn(2, 32), torch.rand(2, 32)
        >>> selective_state_update(state, x, dt, -torch.rand(32, 16), torch.randn(2, 16), torch.randn(2, 16)).shape
        torch.Size([2, 32])
    """
    options: dict[str, Any] = {"softplus": dt_softplus, "slots": state_batch_indices}
    if state.ndim == 3:
        return selective_scan_step(state, x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, **options)
    H, P, N = state.shape[1:]
    one_for_each_head = [(dt, 2), (A, 1), (A, 2), *(() if dt_bias is None else ((dt_bias, 1),))]
    if all(given.stride(axis) == 0 or given.shape[axis] == 1 for given, axis in one_for_each_head):
        bias = None if dt_bias is None else dt_bias[:, 0]
        return ssd_step(state, x, dt[..., 0], A[:, 0, 0], B, C, D=D, z=z, dt_bias=bias, **options)
    flat = state.view(state.shape[0], H * P, N)
    y = selective_scan_step(
        flat, x.flatten(1), dt.flatten(1), A.flatten(0, 1), B, C, D=None if D is None else D.flatten(),
        z=None if z is None else z.flatten(1), dt_bias=None if dt_bias is None else dt_bias.flatten(), **options,
    )  # fmt: skip
    return y.unflatten(1, (H, P))


@answers_foreign_words
def causal_conv1d_fn(
    x: Tensor,  # (B, D, L)
    weight: Tensor,  # (D, K)
    bias: Tensor | None = None,  # (D,)
    seq_idx: Tensor | None = None,  # (B, L), int32
    initial_states: Tensor | None = None,  # (B, D, K - 1)
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,  # (B, D, K - 1)
    activation: str | None = None,
) -> Any:
    """The depthwise causal convolution with causal-conv1d's arguments: see `rooftile.recurrent.causal_conv`.

    Returns:
        out (B, D, L); with return_final_states (out, the last K - 1 inputs (B, D, K - 1)).

    Example:
        >>> causal_conv1d_fn(torch.randn(2, 32, 50), torch.randn(32, 4), activation="silu").shape
        torch.Size([2, 32, 50])
    """
    if seq_idx is None:
        y, tail = causal_conv(_tokens_first(x), weight, bias, activation=activation, tail=initial_states)
        y = y.mT
    else:
        if initial_states is not None or return_final_states:
            raise Unsupported("seq_idx is given with initial_states or return_final_states; has one or the other")
        rows = [
            causal_conv(row.mT, weight, bias, activation=activation, cu=offsets_of(own[None], x.shape[2]), return_tail=False).mT
            for row, own in zip(x, seq_idx, strict=True)
        ]
        return torch.stack(rows)
    if not return_final_states:
        return y
    return y, tail if final_states_out is None else final_states_out.copy_(tail)


@answers_foreign_words
def causal_conv1d_update(
    x: Tensor,  # (B, D) or (B, D, L)
    conv_state: Tensor,  # (B, D, K - 1 or more)
    weight: Tensor,  # (D, K)
    bias: Tensor | None = None,  # (D,)
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,  # (B,), int32
) -> Tensor:
    """One token or a few with causal-conv1d's arguments: see `rooftile.recurrent.conv_step`. The state is changed in place.

    A state of K columns, as mamba-ssm's cache has, keeps one input more than is needed.

    Example:
        >>> state = torch.zeros(2, 32, 4)
        >>> causal_conv1d_update(torch.randn(2, 32), state, torch.randn(32, 4), activation="silu").shape
        torch.Size([2, 32])
    """
    if cache_seqlens is not None:
        raise Unsupported("cache_seqlens makes conv_state circular; has states whose last column is the newest input")
    needed = weight.shape[1] - 1
    if conv_state.shape[-1] < needed:
        raise InvalidInput(f"conv_state has {conv_state.shape[-1]} columns; must have at least {needed}, one less than the taps")
    found = []
    for token in (x[..., None] if x.ndim == 2 else x).unbind(-1):
        if conv_state.shape[-1] == needed:
            found.append(conv_step(conv_state, token, weight, bias, activation=activation, slots=conv_state_indices))
            continue
        rows = conv_state if conv_state_indices is None else conv_state[conv_state_indices.long()]
        tail = rows[..., rows.shape[-1] - needed :].clone()
        found.append(conv_step(tail, token, weight, bias, activation=activation))
        rows = torch.cat((rows[..., 1:], token[..., None].to(rows.dtype)), -1)
        if conv_state_indices is None:
            conv_state.copy_(rows)
        else:
            conv_state.index_copy_(0, conv_state_indices.long(), rows)
    return found[0] if x.ndim == 2 else torch.stack(found, -1)


def _tokens_first(x: Tensor) -> Tensor:
    """Returns (B, ..., L) as (B, L, ...)."""
    return x.movedim(-1, 1)


def offsets_of(seq_idx: Any, length: int) -> Tensor:
    """Returns the offsets of the sequences that seq_idx (1, L) numbers, in a row."""
    if not isinstance(seq_idx, Tensor) or seq_idx.shape != (1, length):
        raise InvalidInput(f"seq_idx is {tuple(getattr(seq_idx, 'shape', ()))}; must be (1, {length})")
    own = seq_idx[0]
    if bool((own.diff() < 0).any()):
        raise InvalidInput("seq_idx falls somewhere; must never fall, so that each sequence lies in a row")
    starts = torch.cat((own.new_zeros(1), own.diff().nonzero()[:, 0] + 1, own.new_full((1,), length)))
    return starts.to(torch.int32)
