"""A context in which attention is over a sequence that the ranks of a group hold in parts; no line of a model changes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact import split
from rooftile.exact.masks import CAUSAL, FULL
from rooftile.exact.spec import Call
from rooftile.parallel.arguments import check, check_method, explained
from rooftile.parallel.attention import context_attention
from rooftile.parallel.layouts import check_layout
from rooftile.parallel.sharding import positions
from rooftile.recurrent.split import context as recurrences
from rooftile.recurrent.split.context import SplitSequence
from rooftile.runtime.ranks import Grid, Ranks, grid_of

# behind nn.MultiheadAttention and nn.TransformerEncoderLayer
_MODULES_OF_TORCH = (
    torch.nn.functional.multi_head_attention_forward, torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd
)  # fmt: skip


@contextmanager
def context(
    group: Any, layout: str = "zigzag", method: str = "auto", *, cu: Tensor | None = None, tokens: int | None = None
) -> Iterator[None]:
    """Makes attention in this thread run over the whole sequence, of which each rank of the group holds a part.

    Inside, `rooftile.attention` and `attention_with_lse`, F.scaled_dot_product_attention and models of Transformers with
    attn_implementation="rooftile" compute self-attention as `context_attention` does. Give the model this rank's tokens
    (`shard`) and their positions (`positions`). Attention to other keys, and what has no form on split sequences, is refused.

    Args:
        group: a process group, a DeviceMesh of one or two dimensions, or None for the default group.
        layout, method: as in `context_attention`.
        cu: offsets (B + 1,) of documents in the whole sequence, which do not see each other. The batch is 1 then.
        tokens: the whole length, for lengths that the ranks do not divide.

    Activation checkpointing runs the forward again in the backward, outside of any context: give torch.utils.checkpoint
    context_fn=checkpoint_contexts. Without it, the backward refuses.

    Example:
        >>> with parallel.context(mesh["cp"]):                                                        # doctest: +SKIP
        ...     loss = model(shard(ids, mesh["cp"]), position_ids=positions(T, mesh["cp"])[None])     # doctest: +SKIP
    """
    ranks = grid_of(group)
    check_layout(layout, cu is not None)
    check_method(method, ranks)
    shared = group if isinstance(ranks, Grid) else ranks.group
    attend = _Attention(shared, layout, method, cu, tokens)
    places = partial(_places, ranks=ranks, group=shared, layout=layout, cu=cu, tokens=tokens)
    with _entered(attend, SplitSequence(shared, layout, cu, places)):
        yield


def _places(
    held: int, *, ranks: Ranks | Grid, group: Any, layout: str, cu: Tensor | None, tokens: int | None
) -> Tensor:  # fmt: skip
    """Returns the places of this rank's tokens, of which it holds some."""
    total = int(cu[-1]) if cu is not None else held * ranks.count if tokens is None else tokens
    found = positions(total, group, layout, cu)
    if len(found) != held:
        raise InvalidInput(
            f"rank {ranks.rank} has {held} tokens inside rooftile.parallel.context; the layout {layout!r} gives it {len(found)} "
            f"of {total}: give the context tokens= where the ranks' lengths differ"
        )
    return found


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Gives torch.utils.checkpoint its `context_fn`: the forward that runs again in the backward is in this context, too.

    Outside of a context it says that the forward was outside, so one function serves all checkpoints.

    Example:
        >>> checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_contexts)      # doctest: +SKIP
    """
    current, sequence = split.CURRENT.get(), recurrences.CURRENT.get()
    return _same(), _entered(current if callable(current) else False, sequence or False)


@contextmanager
def _same() -> Iterator[None]:
    yield


@contextmanager
def _entered(attend: Any, sequence: SplitSequence | bool) -> Iterator[None]:
    token, own = split.enter(attend), recurrences.enter(sequence)
    try:
        if callable(attend):
            with _TorchAttention():
                yield
        else:
            yield
    finally:
        split.CURRENT.reset(token)
        recurrences.CURRENT.reset(own)


class _Attention(NamedTuple):
    """Runs this thread's calls of `rooftile.attention` inside of a context."""

    group: Any
    layout: str
    method: str
    cu: Tensor | None
    tokens: int | None

    def __call__(self, call: Call) -> tuple[Tensor, Tensor]:
        """Returns o and lse of a call, over the group."""
        q, k, v, mask, options, settings, _ = self._plain(call)
        with split_off():
            o, lse = context_attention(
                q, k, v, mask, group=self.group, layout=self.layout, method=self.method, cu=self.cu, tokens=self.tokens,
                return_lse=True, alibi=options.alibi, backend=settings.backend, bias=options.bias,
                deterministic=settings.deterministic, dropout=settings.dropout, scale=settings.scale, seed=settings.seed,
                sinks=options.sinks, softcap=settings.softcap,
            )  # fmt: skip
        return (o.unsqueeze(0), lse.unsqueeze(0)) if self.cu is not None else (o, lse)

    def explained(self, call: Call) -> tuple[str, Call]:
        """Says how a call would run, and returns a call that gets the backend of its parts."""
        q, k, v, mask, options, settings, _ = self._plain(call)
        checked = check(
            q, k, v, mask, grid_of(self.group), options, settings, layout=self.layout, method=self.method, cu=self.cu,
            tokens=self.tokens,
        )  # fmt: skip
        method = checked.method
        settings = settings._replace(needs_lse=True, wide_grads=method != "ulysses", partial=method in ("ring", "usp"))
        options = call.options
        if isinstance(options.bias, Tensor):
            # a part has the columns of its own keys
            B, T, H, _ = call.q.shape
            options = options._replace(bias=options.bias.flatten()[:1].expand(B, H, T, T))
        return f"{explained(checked)}; the backends are those of its parts", call._replace(options=options, settings=settings)

    def _plain(self, call: Call) -> Call:
        """Returns a call over this rank's tokens, as `context_attention` takes it."""
        q, k, v, _, options, settings, is_packed = call
        if is_packed:
            raise Unsupported(
                "packed sequences inside rooftile.parallel.context; give the whole pack's offsets to the context (cu=), and "
                "this rank's tokens to rooftile.attention with a batch of 1"
            )
        if settings.precision != "native":
            raise Unsupported(f"precision {settings.precision} inside rooftile.parallel.context; has the inputs' own")
        if k.shape[1] != q.shape[1]:
            raise Unsupported(
                f"k has {k.shape[1]} tokens and q has {q.shape[1]} inside rooftile.parallel.context; it has self-attention: "
                "call attention to other keys outside of it"
            )
        if self.cu is not None:
            if q.shape[0] != 1:
                raise InvalidInput(f"q has batch {q.shape[0]} inside rooftile.parallel.context(cu=...); a pack has batch 1")
            q, k, v = (x.squeeze(0) for x in (q, k, v))
            if isinstance(options.bias, Tensor) and options.bias.ndim == 4:
                options = options._replace(bias=options.bias.squeeze(0))
        return call._replace(q=q, k=k, v=v, options=options)


