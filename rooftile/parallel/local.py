"""Calls of attention that a rank makes for its own pieces of a split sequence, each checked and dispatched once per kind."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.exact import dispatch
from rooftile.exact.masks import Mask
from rooftile.exact.normalise import completed
from rooftile.exact.ops.attention import listed, run_backward, run_forward
from rooftile.exact.spec import NO_OPTIONS, Call, CallSettings, Options, decode, differentiable
from rooftile.runtime.launch import BoundedCache


class LocalCall(NamedTuple):
    """The code of a call's spec, the backend that runs it, and the tensors of its options."""

    code: str
    backend: str
    options: list[Tensor]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns o and lse."""
        return run_forward(q, k, v, self.options, self.code, self.backend)

    def backward(
        self, do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[list[Tensor], dict[str, Tensor]]:  # fmt: skip
        """Returns the gradients of q, k and v, and the gradients of the options by name."""
        found = run_backward(do, dlse, q, k, v, o, lse, self.options, self.code, self.backend)
        names = differentiable(decode(self.code)) if self.options else ()
        return found[:3], dict(zip(names, found[3:], strict=True))


# the code and the backend of calls without options, by all that they depend on
_KNOWN = BoundedCache()


def local_call(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options, settings: CallSettings,
    needs: tuple[bool, bool, bool, bool, bool], cu: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
) -> LocalCall:  # fmt: skip
    """Checks a call and chooses its backend, as `rooftile.attention` does.

    Args:
        needs: whether q, k, v, the bias and the sinks need gradients.
        cu: offsets of packed queries and keys.
    """
    offsets = [] if cu is None else [_offsets(each, q.device) for each in cu]
    plain = options is NO_OPTIONS or all(x is None for x in options)
    key = (
        q.shape[-2:], k.shape[-2:], v.shape[-1], q.dtype, q.device, mask, settings, needs, cu is None,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    if plain and key in _KNOWN:
        code, chosen = _KNOWN[key]
        return LocalCall(code, chosen, offsets)
    # the code says whether a backward must exist, as it would outside of an autograd function
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_(need) for x, need in zip((q, k, v), needs[:3], strict=True))
        bias, sinks = (
            None if x is None else x.detach().requires_grad_(need)
            for x, need in zip((options.bias, options.sinks), needs[3:], strict=True)
        )
        options = options._replace(bias=bias, sinks=sinks)
        if cu is not None:
            options = options._replace(cu_q=offsets[0], cu_k=offsets[1])
        call, code = completed(Call(q, k, v, mask, options, settings, cu is not None))
    chosen = dispatch.choose(code, settings.backend)
    if plain:
        _KNOWN[key] = code, chosen
    return LocalCall(code, chosen, [x.detach() for x in listed(call.options)])


@lru_cache(maxsize=256)
def _offsets(cu: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(cu, dtype=torch.int32, device=device)


def added(total: Tensor | None, part: Tensor, start: int, stop: int, tokens: int) -> Tensor:
    """Returns the sum of gradients (..., tokens, heads, dim) with one more part, of the tokens [start, stop).

    `total` is None at first. A part that covers all tokens then becomes the sum, without being copied.
    """
    if total is None:
        if (start, stop) == (0, tokens):
            return part
        total = part.new_zeros((*part.shape[:-3], tokens, *part.shape[-2:]))
    total[..., start:stop, :, :].add_(part)
    return total


def some(x: Any, index: Any) -> Any:
    """x[index], or None where there is no x."""
    return None if x is None else x[index]
