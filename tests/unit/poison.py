"""One NaN in one input: it must reach the outputs that the materialised mask predicts, and change no others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import rooftile as rt
from rooftile.exact.masks import Mask, materialise

MASKS = (
    rt.FULL,
    rt.CAUSAL,
    rt.CAUSAL & rt.Window(9),
    rt.Window(5, 3),
    rt.Prefix(20),
    rt.Chunk(24),
    rt.Chunk(12) & rt.Chunk(18) & rt.CAUSAL,
)
LENGTHS = ((70, 70), (40, 90), (90, 40))


def assert_nan_only_where_seen(backend: str, mask: Mask, T: int, S: int, poisoned: str, softcap: float | None = None) -> None:
    """Poisons an element of q, k, v or do in the middle; head 0 of two key heads, in groups of two."""
    q, do = torch.randn(2, T, 4, 8), torch.randn(2, T, 4, 8)
    k, v = torch.randn(2, S, 2, 8), torch.randn(2, S, 2, 8)
    named = {"q": q, "k": k, "v": v, "do": do}
    place = (1, named[poisoned].shape[1] // 2, 0, 3)
    named[poisoned][place] = 0.0
    clean = run(**named, mask=mask, backend=backend, softcap=softcap)
    named[poisoned][place] = math.nan
    found = run(**named, mask=mask, backend=backend, softcap=softcap)
    due = expected_nan(materialise(mask, T, S), poisoned, place[1])
    for name, x in found.items():
        lost = torch.zeros_like(x, dtype=torch.bool)
        # keys belong to head 0, rows to heads 0 and 1 of its group unless the poison is in one head's row
        heads = slice(0, 1) if poisoned in ("q", "do") or name in ("dk", "dv") else slice(0, 2)
        lost[1, :, heads] = due[name][:, None]
        # Triton's kernels give a row NaN as a whole, though it sees it in one column
        exact = backend != "triton" or not lost.any()
        shown, lost = (x.isnan(), lost) if exact else (y.any(-1, keepdim=True).expand_as(x) for y in (x.isnan(), lost))
        assert torch.equal(shown, lost), f"{name}: NaN elsewhere"
        torch.testing.assert_close(x[~lost], clean[name][~lost], rtol=1e-4, atol=1e-5, msg=f"{name}: others changed")


def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, backend: str, softcap: float | None) -> dict[str, Tensor]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = rt.attention(*leaves, mask, backend=backend, softcap=softcap)
    grads = torch.autograd.grad(o, leaves, do)
    return {"o": o.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def expected_nan(seen: Tensor, poisoned: str, n: int) -> dict[str, Tensor]:
    """Returns the expected NaNs, (T | S, D) per output; seen is the mask (T, S), n the poisoned row or key, 3 its column."""
    row, column = torch.zeros(len(seen), dtype=torch.bool), torch.zeros(8, dtype=torch.bool)
    column[3] = True
    row[n : n + 1] = poisoned in ("q", "do")
    nothing = torch.zeros(8, dtype=torch.bool)
    # rows whose weights, output and score gradients are lost, and the columns of o and dv that go with them
    touched = row & seen.any(1) if poisoned in ("q", "do") else seen[:, n]
    reached = (seen & touched[:, None]).any(0)
    o = {"q": ~nothing, "k": ~nothing, "v": column, "do": nothing}[poisoned]
    dv = {"q": ~nothing, "k": ~nothing, "v": nothing, "do": column}[poisoned]
    return {
        "o": touched[:, None] & o,
        "dq": touched[:, None] & ~nothing,
        "dk": reached[:, None] & ~nothing,
        "dv": reached[:, None] & dv,
    }
