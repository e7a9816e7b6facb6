"""FLOPs and bytes of one call of each operator of this package, from its arguments and results as a TorchDispatchMode sees them.

Each byte that matters counts as read once and each byte of a result as written once, whatever a kernel's schedule. FLOPs are
the FLOPs of matrix products (`cost.flops`), so operations that only move and scale numbers have 0. Offsets, lengths and slots are
data: where the work depends on them they are read back, which waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from rooftile.cost import approximate, flops, io, listed, states, users
from rooftile.exact.spec import Problem, Sizes, Spec, decode, option_names


class Work(NamedTuple):
    """The FLOPs of one call, and the bytes that it must move."""

    flops: int
    read: int  # bytes
    written: int  # bytes


def work(name: str, arguments: tuple[Any, ...], results: Any) -> Work:
    """The work of one call of `rooftile::name`.

    Args:
        name: such as "add_norm".
        arguments: in the order of the operator's schema.
        results: what the call returned.

    Example:
        >>> x, weight = torch.randn(5, 64), torch.ones(64)
        >>> work("normalise", (x, weight, None, 1e-6, False), torch.empty(5, 64))
        Work(flops=0, read=1536, written=1280)
    """
    return COUNTED[name](arguments, results)


def _once(arguments: tuple[Any, ...], results: Any) -> Work:
    return Work(0, _nbytes(arguments), _nbytes(results))


def _add_norm(arguments: tuple[Any, ...], results: Any) -> Work:
    return Work(0, _nbytes(arguments), _nbytes(results) + _nbytes(arguments[1]))


def _adamw(arguments: tuple[Any, ...], results: Any) -> Work:
    """Everything but gradients and numbers on the device is written too."""
    weights, gradients, first, second, rests, sums, steps, masks, lr, clip, *_ = arguments
    changed = _nbytes((weights, first, second, rests, sums))
    return Work(0, changed + _nbytes((gradients, steps, masks, lr, clip)), changed)


def _linear(arguments: tuple[Any, ...], results: Any) -> Work:
    x, weight, _ = arguments
    return Work(2 * x.shape[0] * weight.numel(), _nbytes(arguments), _nbytes(results))


def _linear_cross_entropy(arguments: tuple[Any, ...], results: Any) -> Work:
    """Logits are neither read nor written."""
    input, weight, *_ = arguments
    return Work(2 * input.shape[0] * weight.numel(), _nbytes(arguments), _nbytes(results))


def _linear_cross_entropy_backward(arguments: tuple[Any, ...], results: Any) -> Work:
    """The logits are made again."""
    input, weight = arguments[3:5]
    return Work(6 * input.shape[0] * weight.numel(), _nbytes(arguments), _nbytes(results))


def _linear_cross_entropy_reduced(arguments: tuple[Any, ...], results: Any) -> Work:
    """Logits, and the gradients that are wanted: a product of the same FLOPs each."""
    input, weight, *_, wants_dx, wants_dw, _ = arguments
    products = 1 + wants_dx + wants_dw
    return Work(2 * products * input.shape[0] * weight.numel(), _nbytes(arguments), _nbytes(results))


def _linear_cross_entropy_reduced_backward(arguments: tuple[Any, ...], results: Any) -> Work:
    """Only gradients are read, with the number that they are multiplied by."""
    return Work(0, _nbytes((arguments[0], *arguments[2:5])), _nbytes(results))


def _linear_quantised(arguments: tuple[Any, ...], results: Any) -> Work:
    """Codes of 8 bits are FLOPs as any others."""
    x, *_ = arguments
    N, K = arguments[11:13]
    return Work(2 * x.shape[0] * N * K, _nbytes(arguments), _nbytes(results))


def _linear_gated(arguments: tuple[Any, ...], results: Any) -> Work:
    """The product's own result is neither written nor read."""
    x, *_, N, K, _ = arguments
    return Work(2 * x.shape[0] * N * K, _nbytes(arguments), _nbytes(results))


def _linear_gated_rows(arguments: tuple[Any, ...], results: Any) -> Work:
    x, *_, N, K, _, _ = arguments
    return Work(2 * x.shape[0] * N * K, _nbytes(arguments), _nbytes(results))


