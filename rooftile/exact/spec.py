"""An attention problem: what is computed (Spec), its sizes (Sizes), and both (Problem).

A Spec is static: it never holds a length, so a new sequence length recompiles nothing. It crosses the operators' schema
as a short string, `Spec.code`, and is decoded once per distinct string.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rooftile.exact import masks
from rooftile.exact.masks import FULL, Mask
from rooftile.numerics.precision import Precision, ValueOrder
from rooftile.numerics.precision import decode as decode_precision

Layout = Literal["dense", "packed", "paged"]
# how many queries each sequence of a paged call has, as far as a kernel may rely on it (`kvcache.route` decides): just one
# (decoding), many on average (prompts), or any number
Queries = Literal["any", "one", "many"]

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One attention problem without its lengths. Frozen and hashable; prints on one line."""

    dtype: torch.dtype
    dim: int  # head dim of queries and keys
    dim_v: int  # head dim of values and outputs
    group: int = 1  # query heads per key/value head
    mask: Mask = FULL
    layout: Layout = "dense"
    queries: Queries = "any"  # queries per sequence, with layout "paged"
    scale: float  # scores are q . k * scale
    softcap: float = 0.0  # scores become softcap * tanh(scores / softcap); 0: off
    dropout: float = 0.0  # probability that a weight is dropped
    has_bias: bool = False
    has_alibi: bool = False
    has_sinks: bool = False
    block_size: tuple[int, int] | None = None  # queries and keys of a listed block; None: no lists
    has_bits: bool = False  # some listed blocks are seen in part
    needs_grad: bool = False
    bias_grad: bool = False  # the bias requires a gradient
    needs_lse: bool = False  # the caller receives lse, so it may have a gradient
    forward_mode: bool = False  # an input carries a tangent, or transforms of torch.func ask for a derivative of a derivative
    has_kv_scales: bool = False  # a paged KV cache in FP8, with one scale per token and head for keys and for values
    deterministic: bool = False  # bit-equal gradients; a sequence's output does not depend on the rest of the batch
    wide_grads: bool = False  # gradients of q, k and v in fp32, to be added up by the caller and rounded once
    # the keys are a part of those that lse is of, and of those that the caller merges: o in fp32, and no lse is made more exact
    partial: bool = False
    placed: bool = False  # the call is a part of a larger problem, and its seed says which (see `rooftile.exact.places`)
    precision: Precision | None = None  # formats of the forward's matrix products; None: the dtype of the inputs
    v_order: ValueOrder | None = None  # the order of values that are already quantised; None if the backend quantises them
    device: str = "cpu"  # "cpu", "sm80", "sm90", "sm100", ...
    # cached: a spec is looked up several times per call, and hashing all fields takes as long as a small kernel
    _hash: int | None = field(init=False, repr=False, compare=False, default=None)

    def __hash__(self) -> int:
        # at the first question: Dynamo traces how a spec is made, and older ones trace no hash
        if self._hash is None:
            object.__setattr__(self, "_hash", hash(tuple(self._values().values())))
        return self._hash  # type: ignore[return-value]

    def __reduce__(self) -> tuple[Any, ...]:
        # made anew where it is unpickled: each process hashes strings and dtypes differently
        return partial(Spec, **self._values()), ()

    def _values(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    @property
    def options_on(self) -> tuple[str, ...]:
        """Names of the options that change the scores or the weights and are switched on; a backend refuses those it lacks."""
        present = {
            "softcap": self.softcap > 0,
            "bias": self.has_bias,
            "alibi": self.has_alibi,
            "sinks": self.has_sinks,
            "dropout": self.dropout > 0,
            "blocks": self.block_size is not None,
        }
        return tuple(name for name, on in present.items() if on)

    @property
    def code(self) -> str:
        """The spec as the string that crosses the operators' schema: `decode(spec.code) == spec`."""
        values = self._values()
        precision = values.pop("precision")
        return encode(**values, precision="native" if precision is None else precision.code)

    def __str__(self) -> str:
        heads = "mha" if self.group == 1 else f"gqa{self.group}"
        dims = f"d{self.dim}" if self.dim == self.dim_v else f"d{self.dim}/{self.dim_v}"
        words = [DTYPE_NAMES[self.dtype], dims, heads, str(self.mask), self.layout]
        words += {"any": [], "one": ["one-query"], "many": ["many-queries"]}[self.queries]
        words += [f"softcap({self.softcap:g})"] * bool(self.softcap) + [f"dropout({self.dropout:g})"] * bool(self.dropout)
        words += [str(self.precision)] * (self.precision is not None) + [f"v-in-{self.v_order}"] * (self.v_order is not None)
        words += [w for w in ("bias", "alibi", "sinks") if getattr(self, f"has_{w}")]
        if self.block_size is not None:
            words += ["blocks({}x{})".format(*self.block_size) + "+bits" * self.has_bits]
        words += ["fp8 cache"] * self.has_kv_scales
        words += ["fwd+bwd" if self.needs_grad else "fwd"]
        words += ["lse"] * self.needs_lse + ["bias-grad"] * self.bias_grad + ["jvp"] * self.forward_mode
        words += ["deterministic"] * self.deterministic + ["fp32-grads"] * self.wide_grads
        words += ["partial"] * self.partial + ["placed"] * self.placed
        return " ".join([*words, f"on {self.device}"])


class Options(NamedTuple):
    """The tensors that an attention call may carry beside q, k and v. Absent ones are None.

    bias is dense (1|B, 1|H, 1|T, 1|S) or packed (1|H, 1|total_q, J), alibi (1|B, H) slopes, sinks (H,), seed (1,) int64 or,
    with places (`rooftile.exact.places`), (1 + 4 B,),
    cu_q and cu_k (B + 1,) int32 or int64 offsets of packed sequences. The others are the lists of `rooftile.Blocks`, by
    queries, and by keys where there is a backward.
    """

    bias: Tensor | None = None
    alibi: Tensor | None = None
    sinks: Tensor | None = None
    seed: Tensor | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    block_counts: Tensor | None = None
    block_indices: Tensor | None = None
    block_bits: Tensor | None = None
    key_counts: Tensor | None = None
    key_entries: Tensor | None = None


class CallSettings(NamedTuple):
    """The options of an attention call that are not tensors, as the caller gave them: unchecked, None for a default.

    `rooftile.exact.validate` turns them into a Spec. The docstring of `rooftile.attention` explains each.
    """

    scale: Any = None
    softcap: Any = None
    # whole: Dynamo may take a default that is a float for a number that varies
    dropout: Any = 0
    seed: Any = None
    deterministic: Any = None
    precision: Any = "native"
    needs_lse: bool = False
    backend: Any = None
    block_size: tuple[int, int] | None = None  # the size of a listed block
    partial: bool = False  # o in fp32, and a backward by an lse that has other keys, too
    wide_grads: bool = False  # gradients of q, k and v in fp32 from the operator of the backward; autograd has their own dtypes


class Call(NamedTuple):
    """An attention call as its caller gave it, or normalised (`rooftile.exact.normalise`): still unchecked.

    q, k and v are dense (B, T, H, D), or packed (total, H, D) with offsets among the options.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    options: Options
    settings: CallSettings
    is_packed: bool = False


def replaced(options: Options, **new: Tensor | None) -> Options:
    """Returns the options with new ones in place of their own, as `_replace` does, which older Dynamos do not trace."""
    return Options(*[new.get(name, options[n]) for n, name in enumerate(Options._fields)])


# the options of a call that carries none: one object, by which a repeated call is recognised
NO_OPTIONS = Options()


def option_names(spec: Spec) -> tuple[str, ...]:
    """Returns the names of the Options that calls of a spec have, in their order."""
    present = {
        "bias": spec.has_bias,
        "alibi": spec.has_alibi,
        "sinks": spec.has_sinks,
        "seed": spec.dropout > 0 or spec.placed,
        "cu_q": spec.layout == "packed",
        "cu_k": spec.layout == "packed",
        "block_counts": spec.block_size is not None,
        "block_indices": spec.block_size is not None,
        "block_bits": spec.has_bits,
        "key_counts": spec.block_size is not None and spec.needs_grad,
        "key_entries": spec.block_size is not None and spec.needs_grad,
    }
    return tuple(name for name, there in present.items() if there)


def output_dtype(q: Tensor, spec: Spec) -> torch.dtype:
    """Returns the dtype of o."""
    return torch.promote_types(q.dtype, torch.float32) if spec.partial else q.dtype


def grad_dtype(x: Tensor, spec: Spec) -> torch.dtype:
    """Returns the dtype of the gradient of q, k or v."""
    return torch.promote_types(x.dtype, torch.float32) if spec.wide_grads else x.dtype


def differentiable(spec: Spec) -> tuple[str, ...]:
    """Returns the names of the options that a backward has gradients for, in the order of `Grads`."""
    return ("bias",) * spec.bias_grad + ("sinks",) * spec.has_sinks


class BackwardInputs(NamedTuple):
    """The inputs of a backward: the gradients of o and lse (None for zeros), the tensors of the forward, and its options."""

    do: Tensor | None
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    options: Options


class Grads(NamedTuple):
    """The gradients from a backward, in the shapes and dtypes of q, k, v, and of bias and sinks if the spec requires them."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dsinks: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How big a problem is. For packed sequences, `lengths` holds each (queries, keys), and T and S are their sums."""

    B: int
    T: int
    S: int
    H: int
    Hk: int
    lengths: tuple[tuple[int, int], ...] = ()

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """Each sequence's (queries, keys): B equal ones unless packed."""
        return self.lengths or ((self.T, self.S),) * self.B


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A spec and its sizes: what the cost model, the benchmarks and the diagnosis take."""

    spec: Spec
    sizes: Sizes

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one head, over the whole batch."""
        counts: dict[tuple[int, int], int] = {}
        total = 0
        for lengths in self.sizes.sequences:
            if lengths not in counts:
                counts[lengths] = masks.pairs(self.spec.mask, *lengths)
            total += counts[lengths]
        return total


def encode(
    *, dtype, dim, dim_v, group, mask, layout, scale, device, deterministic=False, softcap=0.0, dropout=0.0, has_bias=False,
    has_alibi=False, has_sinks=False, needs_grad=False, bias_grad=False, needs_lse=False, forward_mode=False,
    precision="native", has_kv_scales=False, queries="any", v_order=None, block_size=None, has_bits=False,
    wide_grads=False, partial=False, placed=False,
) -> str:  # fmt: skip
    """A Spec's string. Plain f-strings of plain values, so that Dynamo can trace it."""
    mask.check_intervals(f"a problem of {layout} attention")
    chunks = ",".join([f"{n}" for n in mask.chunks]) if mask.chunks else ""
    flags = (
        has_bias + 2 * has_alibi + 4 * has_sinks + 8 * needs_grad + 16 * bias_grad + 32 * needs_lse + 64 * forward_mode
        + 128 * deterministic + 256 * has_kv_scales + 512 * has_bits + 1024 * wide_grads + 2048 * partial
        + 4096 * placed
    )  # fmt: skip
    size = "None" if block_size is None else f"{block_size[0]}x{block_size[1]}"
    return (
        f"{DTYPE_NAMES[dtype]} {dim} {dim_v} {group} {mask.left} {mask.right} {mask.prefix} [{chunks}] {layout} "
        f"{scale} {softcap} {dropout} {flags} {precision} {device} {queries} {v_order} {size}"
    )


# the bits of a code's flags, as `encode` adds them
_FLAGS = (
    "has_bias", "has_alibi", "has_sinks", "needs_grad", "bias_grad", "needs_lse", "forward_mode", "deterministic",
    "has_kv_scales", "has_bits", "wide_grads", "partial", "placed",
)  # fmt: skip


@cache
def decode(code: str) -> Spec:
    """The Spec behind its string."""
    dtype, dim, dim_v, group, left, right, prefix, chunks, *rest = code.split(" ")
    layout, scale, softcap, dropout, flags, precision, device, queries, v_order, size = rest
    bound = {word: None if word == "None" else int(word) for word in (left, right, prefix)}
    return Spec(
        dtype=DTYPES[dtype],
        dim=int(dim),
        dim_v=int(dim_v),
        group=int(group),
        mask=Mask(bound[left], bound[right], bound[prefix], tuple(int(n) for n in chunks[1:-1].split(",") if n)),
        layout=layout,
        queries=queries,
        scale=float(scale),
        softcap=float(softcap),
        dropout=float(dropout),
        block_size=None if size == "None" else _pair(size),
        precision=None if precision == "native" else decode_precision(precision),
        v_order=None if v_order == "None" else v_order,
        device=device,
        **{name: bool(int(flags) >> n & 1) for n, name in enumerate(_FLAGS)},
    )


def _pair(size: str) -> tuple[int, int]:
    rows, keys = size.split("x")
    return int(rows), int(keys)
