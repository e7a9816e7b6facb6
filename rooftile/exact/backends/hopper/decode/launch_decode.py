"""Starts decoding from pages: the outputs, the kernel, and the merge of its pieces."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import triton
from torch import Tensor

from rooftile.exact.backends.device.split_kv import BATCH, MergeSpec, start_merge
from rooftile.exact.backends.hopper.decode import bf16, fp8
from rooftile.exact.backends.hopper.plan import flags_of, numbers_of, processors
from rooftile.exact.backends.hopper.tma import box_of_pages, of_pages, steps_of_pages
from rooftile.exact.spec import Options, Spec, output_dtype
from rooftile.kvcache import PagedKV
from rooftile.runtime.launch import Kernel

# numbers of a block of keys, and of values: 16 kB
BLOCK = 8192
# two blocks in flight per program: with three, programs are further apart in the cache, and all are slower
STAGES = 2
# FP8 blocks have half the bytes
STAGES_8BIT = 4
# programs per multiprocessor: one computes while the other waits
PROGRAMS = 2


def attend(q: Tensor, cache: PagedKV, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """o (B, 1, H, D) and lse (B, H, 1), of q (B, 1, H, D)."""
    B, _, H, dim = q.shape
    o = torch.empty(q.shape, dtype=output_dtype(q, spec), device=q.device)
    lse = torch.empty((B, H, 1), dtype=torch.float32, device=q.device)
    if not q.numel():
        return o, lse.fill_(-torch.inf)
    q = q if q.stride(3) == 1 else q.contiguous()
    constants = constants_of(spec, cache.size, max(BATCH, triton.next_power_of_2(B)))
    heads = H // spec.group
    teams = max(PROGRAMS * processors(q.device) // heads, 1)
    parts = torch.empty(2 * teams * heads * constants["ROWS"] * (dim + 2), dtype=torch.float32, device=q.device)
    table, lengths = cache.table.contiguous(), cache.lengths.contiguous()
    sinks = lse if options.sinks is None else options.sinks.contiguous()
    scale, softcap, left, right, prefix, chunk = numbers_of(spec)
    tensors: tuple[Tensor, ...] = (q, o, lse, parts, table, lengths, sinks)
    strides = table.stride(0), *steps_of_pages(cache.k), *steps_of_pages(cache.v)
    if spec.has_kv_scales:
        k_scale, v_scale, *scale_strides = cache.scales_and_strides()
        tensors, strides = (*tensors, k_scale, v_scale), (*strides, *scale_strides)
    numbers = (*strides, q.stride(0), q.stride(2), B, H, scale, softcap, left, chunk)
    _kernel(spec, cache.size)((heads, teams, 1), (cache.k, cache.v, *tensors, *numbers), constants)
    if teams > 1:
        arguments = (o, lse, parts, lengths, sinks, B, H, 1, left, right, prefix, chunk)
        start_merge((heads, teams - 1, spec.group), arguments, _constants_of_merge(spec, cache.size, constants["BATCH"]))
    return o, lse


@cache
def _kernel(spec: Spec, size: int) -> Kernel:
    describe = partial(of_pages, box=box_of(spec, size))
    kernel = fp8.paged_decode_8bit if spec.has_kv_scales else bf16.paged_decode
    return Kernel(kernel, (describe, describe))


def box_of(spec: Spec, size: int) -> tuple[int, ...]:
    """Returns the box of one TMA copy from a page of `size` tokens."""
    dtype = torch.float8_e4m3fn if spec.has_kv_scales else spec.dtype
    return box_of_pages(spec.dim, min(size, BLOCK // spec.dim), dtype)


@cache
def constants_of(spec: Spec, size: int, batch: int) -> dict[str, Any]:
    """Returns the kernel's compile-time arguments; `size` is the page size in tokens."""
    flags = flags_of(spec)
    # a wgmma of the FP8 kernel has one column per head of a group, and at least 8
    own = {
        "STAGES": STAGES_8BIT, "HEADS": max(triton.next_power_of_2(spec.group), 8)
    } if spec.has_kv_scales else {"STAGES": STAGES}  # fmt: skip
    return {name: flags[name] for name in ("LEFT", "CHUNK", "SOFTCAP")} | {
        "GROUP": spec.group, "D": spec.dim, "PAGE_SIZE": size, "BATCH": batch,
        "ROWS": max(triton.next_power_of_2(spec.group), 16),
        "SINKS": spec.has_sinks, "KEYS": BLOCK // spec.dim, "COPY_REGISTERS": 40, "num_warps": 4,
        # registers per thread at the launch; the warp roles redistribute them
        "maxnreg": 256 // PROGRAMS, "launch_pdl": True, **own,
    }  # fmt: skip


@cache
def _constants_of_merge(spec: Spec, size: int, batch: int) -> dict[str, Any]:
    constants = constants_of(spec, size, batch)
    known = MergeSpec(
        GROUP=spec.group, HEADS=spec.group, DV=spec.dim, BLOCK_DV=spec.dim, ROWS=constants["ROWS"], LEFT=constants["LEFT"],
        RIGHT=False, PREFIX=False, CHUNK=constants["CHUNK"], SINKS=spec.has_sinks,
    )  # fmt: skip
    own = {"SPEC": known, "BATCH": batch, "BLOCK_S": constants["KEYS"], "PDL": True}
    return own | {"num_warps": 2, "launch_pdl": True}