def _linear_rounded(arguments: tuple[Any, ...], results: Any) -> Work:
    """The weight is read, and its codes are neither written nor read again."""
    x, w, *_ = arguments
    return Work(2 * x.numel() // x.shape[-1] * w.numel(), _nbytes(arguments), _nbytes(results))


def _linear_rounded_backward(arguments: tuple[Any, ...], results: Any) -> Work:
    """A product for each gradient that is wanted."""
    dy, _, w, *_, needs_x, needs_w = arguments
    return Work(2 * (needs_x + needs_w) * dy.numel() * w.shape[1], _nbytes(arguments), _nbytes(results))


def _linear_two_four(arguments: tuple[Any, ...], results: Any) -> Work:
    """Products with what was left out of the weight are not counted."""
    x, _, values, *_ = arguments
    return Work(2 * x.shape[0] * values.numel(), _nbytes(arguments), _nbytes(results))


def _linear_masked(arguments: tuple[Any, ...], results: Any) -> Work:
    """The weight is read with its zeros, half of all numbers."""
    x, w, *_ = arguments
    return Work(x.numel() // x.shape[-1] * w.numel(), _nbytes(arguments), _nbytes(results))


def _linear_masked_backward(arguments: tuple[Any, ...], results: Any) -> Work:
    """The gradient of the weight is the gradient of all its places."""
    dy, _, w, _, needs_x, needs_w = arguments
    return Work((needs_x + 2 * needs_w) * dy.numel() * w.shape[1], _nbytes(arguments), _nbytes(results))


def _write(arguments: tuple[Any, ...], results: Any) -> Work:
    k, v, k_cache, v_cache, slots, cos, sin, k_scale, v_scale = arguments
    tokens = int((slots >= 0).sum())
    read = tokens * (_row(k) + _row(v) + sum(_row(x) for x in (cos, sin) if x is not None))
    scales = sum(tokens * k.shape[1] * x.element_size() for x in (k_scale, v_scale) if x is not None)
    written = tokens * k.shape[1] * k.shape[2] * (k_cache.element_size() + v_cache.element_size())
    return Work(0, read + _nbytes(slots), written + scales)


def _write_and_rotate(arguments: tuple[Any, ...], results: Any) -> Work:
    q, *others = arguments
    _, read, written = _write(tuple(others), None)
    cos, sin, slots = others[5], others[6], others[4]
    # queries of tokens that are left out are rotated as well
    left_out = int((slots < 0).sum()) * (_row(cos) + _row(sin))
    return Work(0, read + _nbytes(q) + left_out, written + _nbytes(results))


def _gather(arguments: tuple[Any, ...], results: Any) -> Work:
    """Zeros after the last token are not counted."""
    k_cache, v_cache, table, lengths, k_scale, v_scale, dtype = arguments
    tokens, blocks = int(lengths.sum()), int((-(-lengths // k_cache.shape[1])).sum())
    numbers = tokens * k_cache.shape[2] * (k_cache.shape[3] + v_cache.shape[3])
    scales = sum(tokens * k_cache.shape[2] * x.element_size() for x in (k_scale, v_scale) if x is not None)
    read = numbers * k_cache.element_size() + scales + blocks * table.element_size() + _nbytes(lengths)
    return Work(0, read, numbers * dtype.itemsize + _nbytes(results[2]))


def _copy(arguments: tuple[Any, ...], results: Any) -> Work:
    storage, pairs = arguments
    moved = pairs.shape[0] * _row(storage)
    return Work(0, moved + _nbytes(pairs), moved)


def _sample(arguments: tuple[Any, ...], results: Any) -> Work:
    """A row of tables as wide as the vocabulary is read for every row of logits that may ask for it."""
    logits, slots, positions, numbers, top_k, seed, last, counts, prompted, bias, masks, *flags = arguments
    _, _, penalties, biases, masked = flags
    n = logits.shape[0]
    state = n * (numbers.shape[0] * numbers.element_size() + top_k.element_size() + seed.element_size())
    tables = [*([counts, prompted] * penalties), *([bias] * biases), *([masks] * masked)]
    read = _nbytes((logits, slots, positions)) + state + sum(n * _row(x) for x in tables)
    return Work(0, read, _nbytes(results) + n * last.element_size() + (n * counts.element_size() if penalties else 0))


def _attention(arguments: tuple[Any, ...], results: Any) -> Work:
    q, k, _, options, code, _ = arguments
    problem = _problem(q, k, options, decode(code))
    moved = io.compulsory(problem)
    share = listed.share(problem, options)
    return Work(round(share * flops.count(problem)), moved.read + _nbytes(options), moved.written)


def _attention_backward(arguments: tuple[Any, ...], results: Any) -> Work:
    """A call by a recipe computes its forward again without one, as rounding has no gradient."""
    _, _, q, k, _, _, _, options, code, _ = arguments
    problem = _problem(q, k, options, decode(code))
    moved, again = io.compulsory(problem, "bwd"), flops.count(problem) * (problem.spec.precision is not None)
    written = moved.written + _nbytes(results[3:])
    share = listed.share(problem, options)
    return Work(round(share * flops.count(problem, "bwd")) + again, moved.read + _nbytes(options), written)


def _attention_paged(arguments: tuple[Any, ...], results: Any) -> Work:
    q, k, v, table, lengths, cu_q, k_scale, v_scale, options, code, _ = arguments
    rows = [q.shape[1]] * q.shape[0] if cu_q is None else cu_q.diff().tolist()
    pairs = tuple(zip(rows, lengths.tolist(), strict=True))
    sizes = Sizes(B=len(rows), T=sum(rows), S=int(lengths.sum()), H=q.shape[-2], Hk=k.shape[2], lengths=pairs)
    problem = Problem(spec=decode(code), sizes=sizes)
    queries, keys = io.visible(problem)
    row = k.shape[3] * k.element_size() + v.shape[3] * v.element_size()
    row += sum(x.element_size() for x in (k_scale, v_scale) if x is not None)
    blocks = int((-(-lengths // k.shape[1])).sum())
    others = _nbytes((lengths, cu_q, *options)) + blocks * table.element_size()
    read = queries * q.shape[-1] * q.element_size() + keys * row + others
    return Work(flops.count(problem), read, _nbytes(results))


def _attention_quantised(arguments: tuple[Any, ...], results: Any) -> Work:
    q, k, v, *others, code, _ = arguments
    cu_q, cu_k, spec = others[5], others[6], decode(code)
    problem = _problem(q, k, [] if cu_q is None else [cu_q, cu_k], spec)
    queries, keys = io.visible(problem)
    read = queries * spec.dim * q.element_size() + keys * (spec.dim * k.element_size() + spec.dim_v * v.element_size())
    return Work(flops.count(problem), read + _nbytes(others), _nbytes(results))


def _recurrence(arguments: tuple[Any, ...], results: Any) -> Work:
    q, k, _, state, *_, projection, _, _, _ = arguments
    return Work(_recurrence_flops(q, k, state, projection, "fwd"), _nbytes(arguments), _nbytes(results))


def _recurrence_backward(arguments: tuple[Any, ...], results: Any) -> Work:
    *_, q, k, _, state, _, _, _, projection, _, _, _ = arguments
    return Work(_recurrence_flops(q, k, state, projection, "bwd"), _nbytes(arguments), _nbytes(results))


def _recurrence_flops(q: Tensor, k: Tensor, state: Tensor, projection: Tensor | None, phase: str) -> int:
    H, Hk = q.shape[-2], k.shape[-2]
    rows, dim = (0, 0) if projection is None else projection.shape
    queries, keys = q.shape[:-2].numel(), k.shape[:-2].numel()
    return flops.recurrence(queries, keys, H, Hk, state.shape[-2], state.shape[-1], phase=phase, dim=dim, rows=rows)


def _ssd(arguments: tuple[Any, ...], results: Any) -> Work:
    x, *_, state, _, _, _, _, _ = arguments
    return Work(states.ssd_flops(x, state, "fwd"), _nbytes(arguments), _nbytes(results))


def _ssd_backward(arguments: tuple[Any, ...], results: Any) -> Work:
    _, _, x, *_, state, _, _, _, _, _ = arguments
    return Work(states.ssd_flops(x, state, "bwd"), _nbytes(arguments), _nbytes(results))


def _delta(arguments: tuple[Any, ...], results: Any) -> Work:
    _, _, v, _, _, state, *_ = arguments
    return Work(states.delta_flops(v, state, "fwd"), _nbytes(arguments), _nbytes(results))


def _delta_backward(arguments: tuple[Any, ...], results: Any) -> Work:
    _, _, _, _, v, _, _, state, *_ = arguments
    return Work(states.delta_flops(v, state, "bwd"), _nbytes(arguments), _nbytes(results))


def _step(flops_of: Callable[[tuple[Any, ...]], int]) -> Callable[[tuple[Any, ...], Any], Work]:
    """Counts a step: of the states it reads and writes the rows of its tokens."""

    def count(arguments: tuple[Any, ...], results: Any) -> Work:
        state, x, *rest = arguments
        touched = states.touched_bytes(state, x)
        return Work(flops_of(arguments), touched + _nbytes((x, *rest)), touched + _nbytes(results))

    return count


def _experts(arguments: tuple[Any, ...], results: Any) -> Work:
    u, chosen, gates, *weights, _, _ = arguments
    read = _nbytes((u, chosen, gates)) + _nbytes_of_experts(chosen, weights)
    return Work(_expert_flops(chosen, weights), read, _nbytes(results))


def _experts_backward(arguments: tuple[Any, ...], results: Any) -> Work:
    """Two products for each of the forward, one of them for the weights' gradients; a bias is read for the gates' gradient."""
    dy, p, shared, u, chosen, gates, *weights, needs_weights, _ = arguments
    read = _nbytes((dy, p, shared, u, chosen, gates)) + _nbytes_of_experts(chosen, weights)
    return Work((1 + needs_weights) * _expert_flops(chosen, weights), read, _nbytes(results))


def _expert_flops(chosen: Tensor, weights: list[Tensor | None]) -> int:
    """Each token meets the weights of its experts, and the shared ones."""
    routed = sum(x[0].numel() for x in weights[:2] if x is not None)
    shared = sum(x.numel() for x in weights[4:] if x is not None)
    return 2 * (chosen.numel() * routed + chosen.shape[0] * shared)


def _nbytes_of_experts(chosen: Tensor, weights: list[Tensor | None]) -> int:
    """The weights of experts that no token chose are not read."""
    used = len(chosen.unique())
    return sum(used * _row(x) for x in weights[:4] if x is not None) + _nbytes(weights[4:])


def _problem(q: Tensor, k: Tensor, options: list[Tensor], spec: Spec) -> Problem:
    """The problem of dense tensors, or of packed ones, whose offsets are among the options."""
    if spec.layout == "packed":
        named = dict(zip(option_names(spec), options, strict=True))
        rows, columns = (named[name].diff().tolist() for name in ("cu_q", "cu_k"))
        lengths = tuple(zip(rows, columns, strict=True))
        sizes = Sizes(B=len(rows), T=q.shape[0], S=k.shape[0], H=q.shape[1], Hk=k.shape[1], lengths=lengths)
    else:
        sizes = Sizes(B=q.shape[0], T=q.shape[1], S=k.shape[1], H=q.shape[2], Hk=k.shape[2])
    return Problem(spec=spec, sizes=sizes)


def _selected(arguments: tuple[Any, ...], results: Any) -> Work:
    q, k, v, chosen, cu_q, cu_k, _, block, _ = arguments
    return Work(listed.selected(q, k, v, chosen, cu_q, cu_k, block), _nbytes(arguments), _nbytes(results))


def _selected_backward(arguments: tuple[Any, ...], results: Any) -> Work:
    _, _, q, k, v, _, _, chosen, cu_q, cu_k, _, block, _ = arguments
    forward = listed.selected(q, k, v, chosen, cu_q, cu_k, block)
    return Work(forward * 5 // 2, _nbytes(arguments), _nbytes(results))


def _gathered(arguments: tuple[Any, ...], results: Any) -> Work:
    q, _, v, rows, keys, _, _, _, width, key_width, kind, _ = arguments
    return Work(listed.gathered(q, v, rows, keys, width, key_width, kind), _nbytes(arguments), _nbytes(results))


def _gathered_backward(arguments: tuple[Any, ...], results: Any) -> Work:
    _, _, _, q, _, v, rows, keys, _, _, _, width, key_width, kind, _ = arguments
    forward = listed.gathered(q, v, rows, keys, width, key_width, kind)
    return Work(forward * 5 // 2, _nbytes(arguments), _nbytes(results))


def _hstu(arguments: tuple[Any, ...], results: Any) -> Work:
    q, _, v, _, _, cu, targets, *_, contextual, _, mask, _ = arguments
    return Work(users.hstu_flops(q, v, cu, targets, contextual, mask), _nbytes(arguments), _nbytes(results))


def _hstu_paged(arguments: tuple[Any, ...], results: Any) -> Work:
    """Pages count as far as a row sees them."""
    q, k, v, table, lengths, cu, k_scale, _, own_k, own_v, *tables, row_times, key_times, _, _, _, mask, _ = arguments
    given = (q, k, v, table, lengths, cu, k_scale is not None, own_k is not None, key_times is not None, mask)
    flops_, pages = users.paged_work(*given)
    return Work(flops_, pages + _nbytes([q, lengths, cu, own_k, own_v, *tables, row_times]), _nbytes(results))


def _hstu_backward(arguments: tuple[Any, ...], results: Any) -> Work:
    forward = _hstu(arguments[1:], results)
    return Work(forward.flops * 5 // 2, _nbytes(arguments), _nbytes(results))


def _target(arguments: tuple[Any, ...], results: Any) -> Work:
    q, _, values, _, events, cu_q, cu, *_ = arguments
    flops = users.target_flops(q, q.shape[2] + values.shape[2], events, cu_q, cu)
    return Work(flops, _nbytes(arguments), _nbytes(results))


def _target_backward(arguments: tuple[Any, ...], results: Any) -> Work:
    forward = _target(arguments[3:], results)
    return Work(forward.flops * 5 // 2, _nbytes(arguments), _nbytes(results))


def _target_search(arguments: tuple[Any, ...], results: Any) -> Work:
    q, _, _, cu_q, cu, _, kind, *_ = arguments
    # only the exact search multiplies
    flops = users.target_flops(q, q.shape[2], None, cu_q, cu) if kind == "exact" else 0
    return Work(flops, _nbytes(arguments), _nbytes(results))


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for part in x:
            yield from _tensors(part)


def _nbytes(x: Any) -> int:
    """Bytes of all tensors in x; one that is there twice counts once."""
    return sum(part.numel() * part.element_size() for part in {id(part): part for part in _tensors(x)}.values())


def _page_scores(arguments: tuple[Any, ...], results: Any) -> Work:
    """Only the leading dims of queries are read. What all programs write and read again is no work that must be done."""
    q, leading, table, lengths, *_ = arguments
    tokens, blocks = int(lengths.sum()), int((-(-lengths // leading.shape[1])).sum())
    heads, r = leading.shape[2:]
    read = (tokens * heads + q.shape[0] * q.shape[1]) * r * q.element_size()
    read += blocks * table.element_size() + _nbytes(lengths)
    return Work(2 * tokens * q.shape[1] * r, read, _nbytes(results))


def _choose_pages(arguments: tuple[Any, ...], results: Any) -> Work:
    """The scores of pages that there are; comparing them is no arithmetic."""
    scores, counts, pages, _ = arguments
    return Work(0, int(pages.sum()) * scores.shape[1] * scores.element_size() + _nbytes((counts, pages)), _nbytes(results))


def _native_sparse_decode(arguments: tuple[Any, ...], results: Any) -> Work:
    q, _, cache, table, near_table, lengths, numbers, _ = arguments
    ends, size = lengths.tolist(), cache[2].shape[1]
    length, stride, block, count, _, _, window = numbers
    cost = approximate.native_sparse_decode(
        ends, q.shape[1], cache[0].shape[2], q.shape[2], cache[1].shape[3], length=length, stride=stride, block_size=block,
        count=count, window=window, itemsize=q.element_size(),
    )  # fmt: skip
    entries = sum(-(-n // size) * table.element_size() for n in ends)
    entries += sum((-(-n // size) - max(n - window, 0) // size) * near_table.element_size() for n in ends)
    return Work(cost.flops, cost.bytes_moved - _nbytes(results) + entries + _nbytes(lengths), _nbytes(results))


def _row(x: Tensor) -> int:
    """Bytes of x[0]."""
    return x.shape[1:].numel() * x.element_size()


COUNTED: dict[str, Callable[[tuple[Any, ...], Any], Work]] = {
    "attention": _attention,
    "attention_backward": _attention_backward,
    "attention_paged": _attention_paged,
    "attention_quantised": _attention_quantised,
    "quantise_qkv": _once,
    "normalise": _once,
    "add_norm": _add_norm,
    "normalise_quantised": _once,
    "add_norm_quantised": _add_norm,
    "sum_norm_quantised": _once,
    "gate_quantised": _once,
    "adamw": _adamw,
    "linear": _linear,
    **{
        name: _once
        for each in ("norm", "sum_norm", "gated_norm", "gated", "gate_up", "rotary", "softmax", "cross_entropy")
        for name in (each, f"{each}_backward")
    },
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_cross_entropy_backward": _linear_cross_entropy_backward,
    "linear_cross_entropy_reduced": _linear_cross_entropy_reduced,
    "linear_cross_entropy_reduced_backward": _linear_cross_entropy_reduced_backward,
    "quantise_rows": _once,
    "linear_quantised": _linear_quantised,
    "linear_gated": _linear_gated,
    "linear_gated_rows": _linear_gated_rows,
    "linear_rounded": _linear_rounded,
    "linear_rounded_backward": _linear_rounded_backward,
    "weight_rounded": _once,
    "weight_rounded_backward": _once,
    "dequantise_weight": _once,
    "two_four_mask": _once,
    "two_four_compress": _once,
    "two_four_dense": _once,
    "linear_two_four": _linear_two_four,
    "linear_masked": _linear_masked,
    "linear_masked_backward": _linear_masked_backward,
    "rotate": _once,
    "write_kv": _write,
    "write_kv_and_rotate": _write_and_rotate,
    "gather_kv": _gather,
    "copy_blocks": _copy,
    "choose_pages": _choose_pages,
    "page_scores": _page_scores,
    "native_sparse_decode": _native_sparse_decode,
    "sample": _sample,
    "chunked_recurrence": _recurrence,
    "chunked_recurrence_backward": _recurrence_backward,
    "ssd": _ssd,
    "ssd_backward": _ssd_backward,
    "ssd_step": _step(lambda given: states.ssd_flops(given[1], given[0], "fwd")),
    "selective_scan": _once,
    "selective_scan_backward": _once,
    "selective_scan_step": _step(lambda given: 0),
    "causal_conv": _once,
    "causal_conv_backward": _once,
    "causal_conv_step": _step(lambda given: 0),
    "gated_delta": _delta,
    "gated_delta_backward": _delta_backward,
    "gated_delta_step": _step(lambda given: states.delta_flops(given[3], given[0], "fwd")),
    "experts": _experts,
    "experts_backward": _experts_backward,
    "selected_attention": _selected,
    "selected_attention_backward": _selected_backward,
    "gated_sum": _once,
    "gated_sum_backward": _once,
    "gathered_attention": _gathered,
    "gathered_attention_backward": _gathered_backward,
    "hstu_attention": _hstu,
    "hstu_attention_backward": _hstu_backward,
    "target_attention": _target,
    "target_attention_backward": _target_backward,
    "target_search": _target_search,
    "hstu_attention_paged": _hstu_paged,
}
