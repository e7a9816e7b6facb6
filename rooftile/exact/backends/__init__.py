"""Interchangeable exact implementations. None imports another.

A backend is a module with

    NAME                                          its name in `backend=` and in messages
    refusals(spec) -> Iterator[str]               reasons against a spec: what came; what it has. Pure: no tensor, no launch
    forward(q, k, v, options, spec)               -> o, lse
    backward(do, dlse, q, k, v, o, lse, options, spec) -> Grads

Dense: q (B, T, H, D), k (B, S, Hk, D), v (B, S, Hk, Dv), o (B, T, H, Dv), lse (B, H, T).
Packed: q (total_q, H, D), k (total_k, Hk, D), v (total_k, Hk, Dv), o (total_q, H, Dv), lse (H, total_q), and offsets in options.
Inputs may have any strides. o, lse and every gradient are contiguous; lse is fp32 (fp64 for fp64 inputs), natural log,
-inf for a row that sees nothing. `do` and `dlse` may be None (no gradient).
"""
