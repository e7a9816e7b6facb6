"""Attention in 8 bits beside the fastest in 16: end to end, the attention alone, and what quantising reads and writes a second.

    PYTHONPATH=. python benchmarks/eight_bits.py COMMIT >> benchmarks/results/h200-precision.jsonl

16,384 queries and keys, 2,048 / D heads, and shorter, bf16; contestants take turns, medians of all samples. Peers that are
installed.
"""

# ruff: noqa: T201 - what it prints is what it is for
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

import rooftile as rt
from rooftile.backends.hopper import DIMS_8BIT
from rooftile.bench.clock import clock_for, medians
from rooftile.bench.peers import provider_named
from rooftile.bench.session import open_session
from rooftile.cases import CASES
from rooftile.masks import CAUSAL, FULL, Mask
from rooftile.numerics.recipe import MEAN_OF

PEERS = ("torch-cudnn", "fa4")
LENGTHS = {"1k": 1024, "4k": 4096, "16k": 16384}


def contestants(case: str, mask: Mask) -> dict[str, Callable[[], Any]]:
    chosen = CASES[case]
    device = torch.device("cuda")
    inputs = chosen.inputs(device, requires_grad=False)
    q, k, v = inputs.tensors[:3]
    works: dict[str, Callable[[], Any]] = {"bf16": lambda: rt.attention(q, k, v, mask, backend="hopper")}
    for name in PEERS:
        provider = provider_named(name)
        if provider.reason(chosen, device, False) is None:
            works[name] = provider.prepare(chosen, inputs)
    for precision in ("fp8", "int8"):

        def whole(precision: str = precision) -> Tensor:
            return rt.attention(q, k, v, mask, precision=precision, backend="hopper")

        def quantise(precision: str = precision) -> object:
            return rt.quantise_qkv(q, k, v, precision, backend="hopper")

        qkv = rt.quantise_qkv(q, k, v, precision, backend="hopper")
        works |= {
            precision: whole,
            f"{precision}, quantising": quantise,
            f"{precision}, attention": lambda qkv=qkv: rt.attention_quantised(qkv, mask),
        }
    return works


def main(commit: str) -> None:
    device = torch.device("cuda")
    clock, session = clock_for(device, 12.0), open_session(device)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit}
    about |= {"copy_gbs": session.ceilings.copy_gbs, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    for dim, _ in DIMS_8BIT:
        for mask in (FULL, CAUSAL):
            for word, S in LENGTHS.items():
                B, H = 16384 // S, 2048 // dim
                works = contestants(f"d{dim}-{'causal' if mask == CAUSAL else 'full'}-{word}", mask)
                us = medians(works, clock)
                best = min(us[name] for name in ("bf16", *PEERS) if name in us)
                flops = 4 * B * H * S * S * dim / (2 if mask == CAUSAL else 1)
                peer = min((us[name] for name in PEERS if name in us), default=None)
                # 16 bits in, 8 out; some keys are read before for their mean
                moved = B * H * dim * (3 * 3 * S + 2 * len(range(0, S, max(S // MEAN_OF, 1))))
                for name, time in us.items():
                    row = {"what": name, "dim": dim, "mask": str(mask), "S": S, "us": round(time, 1)}
                    if name.endswith("quantising"):
                        gbs = moved / time / 1e3
                        row |= {"gbs": round(gbs, 1), "of_copy": round(gbs / session.ceilings.copy_gbs, 3)}
                    else:
                        row |= {"tflops": round(flops / time / 1e6, 1), "of_best_in_16_bits": round(best / time, 3)}
                        row |= {"of_best_peer": round(peer / time, 3)} if peer else {}
                    print(json.dumps(row | about), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "unknown")