@contextmanager
def split_off() -> Iterator[None]:
    """The calls that attention on split sequences makes itself are over tensors that are there."""
    token = split.enter(False)
    try:
        yield
    finally:
        split.CURRENT.reset(token)


class _TorchAttention(TorchFunctionMode):
    """Takes F.scaled_dot_product_attention, whatever `rooftile.enable` has done, and refuses what attends in another way."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _of_torch(*args, **(kwargs or {}))
        if _attends(func):
            raise Unsupported(
                f"{getattr(func, '__name__', func)} inside rooftile.parallel.context, where it would attend to this rank's "
                "tokens alone; call F.scaled_dot_product_attention or rooftile.attention, or give a model of Transformers "
                "attn_implementation='rooftile'"
            )
        return func(*args, **(kwargs or {}))


def _attends(func: Any) -> bool:
    """Whether a function of PyTorch, or an operator of another library, computes attention by itself."""
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._ops.HigherOrderOperator):
        name = str(func)
        return any(part in name for part in ("attention", "attn", "fmha")) and not name.startswith("rooftile.")
    return func in _MODULES_OF_TORCH


def _in_reentrant_checkpoint() -> bool:
    from torch.utils.checkpoint import CheckpointFunction

    frame, code = sys._getframe(), CheckpointFunction.forward.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _of_torch(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    from rooftile.exact.api import attention

    if attn_mask is not None:
        raise Unsupported(
            "F.scaled_dot_product_attention with attn_mask inside rooftile.parallel.context, where a rank's mask would need all "
            "keys; use is_causal=True, or attn_implementation='rooftile' for a model of Transformers"
        )
    if not torch.is_grad_enabled() and _in_reentrant_checkpoint():
        raise Unsupported(
            "F.scaled_dot_product_attention inside rooftile.parallel.context and a reentrant checkpoint, whose backward runs "
            "outside of the context; pass use_reentrant=False and context_fn=rooftile.parallel.checkpoint_contexts"
        )
    if query.ndim != 4:
        raise Unsupported(
            f"F.scaled_dot_product_attention of {query.ndim} axes inside rooftile.parallel.context; has (B, H, T, D)"
        )
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise InvalidInput(f"query has {query.shape[1]} heads and key has {key.shape[1]}; pass enable_gqa=True")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    o = attention(q, k, v, CAUSAL if is_causal else FULL, dropout=dropout_p, scale=scale)
    return o.transpose(1, 2)
