"""From a caller's arguments to a spec, or one clear sentence: what came, what is due.

Nothing here reads device memory of a GPU, so nothing waits for it; what can only be known from data (the offsets of packed
sequences) is checked where the data is on the host, or when the caller asks with validate=True.

The checks run on every call and inside torch.compile's tracing: plain attribute reads and f-strings.
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.exact.masks import CAUSAL, FULL, Mask
from rooftile.exact.paged_route import route_of
from rooftile.exact.spec import DTYPE_NAMES, CallSettings, Options, encode, replaced
from rooftile.kvcache import PagedKV
from rooftile.numerics import QuantisedQKV
from rooftile.numerics.precision import recipe_of
from rooftile.runtime.arguments import shown, whole
from rooftile.runtime.devices import arch
from rooftile.runtime.operators import levels_of_gradients, transformed, wants_grad
from rooftile.runtime.tensors import check_offsets

# more query heads than any model has that we know
MOST_HEADS = 128

DENSE = ("B", "T", "H", "D")
PACKED = ("total", "H", "D")


def spec_code(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, options: Options, settings: CallSettings, forward_mode: bool = False
) -> str:  # fmt: skip
    """The code of this call's Spec, which `rooftile.exact.spec.decode` reads. Raises InvalidInput."""
    packed = options.cu_q is not None
    check_tensors(q, k, v, PACKED if packed else DENSE)
    bias, alibi, sinks = options.bias, options.alibi, options.sinks
    if bias is not None:
        _check_bias(bias, q, k, packed)
    if alibi is not None:
        check_slopes(alibi, q, options.cu_q.shape[0] - 1 if packed else q.shape[0])
        if alibi.requires_grad:
            raise InvalidInput("alibi requires a gradient and has none; pass alibi.detach(), or the slopes' effect as bias")
    recipe = recipe_of(settings.precision)
    records = levels_of_gradients if transformed() else wants_grad
    needs_grad = bool(records(q, k, v, bias, sinks if isinstance(sinks, Tensor) else None))
    return _code(
        q, k.shape[-2], v.shape[-1], mask, options, settings,
        layout="packed" if packed else "dense",
        dropout=_probability(settings.dropout),
        placed=options.seed is not None and options.seed.shape[0] > 1,
        has_bias=bias is not None,
        needs_grad=needs_grad,
        bias_grad=bias is not None and bool(records(bias)),
        needs_lse=settings.needs_lse,
        forward_mode=forward_mode,
        precision="native" if recipe is None else recipe.code,
    )  # fmt: skip


def quantised_code(qkv: QuantisedQKV, mask: Mask | None, options: Options, settings: CallSettings) -> str:
    """The code of the Spec of attention to tensors that `quantise_qkv` returned."""
    return _code(
        qkv.q, qkv.k.shape[-2], qkv.dim_v, mask, options, settings,
        dtype=qkv.dtype,
        layout="dense" if qkv.cu_q is None else "packed",
        precision=qkv.precision.code,
        v_order=qkv.v_order,
    )  # fmt: skip


def paged_code(q: Tensor, cache: PagedKV, mask: Mask | None, options: Options, settings: CallSettings) -> str:
    """The code of the Spec of attention to a paged cache."""
    packed = cache.cu_q is not None
    axes = PACKED if packed else DENSE
    if q.ndim != len(axes):
        word = "with cache.cu_q queries are packed" if packed else "without cache.cu_q every sequence has as many queries"
        raise InvalidInput(f"q is {tuple(q.shape)}; {word}, so it must have {len(axes)} axes ({', '.join(axes)})")
    _check_pages(q, cache)
    if options.alibi is not None:
        check_slopes(options.alibi, q, cache.table.shape[0])
    if torch.compiler.is_compiling() and torch.is_grad_enabled() and any(x.requires_grad for x in (q, cache.k, cache.v)):
        raise InvalidInput("q or the cache requires a gradient; attention_paged has none: compile it under torch.no_grad()")
    return _code(
        q, cache.k.shape[2], cache.v.shape[-1], mask, options, settings,
        layout="paged",
        queries=route_of(q, cache, deterministic=_deterministic(settings.deterministic)).queries,
        has_kv_scales=cache.k_scale is not None,
    )  # fmt: skip


