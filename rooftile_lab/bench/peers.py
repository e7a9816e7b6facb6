"""The providers that a benchmark compares: every Rooftile backend, and every peer that is installed.

A provider says why it cannot run a case (`reason`, None if it can) and prepares a call: from a case's inputs to a
function without arguments that returns o (B, T, H, Dv). Preparation is not timed: mask objects, views, compilation.

    rooftile           the automatic choice; and each backend by its name
    standard           the textbook: scores, softmax and product as T x S matrices in plain torch
    torch-math, torch-efficient, torch-flash, torch-cudnn     torch's scaled_dot_product_attention, one kernel each
    flex               FlexAttention, compiled
    fa4, fa3, flash-attn    FlashAttention-4 (flash_attn.cute), FlashAttention-3 (flash_attn_interface) and flash-attn, where
                       they can be imported
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rooftile.cost import io
from rooftile.errors import InvalidInput
from rooftile.exact import api, dispatch
from rooftile.exact.backends import eager
from rooftile.exact.cases import Case, Inputs
from rooftile.exact.masks import CAUSAL, FULL, materialise, query_range
from rooftile.hardware.device import describe
from rooftile.runtime.devices import arch
from rooftile_lab.bench.works import compiled_flex

Forward = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Provider:
    """One contestant."""

    name: str
    reason: Callable[[Case, torch.device, bool], str | None]  # (case, device, needs_grad)
    prepare: Callable[[Case, Inputs], Forward]


def provider_named(name: str) -> Provider:
    """The provider of a name. Raises InvalidInput with the known names if there is none."""
    if name == "rooftile" or name in dispatch.BACKENDS:
        return _rooftile(name)
    if name not in PEERS:
        raise InvalidInput(f"no backend or peer is called {name!r}; has {', '.join(names())}")
    return PEERS[name]


def names() -> list[str]:
    """The names of all providers, Rooftile's first."""
    return ["rooftile", *dispatch.BACKENDS, *PEERS]


def backend_that_runs(name: str, case: Case, device: torch.device, needs_grad: bool) -> str:
    """The backend behind "rooftile" for this case; any other name is its own."""
    if name != "rooftile":
        return name
    return str(dispatch.select(case.problem(arch(device), needs_grad=needs_grad).spec).NAME)


def _rooftile(name: str) -> Provider:
    backend = None if name == "rooftile" else name

    def reason(case: Case, device: torch.device, needs_grad: bool) -> str | None:
        verdicts = dispatch.verdicts(case.problem(arch(device), needs_grad=needs_grad).spec)
        if backend is not None:
            held = _matrices(case, device) if backend == eager.NAME else ()
            return "; ".join((*verdicts[backend], *held)) or None
        return None if () in verdicts.values() else "every backend refuses it"

    def prepare(case: Case, inputs: Inputs) -> Forward:
        function: Callable[..., Tensor] = api.attention_packed if case.lengths else api.attention
        return lambda: function(*inputs.tensors, inputs.mask, backend=backend, **inputs.options)

    return Provider(name, reason, prepare)


def _first(reasons: Iterator[str]) -> str | None:
    return next(reasons, None)


def _beyond(case: Case, *taken: str) -> Iterator[str]:
    """Why a peer that takes q, k, v, a scale and the named options cannot run a case."""
    if case.lengths:
        yield "packed sequences; takes a dense batch"
    for option in ("bias", "alibi", "sinks", "dropout", "softcap"):
        if getattr(case, option) and option not in taken:
            yield f"{option}; is run without it here"
    if "mask" not in taken and case.mask not in (FULL, CAUSAL):
        yield f"mask {case.mask}; has full and causal"


def _matrices(case: Case, device: torch.device) -> Iterator[str]:
    """Why a host cannot hold the T x S matrices: a host that runs out of memory ends the run."""
    # scores, weights, their gradients and intermediates: three to five matrices are held at once
    needed = 2 * io.standard_peak(case.problem(), "bwd")
    if device.type == "cpu" and needed > 0.75 * describe(device).memory_bytes:
        has = describe(device).memory_bytes
        yield f"about {needed / 2**30:.0f} GiB of T x S matrices; the machine has {has / 2**30:.0f} GiB"


def _blind_rows(case: Case) -> Iterator[str]:
    if query_range(case.mask, 0, case.S, case.T, case.S) != (0, case.T):
        yield "rows that see no key; its softmax has no answer for them"


def _heads_first(inputs: Inputs) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in inputs.tensors)  # (B, H, T, D)


def _grouped(case: Case) -> bool:
    return case.H // case.Hk > 1


