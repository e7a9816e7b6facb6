"""Turns calls with padded keys, nested tensors, lists of blocks or a BlockMask into calls of the two plain kinds.

A call is dense or packed afterwards, and goes the one way down (`rooftile.exact.api`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rooftile.exact import validate as checks
from rooftile.exact.masks import Mask
from rooftile.exact.ops.listed import with_blocks
from rooftile.exact.ops.nested import nested_of, packed_of
from rooftile.exact.ops.padding import with_padding, without_padding
from rooftile.exact.spec import Call, replaced
from rooftile.runtime.operators import levels_of_gradients, only_grad_and_vmap, transformed, transforms_active
from rooftile.runtime.tensors import autocast

# gives o and lse of a normalised call the form that the caller's tensors have
Finish = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def normalise(call: Call, blocks: Any, padding: Any, validate: bool) -> tuple[Call, Finish | None]:
    """Returns a call that is dense or packed, and what its results still need.

    Args:
        call: its mask may be FlexAttention's BlockMask, and its tensors nested.
        blocks: `rooftile.Blocks`, or None.
        padding: booleans (B, S), True for keys that no query sees, or None.
        validate: whether the offsets of a packed call are read, also on a GPU, where that waits.
    """
    if call.is_packed:
        call = call._replace(options=checks.check_packed(call.q, call.k, call.options, validate))
    if blocks is not None or type(call.mask) is not Mask:
        call = with_blocks(call, blocks, validate)
    if padding is not None:
        found = without_padding(call, padding)
        return found, partial(with_padding, q=call.q) if found.is_packed else None
    if isinstance(call.q, Tensor) and call.q.is_nested:
        found = packed_of(call)
        assert found.options.cu_q is not None
        return found, partial(nested_of, cu_q=found.options.cu_q)
    return call, None


def completed(call: Call) -> tuple[Call, str]:
    """Returns a dense or packed call with all its tensors as a kernel reads them, and the code of its Spec.

    Autocast, the seed of a dropout and a boolean bias are settled here, and each argument is checked.
    """
    checks.check_query(call.q)
    q, k, v, mask, options, settings, is_packed = call
    if is_packed:
        options = checks.check_packed(q, k, options, False)
    if not q.is_meta and torch.is_autocast_enabled(q.device.type):
        q, k, v = (autocast(x) for x in (q, k, v))
    if options.seed is None and (settings.dropout or settings.seed is not None):
        options = replaced(options, seed=checks.check_seed(settings.seed, settings.dropout, q.device))
    options = checks.bias_in_numbers(options, q.dtype)
    code = checks.spec_code(q, k, v, mask, options, settings, _beyond_reverse_mode(q, k, v, *options))
    if options.bias is not None and q.ndim == 4:
        options = replaced(options, bias=_dense_bias(options.bias))
    return Call(q, k, v, mask, options, settings, is_packed), code


def _beyond_reverse_mode(*tensors: Tensor | None) -> bool:
    """Whether a derivative in forward mode is under way through one of these, or one of a derivative under torch.func."""
    if torch.compiler.is_compiling():
        # Dynamo tells whether there are transforms, but not which
        return transforms_active()
    given = [x for x in tensors if isinstance(x, Tensor) and x.is_floating_point()]
    if transformed():
        # no tangent is looked for behind the transforms' wrappers
        return forward_ad._current_level >= 0 or not only_grad_and_vmap() or len(levels_of_gradients(*given)) > 1
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in given)


def _dense_bias(bias: Tensor) -> Tensor:
    """The bias with all its four axes written out."""
    return bias[(None,) * (4 - bias.ndim)] if bias.ndim < 4 else bias
