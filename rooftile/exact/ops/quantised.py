"""FP8 and INT8 attention as operators: `rooftile::quantise_qkv` and `rooftile::attention_quantised`; neither has a gradient.

A `QuantisedQKV` crosses the schema as its tensors; recipe, dtype and the order of values are in the spec. What the recipe leaves
out (scales of tensors that stay native, the shift of smoothing, the signs of the rotation) is absent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.exact import dispatch
from rooftile.exact.spec import Options, decode
from rooftile.numerics import QuantisedQKV
from rooftile.numerics.precision import Precision
from rooftile.numerics.scaling import BLOCK
from rooftile.runtime.operators import call, define, watched

_CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def quantise_qkv(
    q: Tensor, k: Tensor, v: Tensor, options: Options, precision: Precision, spec: str, backend: str
) -> QuantisedQKV:  # fmt: skip
    """Quantises by the spec's recipe, `precision`, with a backend: as an operator where somebody watches."""
    cu_q, cu_k = options.cu_q, options.cu_k
    # on meta the operator gives shapes and dtypes
    if not torch.compiler.is_compiling() and not watched(q, k, v, cu_q, cu_k) and not q.is_meta:
        made: QuantisedQKV = dispatch.BACKENDS[backend].quantise(q, k, v, options, decode(spec))
        return made
    with torch.no_grad():
        parts = dict(zip(_names(precision), _QUANTISE(q, k, v, cu_q, cu_k, spec, backend), strict=True))
    return QuantisedQKV(
        parts["q"], parts["k"], parts["v"], parts.get("q_scales"), parts.get("k_scales"), parts.get("v_scales"),
        parts.get("shift"), parts.get("signs"), precision, q.dtype, cu_q, cu_k, dispatch.value_order(backend),
    )  # fmt: skip


def attend_quantised(qkv: QuantisedQKV, options: Options, spec: str, backend: str) -> tuple[Tensor, Tensor]:
    """o and lse of quantised tensors, by a backend: as an operator where somebody watches."""
    # on meta the operator gives shapes and dtypes
    run = _ATTEND if qkv.q.is_meta else _attend
    found: tuple[Tensor, Tensor] = call(
        _ATTEND, run, qkv.q, qkv.k, qkv.v, qkv.q_scales, qkv.k_scales, qkv.v_scales, qkv.shift, qkv.signs, qkv.cu_q, qkv.cu_k,
        options.sinks, spec, backend,
    )  # fmt: skip
    return found


def _names(precision: Precision) -> tuple[str, ...]:
    """The tensors of a QuantisedQKV that a recipe makes, in the order in which the operator returns them."""
    products, weights = precision.qk != "native", precision.pv != "native"
    return (
        "q", "k", "v", *("q_scales", "k_scales") * products, *("v_scales",) * weights,
        *("shift",) * (products and precision.smooth_k), *("signs",) * (products and precision.incoherent),
    )  # fmt: skip


def _quantise(q, k, v, cu_q: Tensor | None, cu_k: Tensor | None, spec: str, backend: str) -> list[Tensor]:
    problem = decode(spec)
    assert problem.precision is not None
    made = dispatch.BACKENDS[backend].quantise(q, k, v, Options(cu_q=cu_q, cu_k=cu_k), problem)
    return [getattr(made, name).contiguous() for name in _names(problem.precision)]


def _quantise_fake(q, k, v, cu_q: Tensor | None, cu_k: Tensor | None, spec: str, backend: str) -> list[Tensor]:
    recipe, columns = decode(spec).precision, dispatch.value_order(backend) == "columns"
    assert recipe is not None
    by_channel = recipe.granularity == "row"

    def scales(x: Tensor, granularity: str, cu: Tensor | None, last: int = 1) -> Tensor:
        return x.new_empty((_parts(x, granularity, cu), x.shape[-2], last), dtype=torch.float32)

    made = {
        "q": q.new_empty(q.shape, dtype=_CODES.get(recipe.qk, q.dtype)),
        "k": k.new_empty(k.shape, dtype=_CODES.get(recipe.qk, k.dtype)),
        "v": v.new_empty(_in_columns(v, cu_k) if columns else v.shape, dtype=_CODES.get(recipe.pv, v.dtype)),
        "q_scales": scales(q, recipe.granularity, cu_q),
        "k_scales": scales(k, recipe.granularity, cu_k),
        "v_scales": scales(v, "head", cu_k, v.shape[-1]) if by_channel else scales(v, recipe.granularity, cu_k),
        "shift": q.new_empty(q.shape[:-1], dtype=torch.float32),
        "signs": q.new_empty(q.shape[-1:], dtype=torch.float32),
    }
    return [made[name] for name in _names(recipe)]


def _parts(x: Tensor, granularity: str, cu: Tensor | None) -> int:
    """How many parts of a tensor have a scale of their own, as `numerics.recipe.part_of_rows` counts them."""
    if granularity == "tensor":
        return 1
    if cu is not None:
        sequences = cu.shape[0] - 1
        return {"row": x.shape[0], "head": sequences}.get(granularity, x.shape[0] // BLOCK + sequences)
    B, T = x.shape[:2]
    return {"row": B * T, "head": B}.get(granularity, B * -(-T // BLOCK))


def _in_columns(v: Tensor, cu: Tensor | None) -> tuple[int, ...]:
    if cu is None:
        return (v.shape[0], v.shape[2], v.shape[3], -(-v.shape[1] // BLOCK) * BLOCK)
    return (1, v.shape[1], v.shape[2], _parts(v, "block", cu) * BLOCK)


def _attend(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Takes the arguments in the order of the schema below."""
    *tensors, cu_q, cu_k, sinks, spec, backend = arguments
    problem = decode(spec)
    fields = (*tensors, problem.precision, problem.dtype, cu_q, cu_k, problem.v_order)
    return dispatch.BACKENDS[backend].attend_quantised(QuantisedQKV(*fields), Options(sinks=sinks), problem)


def _attend_fake(q: Tensor, *others) -> tuple[Tensor, Tensor]:
    problem = decode(others[-2])
    rows = (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])
    o = q.new_empty((*q.shape[:-1], problem.dim_v), dtype=problem.dtype)
    return o, q.new_empty(rows, dtype=torch.float32)


_QUANTISE = define(
    "quantise_qkv(Tensor q, Tensor k, Tensor v, Tensor? cu_q, Tensor? cu_k, str spec, str backend) -> Tensor[]",
    _quantise,
    _quantise_fake,
)
_ATTEND = define(
    "attention_quantised(Tensor q, Tensor k, Tensor v, Tensor? q_scales, Tensor? k_scales, Tensor? v_scales, Tensor? shift, "
    "Tensor? signs, Tensor? cu_q, Tensor? cu_k, Tensor? sinks, str spec, str backend) -> (Tensor, Tensor)",
    _attend,
    _attend_fake,
)
