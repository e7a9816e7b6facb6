"""The definition of linear attention.

    S_i = sum_{j <= i} phi(k_j) v_j^T          all j without a mask; plus the state that comes in
    z_i = sum_{j <= i} phi(k_j)
    o_i = phi(q_i)^T S_i / phi(q_i)^T z_i      without the division if it is not normalised

phi(x) = elu(x) + 1, max(x, 0) or x. There is no softmax scale. A row whose weights are all 0 gives 0.

Katharopoulos et al., Transformers are RNNs, arXiv:2006.16236, equations 9 to 12.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Feature = str | Callable[[Tensor], Tensor]


def phi(x: Tensor, feature: Feature) -> Tensor:
    """The features of x, in the dtype of x."""
    if callable(feature):
        return feature(x)
    if feature == "elu":
        # elu(x) + 1, where exp x - 1 + 1 would lose the small numbers
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
    if feature == "relu":
        return x.relu()
    assert feature == "identity"
    return x


def linear(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    causal: bool,
    *,
    feature: Feature = "elu",
    normalise: bool = True,
    state: tuple[Tensor, Tensor] | None = None,  # (B, Hk, F, Dv), (B, Hk, F)
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns o (B, T, H, Dv) and the last S and z. Computes in fp32, or in fp64 for fp64 inputs; o has the dtype of q."""
    group = q.shape[2] // k.shape[2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    f_q, f_k, values = phi(q.to(wide), feature), phi(k.to(wide), feature), v.to(wide)
    S = (f_k[..., None] * values[..., None, :]).cumsum(1)  # (B, S, Hk, F, Dv)
    z = f_k.cumsum(1)  # (B, S, Hk, F)
    first = (S.new_zeros(S.shape[:1] + S.shape[2:]), z.new_zeros(z.shape[:1] + z.shape[2:])) if state is None else state
    S, z = (torch.cat((x[:, None], x[:, None] + y), 1) for x, y in zip(first, (S, z), strict=True))
    last = S[:, -1], z[:, -1]
    S, z = (x[:, 1:] if causal else x[:, -1:] for x in (S, z))
    S, z = (x.repeat_interleave(group, 2) for x in (S, z))
    n = (f_q[..., None] * S).sum(-2)  # (B, T, H, Dv)
    if not normalise:
        return n.to(q.dtype), *last
    den = (f_q * z).sum(-1, keepdim=True)  # (B, T, H, 1)
    o = (n / den.masked_fill(den == 0, 1.0)).masked_fill(den == 0, 0.0)
    return o.to(q.dtype), *last