def _prepare_standard(case: Case, inputs: Inputs) -> Forward:
    q, k, v = _heads_first(inputs)
    scale = case.dim**-0.5 if case.scale is None else case.scale
    hidden = None if case.mask.is_full else ~materialise(case.mask, case.T, case.S, q.device)  # (T, S)

    def forward() -> Tensor:
        keys, values = (x.repeat_interleave(case.H // case.Hk, dim=1) if _grouped(case) else x for x in (k, v))
        x = q @ keys.mT * scale  # (B, H, T, S)
        if case.softcap:
            x = case.softcap * torch.tanh(x / case.softcap)
        if hidden is not None:
            x = x.masked_fill(hidden, float("-inf"))
        return (x.softmax(-1) @ values).transpose(1, 2)

    return forward


def _standard_reason(case: Case, device: torch.device, needs_grad: bool) -> str | None:
    return _first(chain(_beyond(case, "mask", "softcap"), _blind_rows(case), _matrices(case, device)))


def _torch_sdpa(name: str, kernel: str) -> Provider:
    def reasons(case: Case, device: torch.device) -> Iterator[str]:
        yield from _beyond(case, "mask")
        yield from _blind_rows(case)
        if kernel == "MATH":
            yield from _matrices(case, device)
        if device.type == "cpu" and kernel not in ("MATH", "FLASH_ATTENTION"):
            yield "tensors are on cpu; is for CUDA"
        if device.type == "cuda" and kernel in ("FLASH_ATTENTION", "CUDNN_ATTENTION") and case.dtype == "fp32":
            yield "dtype fp32; has bf16, fp16"
        if device.type == "cuda" and kernel == "EFFICIENT_ATTENTION" and _grouped(case):
            yield f"groups of {case.H // case.Hk} query heads a key head; has one"
        if device.type == "cuda" and kernel == "FLASH_ATTENTION" and not _torch_names_mask(case):
            yield f"mask {case.mask} with T = {case.T}, S = {case.S}; has full, and causal with T = S"

    def prepare(case: Case, inputs: Inputs) -> Forward:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = _heads_first(inputs)
        options: dict[str, Any] = {"scale": case.scale, "enable_gqa": _grouped(case)}
        if _torch_names_mask(case):
            # torch aligns its causal mask top-left, which is ours where T = S
            options["is_causal"] = case.mask == CAUSAL
        else:
            options["attn_mask"] = materialise(case.mask, case.T, case.S, q.device)
        only = getattr(SDPBackend, kernel)

        def forward() -> Tensor:
            with sdpa_kernel(only):
                o: Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
            return o.transpose(1, 2)

        return forward

    return Provider(name, lambda case, device, needs_grad: _first(reasons(case, device)), prepare)


def _torch_names_mask(case: Case) -> bool:
    return case.mask.is_full or (case.mask == CAUSAL and case.T == case.S)


def _flex_reason(case: Case, device: torch.device, needs_grad: bool) -> str | None:
    if device.type != "cuda":
        return "tensors are on cpu; is compiled for CUDA here"
    return _first(_beyond(case, "mask", "softcap", "alibi"))


def _prepare_flex(case: Case, inputs: Inputs) -> Forward:
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = _heads_first(inputs)
    shift = case.S - case.T
    slopes = inputs.options.get("alibi")

    def sees(b: Tensor, h: Tensor, t: Tensor, j: Tensor) -> Tensor:
        seen: Tensor = (j >= case.mask.first_key(t + shift)) & (j <= case.mask.last_key(t + shift))
        return seen

    def score(x: Tensor, b: Tensor, h: Tensor, t: Tensor, j: Tensor) -> Tensor:
        if case.softcap:
            x = case.softcap * torch.tanh(x / case.softcap)
        return x if slopes is None else x - slopes[h] * (t + shift - j).abs()

    blocks = None if case.mask.is_full else create_block_mask(sees, None, None, case.T, case.S, device=q.device)
    score_mod = score if case.softcap or case.alibi else None
    flex = compiled_flex()

    def forward() -> Tensor:
        o = flex(q, k, v, score_mod=score_mod, block_mask=blocks, scale=case.scale, enable_gqa=_grouped(case))
        return o.transpose(1, 2)

    return forward


def _absence(module: str) -> Iterator[str]:
    """Why a module of flash-attn cannot be used. Looking for a submodule imports its parent, which may be broken."""
    try:
        if find_spec(module.partition(".")[0]) is None or find_spec(module) is None:
            yield f"{module} is not installed"
    except ImportError as error:
        yield f"{module} cannot be imported: {error}"


def _flash_attn(name: str, module: str) -> Provider:
    def reasons(case: Case, device: torch.device) -> Iterator[str]:
        yield from _absence(module)
        if device.type != "cuda":
            yield "tensors are on cpu; is for CUDA"
        if case.dtype not in ("bf16", "fp16"):
            yield f"dtype {case.dtype}; has bf16, fp16"
        yield from _beyond(case)

    def prepare(case: Case, inputs: Inputs) -> Forward:
        from importlib import import_module

        function = import_module(module).flash_attn_func
        options: dict[str, Any] = {"causal": case.mask == CAUSAL, "softmax_scale": case.scale}

        def forward() -> Tensor:
            result = function(*inputs.tensors, **options)
            o: Tensor = result[0] if isinstance(result, tuple) else result
            return o

        return forward

    return Provider(name, lambda case, device, needs_grad: _first(reasons(case, device)), prepare)


PEERS: dict[str, Provider] = {
    peer.name: peer
    for peer in (
        Provider("standard", _standard_reason, _prepare_standard),
        _torch_sdpa("torch-math", "MATH"),
        _torch_sdpa("torch-efficient", "EFFICIENT_ATTENTION"),
        _torch_sdpa("torch-flash", "FLASH_ATTENTION"),
        _torch_sdpa("torch-cudnn", "CUDNN_ATTENTION"),
        Provider("flex", _flex_reason, _prepare_flex),
        _flash_attn("fa4", "flash_attn.cute"),
        _flash_attn("fa3", "flash_attn_interface"),
        _flash_attn("flash-attn", "flash_attn.flash_attn_interface"),
    )
}