def _code(q: Tensor, kv_heads: int, dim_v: int, mask: Any, options: Options, settings: CallSettings, **own: Any) -> str:
    """The code of a Spec: the mask and the options that every kind of call has are checked here; `own` is the rest."""
    if mask is None:
        mask = FULL
    if not isinstance(mask, Mask):
        due = "must be a rooftile mask: FULL, CAUSAL, Window, Prefix, Chunk, Targets, or some of them joined by &"
        due += "; write bias= for a tensor" if isinstance(mask, Tensor) else ""
        raise InvalidInput(f"mask is {shown(mask)}; {due}")
    H, D = q.shape[-2], q.shape[-1]
    if options.sinks is not None:
        _check_vector("sinks", options.sinks, q, {"(H,)": (H,)})
    return encode(
        dim=D,
        dim_v=dim_v,
        group=H // kv_heads,
        mask=mask,
        scale=D**-0.5 if settings.scale is None else _number("scale", settings.scale, -math.inf, math.inf),
        softcap=0.0 if settings.softcap is None else _number("softcap", settings.softcap, 0.0, math.inf),
        has_alibi=options.alibi is not None,
        has_sinks=options.sinks is not None,
        block_size=settings.block_size,
        has_bits=options.block_bits is not None,
        deterministic=_deterministic(settings.deterministic),
        wide_grads=settings.wide_grads,
        partial=settings.partial,
        device=arch(q.device),
        # written out, as Dynamo may take a function's default for a number that varies
        **{"dtype": q.dtype, "dropout": 0.0} | own,
    )


