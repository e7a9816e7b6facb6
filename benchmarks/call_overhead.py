"""What a call costs on the host: the public function (on the automatic choice, and on Triton), and of the Triton backend
the launcher that allocates the outputs and the bare kernel launch (by Triton's lookup, and of the compiled kernel).

    PYTHONPATH=. python benchmarks/call_overhead.py >> benchmarks/results/h200-overhead.jsonl

Small tensors, so the GPU is never what is waited for; medians of several rounds, garbage collection off; PyTorch's own
flash attention beside it.
"""

# ruff: noqa: T201 - what it prints is what it is for
from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import rooftile as rt
from rooftile import validate
from rooftile.backends.triton import flash_fwd
from rooftile.backends.triton.call import call_of
from rooftile.backends.triton.tiles import forward_tile
from rooftile.spec import Asked, Options, decode

CALLS, ROUNDS = 1000, 9


def host_us(call: Callable[[], object]) -> float:
    """Median microseconds of host time a call."""
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return round(statistics.median(rounds), 2)


def main(commit: str) -> None:
    gc.disable()
    q, k, v = (torch.randn(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    wants_grad = q.detach().requires_grad_()
    o = rt.attention(wants_grad, k, v, rt.CAUSAL)
    spec = decode(validate.spec_code(q, k, v, rt.CAUSAL, Options(), Asked(deterministic=False)))
    call, tile = call_of(q, k, v, Options(), spec), forward_tile(spec)
    out, lse = flash_fwd.launch(call, tile)
    arguments = (q, k, v, out, lse, *call.option_tensors, *call.strides)
    sizes = (call.B, call.H, call.T, call.S, 1, call.wave, *call.numbers)
    constants = flash_fwd._constants(spec, tile)
    compiled = flash_fwd._forward[(2,)](*arguments, *sizes, **constants)
    ordered = [constants[name] for name in flash_fwd._forward.arg_names if name in constants]
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        measured = {
            "public": lambda: rt.attention(q, k, v, rt.CAUSAL),
            "public, triton": lambda: rt.attention(q, k, v, rt.CAUSAL, backend="triton"),
            "public, with gradients": lambda: rt.attention(wants_grad, k, v, rt.CAUSAL),
            "backward": lambda: torch.autograd.grad(o, wants_grad, q, retain_graph=True),
            "launch": lambda: flash_fwd.launch(call, tile),
            "bare kernel": lambda: flash_fwd._forward[(2,)](*arguments, *sizes, **constants),
            "compiled kernel": lambda: compiled[(2, 1, 1)](*arguments, *sizes, *ordered),
            "torch flash": lambda: F.scaled_dot_product_attention(*heads_first, is_causal=True),
        }
        for step in measured.values():
            host_us(step)
        found = {name: host_us(step) for name, step in measured.items()}
    where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit}
    print(json.dumps({"host_us": found, **where, "date": datetime.now(UTC).isoformat(timespec="seconds")}))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
