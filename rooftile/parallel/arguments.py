"""The arguments of `context_attention`: from what one rank was given to a checked call, or one sentence."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact import validate as checks
from rooftile.exact.masks import FULL, Mask
from rooftile.exact.spec import CallSettings, Options, Spec
from rooftile.hardware import link
from rooftile.parallel import heads
from rooftile.parallel.estimates import Plan, planned
from rooftile.parallel.layouts import Held, check_layout, count, ranges
from rooftile.parallel.loads import advice
from rooftile.parallel.traffic import Sequence
from rooftile.runtime.arguments import shown, whole
from rooftile.runtime.devices import arch
from rooftile.runtime.operators import transformed
from rooftile.runtime.ranks import Grid, Ranks, check_device
from rooftile.runtime.tensors import autocast, check_offsets

METHODS = ("auto", "gather", "ulysses", "ring", "usp", "usp-gather")
# over a mesh of two dimensions: heads are exchanged within its rows, and keys travel between them
OF_GRIDS = ("usp", "usp-gather")


class Checked(NamedTuple):
    """The arguments of a call, found to be right on this rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    options: Options  # a bias is (1|B, 1|H, 1|rows, 1|T), or packed (1|H, 1|rows, J)
    settings: CallSettings
    ranks: Ranks | Grid
    layout: str
    method: str
    cu: tuple[int, ...] | None
    tokens: int

    @property
    def held(self) -> Held:
        """The ranges of tokens that each rank holds."""
        return ranges(self.tokens, self.ranks.count, self.layout, self.cu)

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Whatever has to be the same on every rank."""
        q, k, v, s = self.q, self.k, self.v, self.settings
        outer = (q.shape[:-3], q.shape[-2:], k.shape[-2:], v.shape[-1], str(q.dtype))
        seed = int(s.seed) if isinstance(s.seed, Tensor) else s.seed
        numbers = s.scale, s.softcap, s.dropout, seed
        given = [name for name, x in zip(Options._fields, self.options, strict=True) if x is not None]
        return *outer, repr(self.mask), *given, *numbers, self.layout, self.method, self.tokens, self.cu


def check(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, ranks: Ranks | Grid, options: Options, settings: CallSettings, *,
    layout: str, method: str, cu: Tensor | None, tokens: int | None,
) -> Checked:  # fmt: skip
    """Returns the call. Raises InvalidInput or Unsupported."""
    check_method(method, ranks)
    check_layout(layout, cu is not None)
    if transformed():
        raise Unsupported("context_attention under torch.func; has autograd: call backward(), or torch.autograd.grad")
    if isinstance(q, Tensor) and torch.is_autocast_enabled(q.device.type):
        q, k, v = (autocast(x) for x in (q, k, v))
    checks.check_tensors(q, k, v, checks.DENSE if cu is None else checks.PACKED)
    check_device("q", q, ranks)
    if k.shape[-3] != q.shape[-3]:
        raise InvalidInput(f"k has {k.shape[-3]} tokens on this rank; q has {q.shape[-3]}, and they are the same tokens")
    offsets, total = _length(q, cu, tokens, ranks)
    held = count(ranges(total, ranks.count, layout, offsets)[ranks.rank])
    if held != q.shape[-3]:
        raise InvalidInput(
            f"q has {q.shape[-3]} tokens on rank {ranks.rank}; the layout {layout!r} gives it {held} of {total}: "
            "pass what rooftile.parallel.shard returned, and tokens= where the ranks' lengths differ"
        )
    mask = FULL if mask is None else mask
    if isinstance(mask, Mask):
        mask.check_intervals("attention over a sequence that ranks hold in parts")
    checks.check_seed(0 if settings.seed is None else settings.seed, settings.dropout, torch.device("cpu"))
    if options.alibi is not None:
        checks.check_slopes(options.alibi, q, q.shape[0] if offsets is None else len(offsets) - 1)
    if options.bias is not None:
        options = options._replace(bias=_bias(options.bias, q, offsets, total))
    if isinstance(ranks, Grid):
        heads.check(q, k, options, ranks.inner, "usp" if method == "auto" else method)
    if method == "auto":
        found = _planned(q, k, v, mask, options, settings, ranks, layout, offsets, total)
        method = found.method if found is not None else "usp-gather" if isinstance(ranks, Grid) else "gather"
    if method == "ulysses" and not isinstance(ranks, Grid):
        heads.check(q, k, options, ranks, method)
    return Checked(q, k, v, mask, options, settings, ranks, layout, method, offsets, total)


def check_method(method: str, ranks: Ranks | Grid) -> None:
    """Raises InvalidInput for an unknown method, or one that does not go with a mesh of two dimensions or with one group."""
    if method not in METHODS:
        raise InvalidInput(f"method is {method!r}; must be one of {', '.join(map(repr, METHODS))}")
    if isinstance(ranks, Grid) and method not in ("auto", *OF_GRIDS):
        raise InvalidInput(
            f"method {method!r} on a mesh of two dimensions; has 'usp', 'usp-gather' and 'auto' there: pass one of its "
            "dimensions, as in mesh['cp']"
        )
    if not isinstance(ranks, Grid) and method in OF_GRIDS:
        raise InvalidInput(
            f"method {method!r} on one group of {ranks.count} ranks; needs a DeviceMesh of two dimensions: keys travel along the "
            "first, and heads are exchanged along the second"
        )


def _bias(bias: Tensor, q: Tensor, cu: tuple[int, ...] | None, total: int) -> Tensor:
    """Returns a bias in numbers and with all its axes, in fp32 where parts of a split sequence add to one of its gradients."""
    numbers = checks.bias_in_numbers(Options(bias), q.dtype).bias
    H, rows = q.shape[-2], q.shape[-3]
    if cu is None:
        due: tuple[int, ...] = (q.shape[0], H, rows, total)
        word = f"(B, H, rows, T), {due}: the rows of this rank's tokens, and a column for every key"
    else:
        due = (H, rows, max((b - a for a, b in pairwise(cu)), default=0))
        word = f"(H, rows, J), {due}: the rows of this rank's tokens, and J at least the longest document's keys"
    shape = tuple(numbers.shape) if isinstance(numbers, Tensor) and numbers.is_floating_point() else None
    fits = shape is not None and (len(shape) <= 4 if cu is None else len(shape) == 3 and shape[-1] >= due[-1])
    checked = zip(reversed(shape or ()), reversed(due), strict=False) if cu is None else zip(shape or (), due[:2], strict=False)
    if not fits or not all(n in (1, m) for n, m in checked):
        raise InvalidInput(f"bias is {shown(bias) if shape is None else shape}; must broadcast to {word}")
    assert isinstance(numbers, Tensor)
    numbers = numbers[(None,) * (len(due) - numbers.ndim)]
    broadcast = numbers.shape[-2] == 1 or numbers.shape[-1] == 1
    return numbers.to(torch.promote_types(q.dtype, torch.float32)) if broadcast else numbers


def explained(call: Checked) -> str:
    """Says in a line by which method a call runs, and what is predicted of it where chip and link are known."""
    ranks, method, held = call.ranks, call.method, call.q.shape[-3]
    # the words of `explain` begin in the tenth column
    head = f"ranks    {ranks.count}, of which rank {ranks.rank} has {held:,} of {call.tokens:,} tokens ({call.layout}): {method}"
    found = _planned(*call[:7], call.layout, call.cu, call.tokens)
    if found is None:
        uneven = advice(_sequence(call.q, call.k, call.v, call.mask, ranks, call.layout, call.cu, call.tokens))
        return f"{head}; no time is predicted: the chip or the link is not known, see rooftile.parallel.plan{uneven}"
    mine = next(each for each in found.estimates if each.method == method)
    return f"{head}, {mine.time_us / 1e3:.3g} ms predicted, sends {mine.bytes_sent / 2**20:.4g} MiB; {found.why}"


def _planned(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options, settings: CallSettings, ranks: Ranks | Grid, layout: str,
    cu: tuple[int, ...] | None, total: int,
) -> Plan | None:  # fmt: skip
    """Returns the plan that "auto" follows; every rank finds the same from the same sizes. None where nothing is known."""
    groups = (ranks.outer, ranks.inner) if isinstance(ranks, Grid) else (ranks,)
    if q.device.type != "cuda" or ranks.count == 1 or not isinstance(mask, Mask):
        return None
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    spec = Spec(
        dtype=q.dtype, dim=q.shape[-1], dim_v=v.shape[-1], group=q.shape[-2] // k.shape[-2], mask=mask, scale=1.0,
        layout="dense" if cu is None else "packed", has_bias=options.bias is not None, has_alibi=options.alibi is not None,
        dropout=float(settings.dropout), device=arch(q.device),
    )  # fmt: skip
    sequence = _sequence(q, k, v, mask, ranks, layout, cu, total)
    links = tuple(link.known(each.group, q.device) for each in groups)
    device = torch.cuda.get_device_properties(q.device)
    return planned(sequence, spec, links, device.name, needs_grad=needs_grad, device_bytes=device.total_memory)


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, ranks: Ranks | Grid, layout: str, cu: tuple[int, ...] | None, total: int
) -> Sequence:
    """Returns a problem's sizes and layout, as plans take them."""
    return Sequence(
        tokens=total, ranks=ranks.count, mask=mask, H=q.shape[-2], Hk=k.shape[-2], D=q.shape[-1], Dv=v.shape[-1],
        B=q.shape[0] if cu is None else 1, itemsize=q.element_size(), layout=layout, cu=cu,
        inner=ranks.inner.count if isinstance(ranks, Grid) else 0,
    )  # fmt: skip


def _length(q: Tensor, cu: Tensor | None, tokens: int | None, ranks: Ranks | Grid) -> tuple[tuple[int, ...] | None, int]:
    """Returns the offsets of the whole pack, and the whole length."""
    if cu is not None:
        total = int(cu[-1]) if isinstance(cu, Tensor) and cu.ndim == 1 and len(cu) else 0
        check_offsets("cu", cu, total, "tokens of the whole pack", torch.device("cpu"), True)
        if tokens is not None and tokens != total:
            raise InvalidInput(f"tokens is {tokens}; cu ends at {total}, and they must agree")
        return tuple(cu.tolist()), total
    if tokens is None:
        return None, q.shape[-3] * ranks.count
    given = whole(tokens)
    if given is None or given < 0:
        raise InvalidInput(f"tokens is {shown(tokens)}; must be an integer of at least 0, the whole sequence's length")
    return None, given