def check_shared_prefix(q: Tensor, cache: PagedKV, mask: Mask | None, alibi: Tensor | None, tokens: int) -> None:
    """Raises InvalidInput unless all sequences may share their first tokens."""
    _check_pages(q, cache)
    size, room = cache.k.shape[1], cache.table.shape[1] * cache.k.shape[1]
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 < tokens <= room or tokens % size:
        raise InvalidInput(f"shared_prefix is {tokens!r}; must be whole blocks of {size} tokens, up to {room} in cache.table")
    if mask not in (None, FULL, CAUSAL) or alibi is not None:
        came = "alibi" if alibi is not None else f"mask {mask}"
        raise InvalidInput(f"shared_prefix with {came}; every query must see the prefix whole: mask FULL or CAUSAL, no alibi")
    if q.device.type == "cpu" and cache.table.shape[0] and not torch.compiler.is_compiling():
        shared = cache.table[:, : tokens // size]
        if not torch.equal(shared, shared[:1].expand_as(shared)):
            raise InvalidInput(f"shared_prefix is {tokens}; cache.table differs in the first {tokens // size} blocks of its rows")
        queries = cache.cu_q.diff() if cache.cu_q is not None else q.shape[1]
        if (cache.lengths - queries < tokens).any():
            raise InvalidInput(f"shared_prefix is {tokens}; a sequence has fewer tokens before its queries")


def _check_pages(q: Tensor, cache: PagedKV) -> None:
    k, v = cache.k, cache.v
    scaled = cache.k_scale is not None or cache.v_scale is not None
    due = torch.float8_e4m3fn if scaled else q.dtype
    for name, x, axes in (("k", k, "(P, size, Hk, D)"), ("v", v, "(P, size, Hk, Dv)")):
        if x.ndim != 4:
            raise InvalidInput(f"cache.{name} is {tuple(x.shape)}; must be {axes}")
        if x.dtype != due:
            why = "with scales it must be torch.float8_e4m3fn" if scaled else f"q is {q.dtype}, and they must agree"
            raise InvalidInput(f"cache.{name} is {x.dtype}; {why}")
    for name, x in (("k_scale", cache.k_scale), ("v_scale", cache.v_scale)) if scaled else ():
        if x is None or x.shape != k.shape[:3] or x.dtype != torch.float32:
            came = "None" if x is None else f"{x.dtype} {tuple(x.shape)}"
            raise InvalidInput(f"cache.{name} is {came}; must be torch.float32 (P, size, Hk) = {tuple(k.shape[:3])}")
    check_blocks(q, cache)


def check_blocks(q: Tensor, cache: PagedKV) -> None:
    """Checks shapes, tables, lengths and offsets of a cache with keys and values (P, size, Hk, D); their dtypes aside."""
    k, v, table, lengths = cache.k, cache.v, cache.table, cache.lengths
    if k.shape[:3] != v.shape[:3]:
        raise InvalidInput(f"cache.v is {tuple(v.shape)}; must be like cache.k, {tuple(k.shape)}, in all but the last axis")
    if k.shape[1] < 1 or k.shape[1] & (k.shape[1] - 1):
        raise InvalidInput(f"blocks of {k.shape[1]} tokens; their size must be a power of two")
    if k.shape[-1] != q.shape[-1]:
        raise InvalidInput(f"cache.k has head dim {k.shape[-1]}; q has {q.shape[-1]}, and they must agree")
    H, Hk = q.shape[-2], k.shape[2]
    if H == 0 or Hk == 0 or H % Hk:
        raise InvalidInput(f"q has {H} heads and cache.k has {Hk}; k's must divide q's (each serves a group of query heads)")
    if table.ndim != 2 or table.dtype != torch.int32:
        raise InvalidInput(f"cache.table is {table.dtype} {tuple(table.shape)}; must be int32 (B, blocks of the longest)")
    B = table.shape[0]
    for name, x, n in (("lengths", lengths, B), ("cu_q", cache.cu_q, B + 1)):
        if x is not None and (x.shape != (n,) or x.dtype != torch.int32):
            raise InvalidInput(f"cache.{name} is {x.dtype} {tuple(x.shape)}; must be int32 ({n},): cache.table has {B} rows")
    if cache.cu_q is None and q.shape[0] != B:
        raise InvalidInput(f"q has batch {q.shape[0]}; cache.table has {B} rows, and they must agree")
    for name, x in (("k", k), ("v", v), ("table", table), ("lengths", lengths), ("cu_q", cache.cu_q), ("k_scale", cache.k_scale)):
        if x is not None:
            _check_device(f"cache.{name}", x, q)
    if cache.cu_q is not None:
        check_offsets("cache.cu_q", cache.cu_q, q.shape[0], "queries", q.device, False)
    # like offsets, checked only where the values can be read without waiting for a GPU
    if q.device.type == "cpu" and B and not torch.compiler.is_compiling():
        longest, room = int(lengths.max()), table.shape[1] * k.shape[1]
        if int(lengths.min()) < 0 or longest > room:
            raise InvalidInput(f"cache.lengths has {longest}; cache.table has room for {room}: {table.shape[1]} x {k.shape[1]}")
        used = table[torch.arange(table.shape[1]) * k.shape[1] < lengths[:, None]]
        if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < k.shape[0]:
            first, last = int(used.min()), int(used.max())
            raise InvalidInput(f"cache.table names blocks {first} to {last}; cache.k has 0 to {k.shape[0] - 1}")


def check_packed(q: Tensor, k: Tensor, options: Options, read: bool) -> Options:
    """The options of a packed call, with its offsets checked and on the device of q.

    read: check the offsets' values too, wherever they are.
    """
    cu_q, cu_k = options.cu_q, options.cu_k
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise InvalidInput(f"{name} must be a tensor (total, H, D) of sequences back to back; got {shown(x)}")
    if isinstance(options.bias, Tensor):
        _check_bias_columns(options.bias, cu_k, read)
    cu_q = check_offsets("cu_q", cu_q, q.shape[0], "queries", q.device, read)
    cu_k = check_offsets("cu_k", cu_k, k.shape[0], "keys", k.device, read)
    if cu_q.shape != cu_k.shape:
        raise InvalidInput(f"cu_q has {len(cu_q) - 1} sequences and cu_k has {len(cu_k) - 1}; they must agree")
    return replaced(options, cu_q=cu_q, cu_k=cu_k)


def _check_bias_columns(bias: Tensor, cu_k: Tensor, read: bool) -> None:
    """A packed bias has a column for every key of the longest sequence, as far as that can be known without waiting."""
    known = isinstance(cu_k, Tensor) and cu_k.ndim == 1 and (cu_k.device.type == "cpu" or read)
    if not known or cu_k.shape[0] < 2 or bias.ndim == 0 or torch.compiler.is_compiling():
        return
    longest = int(cu_k.diff().max())
    if bias.shape[-1] < longest:
        raise InvalidInput(f"bias has {bias.shape[-1]} columns; the longest key sequence has {longest} keys")


def check_parts(parts: Iterable[Sequence[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The parts of a merge, as pairs (o, lse) that fit together."""
    parts = list(parts) if isinstance(parts, Iterable) and not isinstance(parts, Tensor) else parts
    if not isinstance(parts, list) or not parts:
        raise InvalidInput(f"merge got {shown(parts)}; needs a list of at least one pair (o, lse)")
    for n, part in enumerate(parts):
        pair = isinstance(part, (tuple, list)) and len(part) == 2 and all(isinstance(x, Tensor) for x in part)
        if not pair or not all(x.is_floating_point() for x in part):
            raise InvalidInput(f"merge: part {n} must be a pair of tensors (o, lse), as attention_with_lse returns")
        (o, lse), first = part, parts[0][0]
        if o.shape != first.shape:
            raise InvalidInput(f"merge: o of part {n} is {tuple(o.shape)}; part 0 has {tuple(first.shape)}")
        if lse.ndim < 2 or lse.mT.shape != o.shape[:-1]:
            due = (*o.shape[:-3], o.shape[-2], o.shape[-3]) if o.ndim > 2 else "(B, H, T)"
            raise InvalidInput(f"merge: lse of part {n} is {tuple(lse.shape)}; o is {tuple(o.shape)}, so it must be {due}")
        if o.device != first.device or lse.device != first.device:
            raise InvalidInput(f"merge: part {n} is on {o.device} and {lse.device}; part 0 is on {first.device}")
    return parts


def check_query(q: Tensor) -> None:
    """Checks what must hold before anything asks for q's device."""
    if not isinstance(q, Tensor):
        raise InvalidInput(f"q is {shown(q)}; must be a tensor")


def check_seed(seed: int | Tensor | None, dropout: float, device: torch.device) -> Tensor | None:
    """The seed as an int64 tensor (1,) on the device, drawn from torch's generator if none was given; None without dropout."""
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.dtype != torch.int64:
            raise InvalidInput(f"seed is {seed.dtype} of {seed.numel()} elements; must be an int, or an int64 tensor of one")
    elif seed is not None:
        number = whole(seed)
        if number is None:
            raise InvalidInput(f"seed is {seed!r}; must be an int, or an int64 tensor of one element")
        if not -(2**63) <= number < 2**63:
            raise InvalidInput(f"seed is {number}; must fit in 64 bits")
        seed = number
    if _probability(dropout) == 0.0:
        return None
    if seed is None:
        return torch.randint(2**62, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        return seed.reshape(1).to(device)
    return torch.full((1,), seed, dtype=torch.int64, device=device)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, axes: tuple[str, ...]) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise InvalidInput(f"{name} is {shown(x)}; must be a tensor ({', '.join(axes)})")
        if x.is_nested or x.layout is not torch.strided:
            due = "must be dense, or all three jagged (attention and attention_with_lse take them)"
            raise InvalidInput(f"{name} is nested or sparse; {due}")
        if x.ndim != len(axes):
            raise InvalidInput(f"{name} is {tuple(x.shape)}; must have {len(axes)} axes ({', '.join(axes)})")
        if x.dtype is not q.dtype:
            raise InvalidInput(f"{name} is {x.dtype}; q is {q.dtype}, and q, k and v must share one dtype")
        if x.device != q.device:
            raise InvalidInput(f"{name} is on {x.device}; q is on {q.device}, and all inputs must be on one device")
    if q.dtype not in DTYPE_NAMES:
        raise InvalidInput(f"q is {q.dtype}; must be float32, bfloat16 or float16 (float64 in the definition)")
    H, D = q.shape[-2], q.shape[-1]
    Hk = k.shape[-2]
    if D == 0 or v.shape[-1] == 0:
        raise InvalidInput(f"head dim is {D} for q and {v.shape[-1]} for v; must be at least 1")
    if k.shape[-1] != D:
        raise InvalidInput(f"k has head dim {k.shape[-1]}; q has {D}, and they must agree")
    if len(axes) == 4 and k.shape[0] != q.shape[0]:
        raise InvalidInput(f"k has batch {k.shape[0]}; q has {q.shape[0]}, and they must agree")
    if v.shape[:-1] != k.shape[:-1]:
        raise InvalidInput(f"v is {tuple(v.shape)}; must be like k, {tuple(k.shape)}, in all but the last axis")
    if H == 0 or Hk == 0 or H % Hk:
        swapped = len(axes) == 4 and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
        hint = "; if they are (B, H, T, D), write x.transpose(1, 2) for each" if swapped else ""
        raise InvalidInput(f"q has {H} heads and k has {Hk}; k's must divide q's (each serves a group of query heads){hint}")


def warn_of_swapped_axes(q: Tensor, k: Tensor) -> None:
    """Warns once where (B, T, H, D) looks like (B, H, T, D): more heads than models have, or groups along the wrong axis."""
    if torch.compiler.is_compiling() or q.ndim != 4:
        return
    (T, H), (S, Hk) = q.shape[1:3], k.shape[1:3]
    if H > T > 0 and Hk > S > 0 and (H > MOST_HEADS or (H == Hk >= 32 and S < T and T % S == 0)):
        warnings.warn(SwappedAxes(T, H, S, Hk), stacklevel=6)


class SwappedAxes(UserWarning):
    """Two axes look swapped. `warnings.simplefilter("ignore", rooftile.exact.validate.SwappedAxes)` silences it."""

    def __init__(self, T: int, H: int, S: int, Hk: int) -> None:
        super().__init__(
            f"q has length {T} and {H} heads, k has length {S} and {Hk} heads: the layout is (B, T, H, D); if they are "
            "(B, H, T, D), write x.transpose(1, 2) for each, and if they are right, silence this by "
            'warnings.simplefilter("ignore", rooftile.exact.validate.SwappedAxes)'
        )


def sizes_line(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Returns the sizes of a dense call as `explain` prints them."""
    (B, T, H, D), (S, Hk), Dv = q.shape, k.shape[1:3], v.shape[-1]
    return f"sizes    B {B}  T {T}  S {S}  H {H}/{Hk}  D {D}" + (f"/{Dv}" if Dv != D else "")


def bias_in_numbers(options: Options, dtype: torch.dtype) -> Options:
    """Returns the options with a boolean bias, True where a key is seen, as 0 and -inf in `dtype`; what is broadcast stays so."""
    bias = options.bias
    if not isinstance(bias, Tensor) or bias.dtype != torch.bool or not dtype.is_floating_point:
        return options
    one_each = bias[tuple(slice(0, 1) if step == 0 else slice(None) for step in bias.stride())]
    return replaced(options, bias=torch.zeros_like(one_each, dtype=dtype).masked_fill(~one_each, -math.inf))


def check_dense_bias(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The bias of a dense call as numbers, checked."""
    numbers = bias_in_numbers(Options(bias), q.dtype).bias
    assert numbers is not None
    _check_bias(numbers, q, k, False)
    return numbers


def _check_bias(bias: Tensor, q: Tensor, k: Tensor, packed: bool) -> None:
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        raise InvalidInput(f"bias is {shown(bias)}; must be a floating-point tensor, or a boolean one: True where a key is seen")
    _check_device("bias", bias, q)
    if packed:
        due, word = (q.shape[1], q.shape[0]), f"(H, total_q, J), ({q.shape[1]}, {q.shape[0]}, J >= the longest key sequence)"
        fits = bias.ndim == 3 and bias.shape[0] in (1, due[0]) and bias.shape[1] in (1, due[1])
    else:
        due = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        word = f"(B, H, T, S), {due}"
        fits = bias.ndim <= 4 and all(bias.shape[-n] in (1, due[-n]) for n in range(1, bias.ndim + 1))
    if not fits:
        raise InvalidInput(f"bias is {tuple(bias.shape)}; must broadcast to {word}")


def _check_vector(name: str, x: Tensor, q: Tensor, shapes: dict[str, tuple[int, ...]]) -> None:
    # size by size: where torch.compile has symbols for them, a tuple of them is equal to none and has no text
    fits = isinstance(x, Tensor) and any(
        x.ndim == len(shape) and all(n == m for n, m in zip(x.shape, shape, strict=True)) for shape in shapes.values()
    )
    if not fits or not x.is_floating_point():
        due = " or ".join(f"{axes} = {shape}" for axes, shape in shapes.items())
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise InvalidInput(f"{name} is {shown(x)}; must be a floating-point tensor {due}")
        raise InvalidInput(f"{name} is {tuple(x.shape)}; must be {due}")
    _check_device(name, x, q)


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise InvalidInput(f"{name} is on {x.device}; q is on {q.device}, and all inputs must be on one device")


def check_slopes(alibi: Tensor, q: Tensor, batch: int) -> None:
    H = q.shape[-2]
    _check_vector("alibi", alibi, q, {"(H,)": (H,), "(B, H)": (batch, H)})


def _deterministic(given: bool | None) -> bool:
    if given is None:
        return torch.are_deterministic_algorithms_enabled()
    if not isinstance(given, bool):
        raise InvalidInput(f"deterministic is {shown(given)}; must be True, False, or None to follow torch")
    return given


def _number(name: str, value: float, least: float, most: float) -> float:
    if not _is_number(value):
        raise InvalidInput(f"{name} is {shown(value)}; must be a number")
    # compared, for torch.compile makes a symbol of a number that changes from call to call, and math.isfinite takes none
    if not -math.inf < value < math.inf or not least <= value <= most:
        raise InvalidInput(f"{name} is {value}; must be finite" + (f" and at least {least:g}" if math.isfinite(least) else ""))
    return float(value)


def _probability(dropout: float) -> float:
    if not _is_number(dropout) or not 0.0 <= dropout < 1.0:
        raise InvalidInput(f"dropout is {shown(dropout)}; must be a probability in [0, 1)")
    return float(dropout)


def _is_number(value: object) -> bool:
    """Whether this is a real number: an int or float of Python, or of numpy, which registers its scalars with `numbers`."""
    if isinstance(value, bool):
        return False
    # Dynamo traces the first test and not the second
    return isinstance(value, (int, float)) or (not torch.compiler.is_compiling() and isinstance(value, numbers.Real))
