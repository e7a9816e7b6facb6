"""Exact attention on a sequence that several ranks hold in parts: `context_attention`."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact import validate as checks
from rooftile.exact.masks import FULL, Mask
from rooftile.exact.spec import CallSettings, Options, Spec
from rooftile.hardware import link
from rooftile.parallel import gathered, heads, ring
from rooftile.parallel.estimates import choose
from rooftile.parallel.layouts import LAYOUTS, count, ranges
from rooftile.parallel.pieces import share_of
from rooftile.parallel.traffic import Sequence
from rooftile.runtime.arguments import shown, whole
from rooftile.runtime.devices import arch
from rooftile.runtime.operators import transformed
from rooftile.runtime.ranks import Ranks, agreed, check_device, ranks_of
from rooftile.runtime.tensors import autocast, check_offsets
from rooftile.runtime.words import answers_foreign_words

METHODS = ("auto", "gather", "ulysses", "ring")


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
    sinks: Tensor | None = None,
    softcap: float | None = None,
    validate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Self-attention over a sequence whose tokens are dealt out to the P ranks of a group; each rank gets its own rows of o.

    Args:
        q, k, v: this rank's tokens, as `shard` deals them out: (B, T / P, H, D), or packed (total / P, H, D) with `cu`.
        mask: FULL, CAUSAL, Window, Prefix, Chunk, or some joined by `&`; positions are those of the whole sequence.
        group: a process group, a one-dimensional DeviceMesh, or None for the default group. Every rank of it calls this.
        layout: "zigzag" or "contiguous": which tokens a rank holds.
        method: "gather" fetches the keys that a rank's queries see; "ulysses" exchanges tokens for heads by two all-to-alls;
            "ring" passes keys around, so that no rank ever holds more than two ranks' keys; "auto" takes the method that
            `plan` predicts to be the fastest where the GPU is known, and "gather" elsewhere.
        cu: offsets (B + 1,) of the *whole* pack's sequences, the same on every rank. They are read, which waits for a GPU if they
            are there.
        tokens: the whole sequence's length, for lengths that P does not divide. None: every rank holds as many tokens.
        return_lse: return (o, lse).
        bias: (1 or B, 1 or H, 1 or T / P, 1 or T): this rank's rows, every key. Differentiable.
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

    Liu et al., Ring Attention, arXiv:2310.01889; Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    ranks = ranks_of(group)
    check = partial(
        _checked, q, k, v, mask, ranks, Options(bias, alibi, sinks), layout=layout, method=method, dropout=dropout, cu=cu,
        tokens=tokens,
    )  # fmt: skip
    call = agreed(ranks, check, lambda call: call.sizes) if validate else check()
    settings = CallSettings(
        scale, softcap, 0, None, deterministic, "native", True, None, wide_grads=call.method != "ulysses",
        partial=call.method == "ring",
    )  # fmt: skip
    found = call.run(settings, backend)
    return found if return_lse else found[0]


class _Checked(NamedTuple):
    """The arguments of a call, found to be right on this rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    options: Options
    ranks: Ranks
    layout: str
    method: str
    cu: tuple[int, ...] | None
    tokens: int

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Whatever has to be the same on every rank."""
        q, k, v = self.q, self.k, self.v
        outer = (q.shape[:-3], q.shape[-2:], k.shape[-2:], v.shape[-1], str(q.dtype))
        return *outer, repr(self.mask), self.layout, self.method, self.tokens, self.cu

    def run(self, settings: CallSettings, backend: str | None) -> tuple[Tensor, Tensor]:
        """Returns o and lse."""
        q, k, v, mask, options, ranks, layout, method, cu, tokens = self
        if method == "ulysses":
            return heads.attend(q, k, v, mask, options, heads.Problem(ranks, layout, tokens, cu, settings, backend))
        if method == "ring":
            return ring.attend(q, k, v, options.sinks, ring.Problem(ranks, layout, tokens, cu, mask, settings, backend))
        share = share_of(mask, tokens, layout, ranks.rank, ranks.count, cu)
        return gathered.attend(q, k, v, options, gathered.Problem(share, ranks.group, settings, backend))


def _checked(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, ranks: Ranks, options: Options, *, layout: str, method: str,
    dropout: float, cu: Tensor | None, tokens: int | None,
) -> _Checked:  # fmt: skip
    if method not in METHODS:
        raise InvalidInput(f"method is {method!r}; must be one of {', '.join(map(repr, METHODS))}")
    if layout not in LAYOUTS:
        raise InvalidInput(f"layout is {layout!r}; must be one of {', '.join(map(repr, LAYOUTS))}")
    if dropout:
        raise Unsupported(f"dropout {dropout} on a split sequence; has none yet: use dropout=0, or one device")
    if transformed():
        raise Unsupported("context_attention under torch.func; has autograd: call backward(), or torch.autograd.grad")
    if isinstance(q, Tensor) and torch.is_autocast_enabled(q.device.type):
        q, k, v = (autocast(x) for x in (q, k, v))
    checks.check_tensors(q, k, v, checks.DENSE if cu is None else checks.PACKED)
    check_device("q", q, ranks)
    if k.shape[-3] != q.shape[-3]:
        raise InvalidInput(f"k has {k.shape[-3]} tokens on this rank; q has {q.shape[-3]}, and they are the same tokens")
    offsets, total = _length(q, cu, tokens, ranks)
    held = count(ranges(total, ranks.count, layout)[ranks.rank])
    if held != q.shape[-3]:
        raise InvalidInput(
            f"q has {q.shape[-3]} tokens on rank {ranks.rank}; the layout {layout!r} gives it {held} of {total}: "
            "pass what rooftile.parallel.shard returned, and tokens= where the ranks' lengths differ"
        )
    bias = options.bias
    if bias is not None and (cu is not None or bias.ndim < 2):
        raise Unsupported("a bias of packed sequences, or of fewer than two axes, on a split sequence; has (B, H, T / P, T)")
    mask = FULL if mask is None else mask
    if method == "auto":
        method = _chosen(q, k, v, mask, options, ranks, layout, offsets, total)
    if method == "ring" and (options.alibi is not None or bias is not None):
        raise Unsupported(f"{'alibi' if bias is None else 'bias'} with method 'ring'; has none: use method='gather'")
    if method == "ulysses":
        heads.check(q, k, options, ranks)
    if method == "gather" and options.alibi is not None:
        share = share_of(mask, total, layout, ranks.rank, ranks.count, offsets)
        if any(local.piece.ahead for local in share.pieces):
            raise Unsupported(f"alibi under {mask} on a split sequence; has it under masks that look back alone, such as CAUSAL")
    return _Checked(q, k, v, mask, options, ranks, layout, method, offsets, total)


def _chosen(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options, ranks: Ranks, layout: str, cu: tuple[int, ...] | None,
    total: int,
) -> str:  # fmt: skip
    """Returns the method that "auto" takes; every rank finds the same from the same sizes."""
    if q.device.type != "cuda" or ranks.count == 1 or not isinstance(mask, Mask):
        return "gather"
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    spec = Spec(
        dtype=q.dtype, dim=q.shape[-1], dim_v=v.shape[-1], group=q.shape[-2] // k.shape[-2], mask=mask, scale=1.0,
        layout="dense" if cu is None else "packed", has_bias=options.bias is not None, has_alibi=options.alibi is not None,
        device=arch(q.device),
    )  # fmt: skip
    sequence = Sequence(
        tokens=total, ranks=ranks.count, mask=mask, H=q.shape[-2], Hk=k.shape[-2], D=q.shape[-1], Dv=v.shape[-1],
        B=q.shape[0] if cu is None else 1, itemsize=q.element_size(), layout=layout, cu=cu,
    )  # fmt: skip
    device = torch.cuda.get_device_properties(q.device)
    return choose(
        sequence, spec, link.known(ranks.group, q.device), device.name, needs_grad=needs_grad, device_bytes=device.total_memory
    )


def _length(q: Tensor, cu: Tensor | None, tokens: int | None, ranks: Ranks) -> tuple[tuple[int, ...] | None, int]:
    """Returns the offsets of the whole pack, and the whole length."""
    if cu is not None:
        total = int(cu[-1]) if isinstance(cu, Tensor) and cu.ndim == 1 and len(cu) else 0
        check_offsets("cu", cu, total, "tokens of the whole pack", torch.device("cpu"), True)
        if tokens is not None and tokens != total:
            raise InvalidInput(f"tokens is {tokens}; cu ends at {total}, and they must agree")
        return tuple(cu.tolist()), total
    if tokens is None:
        return None, q.shape[-3] * ranks.count
    given = whole(tokens)
    if given is None or given < 0:
        raise InvalidInput(f"tokens is {shown(tokens)}; must be an integer of at least 0, the whole sequence's length")
    return None, given
