"""Attention to a paged cache as an operator, `rooftile::attention_paged`; there are no gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.errors import Unsupported
from rooftile.exact import dispatch
from rooftile.exact.ops.attention import fake_attention, listed, named_options
from rooftile.exact.spec import Options, decode
from rooftile.kvcache import PagedKV
from rooftile.runtime.operators import define, watched


def attend_paged(q: Tensor, cache: PagedKV, options: Options, spec: str, backend: str) -> tuple[Tensor, Tensor]:
    """The operator where a compiler, mode or profiler watches; the backend's function elsewhere."""
    given = listed(options)
    # on meta the operator gives shapes and dtypes
    if torch.compiler.is_compiling() or watched(q, cache.k, cache.v, cache.table, cache.lengths, *given) or q.is_meta:
        with torch.no_grad():
            found: tuple[Tensor, Tensor] = _PAGED(
                q,
                cache.k,
                cache.v,
                cache.table,
                cache.lengths,
                cache.cu_q,
                cache.k_scale,
                cache.v_scale,
                given,
                spec,
                backend,
            )
        return found
    return dispatch.BACKENDS[backend].attend_paged(q, cache, options, decode(spec))


def _run(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, cu_q: Tensor | None, k_scale: Tensor | None,
    v_scale: Tensor | None, options: list[Tensor], spec: str, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    problem = decode(spec)
    cache = PagedKV(k, v, table, lengths, cu_q, k_scale, v_scale)
    return dispatch.BACKENDS[backend].attend_paged(q, cache, named_options(problem, options), problem)


def _fake(q, k, v, table, lengths, cu_q, k_scale, v_scale, options, spec: str, backend: str) -> tuple[Tensor, Tensor]:
    return fake_attention(q, k, v, options, spec, backend)


_PAGED = define(
    "attention_paged(Tensor q, Tensor k, Tensor v, Tensor table, Tensor lengths, Tensor? cu_q, Tensor? k_scale, Tensor? v_scale, "
    "Tensor[] options, str spec, str backend) -> (Tensor, Tensor)",
    _run,
    _fake,
)


def without_backward(o: Tensor, lse: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """o and lse as results of inputs that require gradients: a backward through them says that there is none."""
    found: tuple[Tensor, Tensor] = _NoBackward.apply(o, lse, *inputs)
    return found


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(o, lse, *inputs):
        return o.view_as(o), lse.view_as(lse)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keeps nothing; torch.func takes no Function without it."""

    @staticmethod
    def backward(ctx, *grads):
        raise Unsupported(
            "a backward through attention to a paged cache; it has none: compute the loss from rooftile.attention, or call "
            "attention_paged under torch.no_grad()"
        )
