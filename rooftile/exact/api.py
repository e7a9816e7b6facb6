"""The public functions: exact attention on whatever backend runs it fastest.

A call goes `attention -> normalise -> completed (validate.spec_code) -> dispatch.choose -> ops.attend -> backends.X.forward`. A
call like one before it goes `attention -> ops.prepared -> backends.X`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact import dispatch, ops, reference, split
from rooftile.exact import validate as checks
from rooftile.exact.backends import eager
from rooftile.exact.blocks import Blocks
from rooftile.exact.masks import FULL, Mask
from rooftile.exact.normalise import completed, normalise
from rooftile.exact.spec import NO_OPTIONS, Call, CallSettings, Options, Spec, decode
from rooftile.exact.targets import calls as targets
from rooftile.kvcache import PagedKV
from rooftile.numerics import QuantisedQKV, QuantisedRows
from rooftile.numerics.precision import Precision, recipe_of
from rooftile.runtime.arguments import shown
from rooftile.runtime.explanation import Explanation
from rooftile.runtime.operators import mapped, transformed, transforms_active
from rooftile.runtime.words import answers_foreign_words
from rooftile.weights import QuantisedWeight
from rooftile.weights.linear import explain_linear
from rooftile.weights.two_four import TwoFour

_DEFAULT_SETTINGS = CallSettings()


@answers_foreign_words
def attention(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    mask: Mask | None = FULL,
    *,
    alibi: Tensor | None = None,
    backend: str | None = None,
    bias: Tensor | None = None,
    blocks: Blocks | None = None,
    deterministic: bool | None = None,
    dropout: float = 0.0,
    key_padding_mask: Tensor | None = None,
    precision: str | Precision = "native",
    scale: float | None = None,
    seed: int | Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Exact attention, softmax(scale q k^T) v, in tiles that never hold a T x S matrix.

    Args:
        q: queries (B, T, H, D), float32, bfloat16 or float16, any strides: `x.transpose(1, 2)` of (B, H, T, D) costs no copy.
        k: keys (B, S, Hk, D). Hk divides H; each key head serves H / Hk query heads (MQA, GQA).
        v: values (B, S, Hk, Dv). Dv may differ from D. All three may be nested tensors (B, j, H, D) with layout=torch.jagged:
            they are computed as packed sequences, and o is nested with the offsets of q.
        mask: FULL, CAUSAL, Window, Prefix, Chunk, Targets, or some joined by `&`. Aligned bottom-right when T != S. None is
            FULL. Or FlexAttention's BlockMask, which is aligned top-left.
        alibi: slopes (H,) or (B, H); adds -slope |i - j| to the scores.
        backend: "hopper", "triton", "sdpa", "tiled" or "eager"; None takes the fastest that runs the problem (see `explain`).
        bias: added to the scores; broadcasts to (B, H, T, S). Differentiable. Or booleans, True where a key is seen: they hide
            keys as -inf does. What is broadcast is not copied out.
        blocks: lists of the key blocks that each block of queries sees; the mask hides more inside of them.
        deterministic: bit-equal gradients from run to run. None follows torch.use_deterministic_algorithms.
        dropout: probability in [0, 1) of dropping a weight.
        key_padding_mask: booleans (B, S) as PyTorch's modules take them, True for keys that none sees. Where the answer is the
            same, the other keys are computed as packed sequences, on any backend; else it is a boolean bias. To choose, it is
            read, which waits for a GPU; torch.compile and CUDA graphs take the bias. Queries stay as they are.
        precision: formats of the two products: "native", the inputs' own; "fp8"; "int8" (of queries and keys; weights and
            values are FP8 then); or a `Precision`. Gradients are native attention's on the same inputs: its forward is
            run again for them.
        scale: of the scores; 1 / sqrt(D) if None.
        seed: for dropout: an int, or an int64 tensor of one element (CUDA graphs); None draws one from torch's generator.
            The same seed gives the same mask on every backend.
        sinks: a logit per head (H,) that takes part in the softmax with a value of zero. Differentiable.
        softcap: scores become softcap * tanh(scores / softcap), before bias. None or 0 for none.

    Returns:
        o (B, T, H, Dv), contiguous, in the dtype of q. A row that sees no key is 0.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due.
        Unsupported: the named backend, or every backend, refuses; lists the reasons.

    Example:
        >>> q, k, v = (torch.randn(1, 128, 8, 64) for _ in range(3))
        >>> attention(q, k, v, CAUSAL & Window(64)).shape
        torch.Size([1, 128, 8, 64])

    Dao et al., FlashAttention, arXiv:2205.14135; Dao, FlashAttention-2, arXiv:2307.08691.
    """
    settings = CallSettings(scale, softcap, dropout, seed, deterministic, precision, False, backend)
    options = _options(bias, alibi, sinks)
    return attend(q, k, v, mask, options, settings, blocks, key_padding_mask)[0]


