"""Runs forward and backward on a sequence whose score matrix would be very large, and prints the memory used.

Run: python examples/long_sequence.py [length]
"""

import resource
import sys
import time

import torch

import rooftile as rt

N = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
H, D = 2, 64
device = "cuda" if torch.cuda.is_available() else "cpu"


def peak_mib() -> float:
    """Returns the peak memory so far, of the GPU or of this process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    # KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


torch.manual_seed(0)
dtype = torch.bfloat16 if device == "cuda" else torch.float32
q, k, v = (torch.randn(1, N, H, D, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
rt.attention(q[:, :128], k[:, :128], v[:, :128], rt.CAUSAL).sum().backward()

before, start = peak_mib(), time.perf_counter()
o = rt.attention(q, k, v, rt.CAUSAL)
o.square().mean().backward()
norm = q.grad.norm().item()
print(f"{N} tokens, {H} heads, forward and backward on {device}: {time.perf_counter() - start:.2f} s")
print(f"memory grew by {peak_mib() - before:.0f} MiB; the scores alone would be {H * N * N * 4 / 2**20:,.0f} MiB in fp32")
print(f"norm of dq {norm:.4g}")
