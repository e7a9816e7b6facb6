"""Exact attention on a sequence that several ranks hold in parts: `context_attention`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rooftile.exact.masks import FULL, Mask
from rooftile.exact.spec import CallSettings, Options
from rooftile.parallel import gathered, heads, ring
from rooftile.parallel.arguments import Checked, check
from rooftile.parallel.layouts import Held, rows_of
from rooftile.parallel.options import agreed_seed
from rooftile.parallel.pieces import share_of
from rooftile.runtime.ranks import Grid, Ranks, agreed, grid_of
from rooftile.runtime.words import answers_foreign_words


@torch.compiler.disable
@answers_foreign_words
def context_attention(
    q: Tensor,  # (B, T / P, H, D) or (total / P, H, D)
    k: Tensor,  # (B, T / P, Hk, D) or (total / P, Hk, D)
    v: Tensor,  # (B, T / P, Hk, Dv) or (total / P, Hk, Dv)
    mask: Mask | None = FULL,
    *,
    group: Any,
    layout: str = "zigzag",
    method: str = "auto",
    cu: Tensor | None = None,
    tokens: int | None = None,
    return_lse: bool = False,
    alibi: Tensor | None = None,
    backend: str | None = None,
    bias: Tensor | None = None,
    deterministic: bool | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    seed: int | Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    validate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Self-attention over a sequence whose tokens are dealt out to the P ranks of a group; each rank gets its own rows of o.

    Args:
        q, k, v: this rank's tokens, as `shard` deals them out: (B, T / P, H, D), or packed (total / P, H, D) with `cu`.
        mask: FULL, CAUSAL, Window, Prefix, Chunk, or some joined by `&`; positions are those of the whole sequence.
        group: a process group, a DeviceMesh of one or two dimensions, or None for the default group. Every rank of it calls this.
        layout: which tokens a rank holds: "zigzag", even for one causal sequence, "contiguous", or "balanced", even for packed
            documents (see `shard`).
        method: "gather" fetches the keys that a rank's queries see; "ulysses" exchanges tokens for heads by two all-to-alls;
            "ring" passes keys around, so that no rank ever holds more than two ranks' keys. On a mesh of two dimensions
            "usp" exchanges heads within its rows (the second dimension) and passes keys between them, and "usp-gather" fetches
            keys between them. "auto" takes the method that `plan` predicts to be the fastest where the GPU is known,
            elsewhere "gather" or "usp-gather".
        cu: offsets (B + 1,) of the *whole* pack's sequences, the same on every rank. They are read, which waits for a GPU if they
            are there.
        tokens: the whole sequence's length, for lengths that P does not divide. None: every rank holds as many tokens.
        return_lse: return (o, lse).
        bias: (1 or B, 1 or H, 1 or T / P, 1 or T): this rank's rows, every key; or packed (1 or H, 1 or total / P, J), column j
            of it is key j of a row's own sequence. Differentiable.
        seed: for dropout: an int, or an int64 tensor of one element, the same on every rank. None draws one: each rank from
            PyTorch's generator, as one device would, and all take the first rank's. Weights are dropped by their place in the
            whole sequence, so the draw is one device's with this seed.
        validate: check over the group that every rank was given the same problem; costs a small all-gather. Where one rank
            refuses its arguments, all ranks raise.

    The other arguments are as in `rooftile.attention`. Gradients are whole for q, k and v; sinks and a bias that all ranks share
    have on each rank the part of its own rows, as parameters have in data parallel training: the sum over the group is the whole.

    Returns:
        o (B, T / P, H, Dv) in the dtype of q, and with `return_lse` lse (B, H, T / P), fp32.

    Raises:
        InvalidInput: an argument is wrong, on every rank that got it.
        Unsupported: an option has no form on split sequences, or no backend runs the problem.

    Example:
        >>> q, k, v = (shard(x, group, dim=1) for x in (q, k, v))     # doctest: +SKIP
        >>> o = context_attention(q, k, v, rt.CAUSAL, group=group)    # doctest: +SKIP
        >>> o = unshard(o, group, dim=1)                              # doctest: +SKIP

    Liu et al., Ring Attention, arXiv:2310.01889; Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509; Fang and Zhao, USP,
    arXiv:2405.07719.
    """
    ranks = grid_of(group)
    given = CallSettings(scale, softcap, dropout, seed, deterministic, needs_lse=True, backend=backend)
    checked = partial(
        check, q, k, v, mask, ranks, Options(bias, alibi, sinks), given, layout=layout, method=method, cu=cu, tokens=tokens
    )
    call = agreed(ranks, checked, lambda call: call.sizes) if validate else checked()
    call = call._replace(options=call.options._replace(seed=agreed_seed(seed, dropout, q.device, ranks)))
    found = _run(call, given._replace(seed=None, wide_grads=call.method != "ulysses"))
    return found if return_lse else found[0]


def _run(call: Checked, settings: CallSettings) -> tuple[Tensor, Tensor]:
    """Returns o and lse."""
    q, k, v, mask, options, _, ranks, _, method, cu, _ = call
    held = call.held
    if isinstance(ranks, Grid):
        rows, within = rows_of(held, ranks.inner.count)
        between = _gathered if method == "usp-gather" else _ring
        along = partial(between, mask, cu, settings, ranks.outer, rows)
        return heads.attend(q, k, v, options, heads.Problem(ranks.inner, within[ranks.outer.rank]), along)
    if method == "ulysses":
        return heads.attend(q, k, v, options, heads.Problem(ranks, held), partial(heads.attend_whole, mask, cu, settings))
    attend = _ring if method == "ring" else _gathered
    return attend(mask, cu, settings, ranks, held, q, k, v, options)


def _ring(
    mask: Mask, cu: tuple[int, ...] | None, settings: CallSettings, ranks: Ranks, held: Held, q: Tensor, k: Tensor, v: Tensor,
    options: Options, head: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns o and lse of heads from number `head` on, of this rank's queries."""
    return ring.attend(q, k, v, options, ring.Problem(ranks, held, cu, mask, settings._replace(partial=True), head))


def _gathered(
    mask: Mask, cu: tuple[int, ...] | None, settings: CallSettings, ranks: Ranks, held: Held, q: Tensor, k: Tensor, v: Tensor,
    options: Options, head: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    share = share_of(mask, held, ranks.rank, cu, same_first_key=options.bias is not None)
    return gathered.attend(q, k, v, options, gathered.Problem(share, ranks.group, settings, head))