@answers_foreign_words
def attention_with_lse(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    mask: Mask | None = FULL,
    *,
    alibi: Tensor | None = None,
    backend: str | None = None,
    bias: Tensor | None = None,
    blocks: Blocks | None = None,
    deterministic: bool | None = None,
    dropout: float = 0.0,
    key_padding_mask: Tensor | None = None,
    precision: str | Precision = "native",
    scale: float | None = None,
    seed: int | Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention`, and the log-sum-exp of each row's scores; gradients flow through both.

    Takes what `attention` takes. Returns o (B, T, H, Dv) and lse (B, H, T), fp32, natural log, the sink included,
    -inf for a row that sees nothing.

    Example:
        >>> q, k, v = (torch.randn(1, 128, 8, 64) for _ in range(3))
        >>> near = attention_with_lse(q, k[:, 64:], v[:, 64:])
        >>> far = attention_with_lse(q, k[:, :64], v[:, :64])
        >>> o, lse = merge([near, far])
    """
    settings = CallSettings(scale, softcap, dropout, seed, deterministic, precision, True, backend)
    options = _options(bias, alibi, sinks)
    return attend(q, k, v, mask, options, settings, blocks, key_padding_mask)


@answers_foreign_words
def attention_packed(
    q: Tensor,  # (total_q, H, D)
    k: Tensor,  # (total_k, Hk, D)
    v: Tensor,  # (total_k, Hk, Dv)
    cu_q: Tensor,  # (B + 1,)
    cu_k: Tensor,  # (B + 1,)
    mask: Mask | None = FULL,
    *,
    alibi: Tensor | None = None,
    backend: str | None = None,
    bias: Tensor | None = None,
    blocks: Blocks | None = None,
    deterministic: bool | None = None,
    dropout: float = 0.0,
    precision: str | Precision = "native",
    scale: float | None = None,
    seed: int | Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    validate: bool = False,
) -> Tensor:
    """`attention` on sequences laid back to back: no padding, and no sequence sees another.

    Args:
        cu_q: offsets (B + 1,), int32 or int64: sequence b has queries cu_q[b] to cu_q[b + 1]. On the host they are checked
            and copied over; on a GPU they are trusted, unless validate is set.
        cu_k: the same for keys and values. A sequence may have no query, or no key.
        bias: (1 or H, 1 or total_q, J): row t of it goes to packed query t, column j to its sequence's key j.
        blocks: lists for the blocks of each sequence, in the places that `rooftile.Blocks` says.
        validate: read the offsets back and check them, which waits for the GPU.

    The other arguments are as in `attention`; masks and ALiBi count positions within a sequence.

    Returns:
        o (total_q, H, Dv).

    Example:
        >>> q, k, v = (torch.randn(10, 4, 64) for _ in range(3))
        >>> cu = torch.tensor([0, 3, 10])
        >>> attention_packed(q, k, v, cu, cu, CAUSAL).shape
        torch.Size([10, 4, 64])
    """
    settings = CallSettings(scale, softcap, dropout, seed, deterministic, precision, False, backend)
    options = Options(bias, alibi, sinks, None, cu_q, cu_k)
    return attend(q, k, v, mask, options, settings, blocks, is_packed=True, validate=validate)[0]


@answers_foreign_words
def attention_packed_with_lse(
    q: Tensor,  # (total_q, H, D)
    k: Tensor,  # (total_k, Hk, D)
    v: Tensor,  # (total_k, Hk, Dv)
    cu_q: Tensor,  # (B + 1,)
    cu_k: Tensor,  # (B + 1,)
    mask: Mask | None = FULL,
    *,
    alibi: Tensor | None = None,
    backend: str | None = None,
    bias: Tensor | None = None,
    blocks: Blocks | None = None,
    deterministic: bool | None = None,
    dropout: float = 0.0,
    precision: str | Precision = "native",
    scale: float | None = None,
    seed: int | Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    validate: bool = False,
) -> tuple[Tensor, Tensor]:
    """`attention_packed`, and lse (H, total_q); gradients flow through both."""
    settings = CallSettings(scale, softcap, dropout, seed, deterministic, precision, True, backend)
    options = Options(bias, alibi, sinks, None, cu_q, cu_k)
    return attend(q, k, v, mask, options, settings, blocks, is_packed=True, validate=validate)


@answers_foreign_words
def quantise_qkv(
    q: Tensor,  # (B, T, H, D), or packed (total_q, H, D)
    k: Tensor,  # (B, S, Hk, D), or (total_k, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv), or (total_k, Hk, Dv)
    precision: str | Precision = "fp8",
    *,
    backend: str | None = None,
    cu_k: Tensor | None = None,
    cu_q: Tensor | None = None,
) -> QuantisedQKV:
    """Queries, keys and values in the formats of a recipe, for those who keep them so; `attention_quantised` takes them.

    Args:
        precision: "fp8", "int8" or a `Precision`.
        backend: who quantises; None takes the fastest that has the recipe. "hopper" puts values in columns, which only it reads,
            and the others in rows (`QuantisedQKV.v_order`).
        cu_q, cu_k: offsets (B + 1,) of packed sequences, as in `attention_packed`.

    Nothing of it has a gradient; `attention(..., precision=...)` has.

    Example:
        >>> q, k, v = (torch.randn(1, 300, 8, 64) for _ in range(3))
        >>> qkv = quantise_qkv(q, k, v, "int8")
        >>> qkv.q.dtype, qkv.v.dtype
        (torch.int8, torch.float8_e4m3fn)
        >>> o = attention_quantised(qkv, CAUSAL)
    """
    checks.check_query(q)
    recipe = recipe_of(precision)
    if recipe is None:
        raise InvalidInput("precision is native; must be one that quantises: 'fp8', 'int8' or a rooftile.Precision")
    if (cu_q is None) != (cu_k is None):
        raise InvalidInput("cu_q and cu_k must both be given (packed sequences), or neither")
    options = Options() if cu_q is None else checks.check_packed(q, k, Options(cu_q=cu_q, cu_k=cu_k), False)
    with torch.no_grad():
        code = checks.spec_code(q, k, v, FULL, options, CallSettings(precision=recipe, deterministic=False))
        return ops.quantise_qkv(q, k, v, options, recipe, code, _choose(code, backend))


@answers_foreign_words
def attention_quantised(
    qkv: QuantisedQKV,
    mask: Mask | None = FULL,
    *,
    backend: str | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`attention` on what `quantise_qkv` made: o (B, T, H, Dv), or packed (total_q, H, Dv), in the dtype of the original.

    The arguments are as in `attention`. A backend that cannot read the order of the values refuses.

    Example:
        >>> qkv = quantise_qkv(*(torch.randn(1, 300, 8, 64) for _ in range(3)))
        >>> attention_quantised(qkv, CAUSAL & Window(64)).shape
        torch.Size([1, 300, 8, 64])
    """
    return attention_quantised_with_lse(qkv, mask, backend=backend, scale=scale, sinks=sinks, softcap=softcap)[0]


@answers_foreign_words
def attention_quantised_with_lse(
    qkv: QuantisedQKV,
    mask: Mask | None = FULL,
    *,
    backend: str | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention_quantised`, and lse (B, H, T), or packed (H, total_q): of the original keys, also where they were smoothed."""
    if not isinstance(qkv, QuantisedQKV):
        raise InvalidInput(f"qkv is {shown(qkv)}; must be what quantise_qkv returns")
    options = Options(sinks=sinks)
    code = checks.quantised_code(qkv, mask, options, CallSettings(scale, softcap, deterministic=False))
    with torch.no_grad():
        return ops.attend_quantised(qkv, options, code, _choose(code, backend))


@answers_foreign_words
def attention_paged(
    q: Tensor,  # (B, T, H, D) or (total_q, H, D)
    cache: PagedKV,
    mask: Mask | None = FULL,
    *,
    alibi: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
    scale: float | None = None,
    shared_prefix: int = 0,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of queries to keys and values that lie in the blocks of a paged cache.

    Args:
        q: queries (B, T, H, D), T of each sequence, or (total_q, H, D), packed by `cache.cu_q`. They are a sequence's last
            tokens: masks and ALiBi are aligned bottom-right, as everywhere. One of each is decoding, many are a prompt or a part.
        cache: the blocks of a layer and the sequences' tables (`rooftile.kvcache.PagedKV`); what the queries see of themselves
            has been written there.
        mask: CAUSAL, or what `attention` takes.
        deterministic: a sequence's output does not depend on its neighbours in the batch, bit for bit. None follows
            torch.use_deterministic_algorithms.
        shared_prefix: number of tokens at the beginning of every sequence that lie in the same, whole blocks: they are read once
            for all queries together, and what was found is merged with the rest (cascade attention). Queries come after them;
            mask FULL or CAUSAL, no ALiBi.

    The other arguments are as in `attention`. There are no gradients: a backward through the result raises Unsupported.

    Returns:
        o (B, T, H, Dv) or (total_q, H, Dv), in the dtype of q.

    Example:
        >>> from rooftile.kvcache import PagedKV
        >>> k, v = torch.randn(2, 10, 16, 2, 64)                       # ten blocks of 16 tokens each
        >>> table, lengths = torch.tensor([[3, 7], [1, 0]], dtype=torch.int32), torch.tensor([20, 9], dtype=torch.int32)
        >>> attention_paged(torch.randn(2, 1, 4, 64), PagedKV(k, v, table, lengths), CAUSAL).shape
        torch.Size([2, 1, 4, 64])

    Kwon et al., PagedAttention, arXiv:2309.06180.
    """
    return attention_paged_with_lse(
        q, cache, mask, alibi=alibi, backend=backend, deterministic=deterministic, scale=scale, shared_prefix=shared_prefix,
        sinks=sinks, softcap=softcap,
    )[0]  # fmt: skip


@answers_foreign_words
def attention_paged_with_lse(
    q: Tensor,  # (B, T, H, D) or (total_q, H, D)
    cache: PagedKV,
    mask: Mask | None = FULL,
    *,
    alibi: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
    scale: float | None = None,
    shared_prefix: int = 0,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention_paged`, and lse (B, H, T), or packed (H, total_q)."""
    checks.check_query(q)
    if not isinstance(cache, PagedKV):
        raise InvalidInput(f"cache is {shown(cache)}; must be a rooftile.kvcache.PagedKV")
    if shared_prefix:
        checks.check_shared_prefix(q, cache, mask, alibi, shared_prefix)
        same = partial(attention_paged_with_lse, backend=backend, deterministic=deterministic, scale=scale, softcap=softcap)
        rows = q.flatten(0, -3)
        shared, rest = cache.cut(shared_prefix, rows.shape[0])
        o, lse = same(rows, shared, FULL)
        if q.ndim == 4:
            o, lse = o.view(*q.shape[:-1], -1), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
        with torch.no_grad():
            return merge([(o, lse), same(q, rest, mask, sinks=sinks)])
    if transformed() and mapped(q, cache.k, cache.v, cache.table, cache.lengths):
        raise Unsupported(
            "attention_paged under torch.vmap, which maps an axis of q or of the cache; has none: put all sequences into one "
            "cache, and their queries into one batch"
        )
    settings = CallSettings(scale, softcap, deterministic=deterministic, backend=backend)
    attend = prepare_paged(q, cache, mask, Options(alibi=alibi, sinks=sinks), settings)
    with torch.no_grad():
        found = attend(q, cache)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, cache.k, cache.v)):
        return ops.without_backward(*found, q, cache.k, cache.v)
    return found


def prepare_paged(
    q: Tensor, cache: PagedKV, mask: Mask | None, options: Options = NO_OPTIONS, settings: CallSettings = _DEFAULT_SETTINGS
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Checks a call of `attention_paged_with_lse` once, for all calls that differ from it in nothing but tensors' contents.

    The result takes q, the cache, and options if their tensors are others than here.
    """
    code = checks.paged_code(q, cache, mask, options, settings)
    chosen = _choose(code, settings.backend)
    return lambda q, cache, options=options: ops.attend_paged(q, cache, options, code, chosen)


@answers_foreign_words
def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys, from its (o, lse) over each. Exact and differentiable.

    Args:
        parts: pairs of o (B, T, H, Dv) and lse (B, H, T), or packed (total, H, Dv) and (H, total), on the same queries.

    Returns:
        o in the dtype of the first part, and lse.

    Example:
        >>> q, k, v = (torch.randn(1, 128, 8, 64) for _ in range(3))
        >>> o, lse = merge([attention_with_lse(q, k[:, s], v[:, s]) for s in (slice(0, 50), slice(50, 128))])
    """
    return reference.merge(checks.check_parts(parts))


@answers_foreign_words
def explain(
    q: Tensor | QuantisedRows,
    k: Tensor | QuantisedWeight | TwoFour,
    v: Tensor | None = None,
    mask: Mask | None = FULL,
    *,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    blocks: Blocks | None = None,
    deterministic: bool | None = None,
    dropout: float = 0.0,
    key_padding_mask: Tensor | None = None,
    needs_lse: bool = False,
    precision: str | Precision = "native",
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Explanation:
    """Shows which backend `attention` would run on these arguments, and every reason why the others would not. Runs nothing.

    The answer is a text, with the chosen `backend` and all `refusals` as attributes; a notebook shows it as a table. Inside
    `rooftile.parallel.context` a line says by which method the ranks share the call, and what is predicted of it.
    `explain(x, weight)` does so for `linear`, where weight is what `quantise_weight` or `sparsity.compress` returned.

    Example:
        >>> print(explain(q, k, v, CAUSAL))
        >>> print(explain(torch.randn(3, 64), quantise_weight(torch.randn(32, 64), "w8")))
    """
    if isinstance(k, QuantisedWeight | TwoFour):
        return explain_linear(q, k)
    if isinstance(q, QuantisedRows) or v is None:
        raise InvalidInput("explain got no v; give q, k and v of attention, or x and a QuantisedWeight or TwoFour")
    # a seed is not drawn: nothing runs
    settings = CallSettings(scale, softcap, dropout, 0 if dropout else None, deterministic, precision, needs_lse)
    checks.check_query(q)
    if split.ENTERED.attend is not None:
        split.check_plain(mask, blocks=blocks, key_padding_mask=key_padding_mask)
    call, _ = normalise(Call(q, k, v, mask, Options(bias, alibi, sinks), settings), blocks, key_padding_mask, False)
    over_ranks = split.explained(call)
    head = []
    if type(call.mask) is Mask and call.mask.targets:
        call, line = targets.explained(call)
        head.append(line)
    _, code = completed(call if over_ranks is None else over_ranks[1])
    head += [] if over_ranks is None else [over_ranks[0]]
    head += [] if q.is_nested else [checks.sizes_line(q, k, v)]
    found = dispatch.explain(decode(code))
    for line in head:
        found = found.below(line)
    return found


def _options(bias: Tensor | None, alibi: Tensor | None, sinks: Tensor | None) -> Options:
    return NO_OPTIONS if bias is None and alibi is None and sinks is None else Options(bias, alibi, sinks)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, options: Options, settings: CallSettings, blocks: Blocks | None = None,
    padding: Tensor | None = None, *, is_packed: bool = False, validate: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The one way of a call: normalised if it is not plain, then run as it was prepared, or checked and dispatched."""
    finish = None
    is_plain = blocks is None and padding is None and type(mask) is Mask and not validate
    if not is_plain or (isinstance(q, Tensor) and q.is_nested):
        if split.ENTERED.attend is not None:
            split.check_plain(mask, blocks=blocks, key_padding_mask=padding)
        call, finish = normalise(Call(q, k, v, mask, options, settings, is_packed), blocks, padding, validate)
        q, k, v, mask, options, settings, is_packed = call
    if split.ENTERED.attend is not None:
        parts = split.ENTERED.attend(Call(q, k, v, mask, options, settings, is_packed))
        if parts is not None:
            return parts if finish is None else finish(*parts)
    if type(mask) is Mask and mask.targets:
        found = targets.attend(Call(q, k, v, mask, options, settings, is_packed), validate, _attend_part)
        return found if finish is None else finish(*found)
    key = ops.signature(q, k, v, mask, options, settings)
    ready = None if key is None else ops.prepared(key)
    if ready is not None:
        run, chosen = ready
        ops.RAN[chosen] += 1
        found = run(q, k, v, options)
    else:
        found = _run(Call(q, k, v, mask, options, settings, is_packed), key)
    return found if finish is None else finish(*found)


def _attend_part(call: Call) -> tuple[Tensor, Tensor]:
    q, k, v, mask, options, settings, is_packed = call
    options = NO_OPTIONS if all(x is None for x in options) else options
    return attend(q, k, v, mask, options, settings, is_packed=is_packed)


def _run(call: Call, key: tuple[Any, ...] | None) -> tuple[Tensor, Tensor]:
    """Checks a dense or packed call, chooses its backend and runs it; a call with a key is remembered by it."""
    (q, k, v, _, options, settings, _), code = completed(call)
    checks.warn_of_swapped_axes(q, k)
    # on meta any backend is as good as another, since none runs
    chosen = _choose(code, None if q.is_meta and settings.backend in dispatch.BACKENDS else settings.backend)
    if not torch.compiler.is_compiling():
        ops.RAN[chosen] += 1
    # a compiled graph has no second derivative to offer, so there eager is an operator like the others; but no transform of
    # torch.func passes an operator in a graph
    is_operator = q.is_meta or (torch.compiler.is_compiling() and not transforms_active())
    if chosen == eager.NAME and not is_operator and _spec(code).precision is None:
        return eager.attend(q, k, v, options, _spec(code))
    answer = ops.attend(q, k, v, options, code, chosen)
    if key is not None:
        ops.remember(key, q, k, v, options, code, chosen)
    return answer


def _choose(code: str, backend: str | None) -> str:
    return dispatch.choose(code, backend)


def _spec(code: str) -> Spec:
    # Dynamo warns of a cache
    return decode.__wrapped__(code) if torch.compiler.is_compiling() else decode(code)


# what torch.compiler.assume_constant_result sets; calling it would import Dynamo, over a second
_choose._dynamo_marked_constant = True  # type: ignore[attr-defined]
