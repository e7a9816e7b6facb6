"""Broken lines of masks, backends and the KV cache."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

EXACT = "tests/conformance/test_exact.py"

MUTATIONS = {
    "mask edge": Mutation(
        "exact/masks.py", "high = i + self.right", "high = i + self.right + 1", ("tests/unit/test_masks.py",)
    ),
    "mask edge, tiled": Mutation(
        "exact/backends/tiled/tiles.py", "j > mask.last_key(i))", "j > mask.last_key(i) + 1)", (EXACT, "-k", "tiled and causal")
    ),
    "mask edge, triton": Mutation(
        "exact/backends/device/visibility.py", "(j <= i + mask.right)", "(j <= i + mask.right + 1)",
        ("tests/interpreter/test_triton.py", "-k", "equals and (d16 or d80)"), interpreted=True,
    ),
    "rescaling, tiled": Mutation(
        "exact/backends/tiled/flash_fwd.py", "acc.mul_(alpha).baddbmm_(", "acc.baddbmm_(", (EXACT, "-k", "tiled and long")
    ),
    "rescaling, triton": Mutation(
        "exact/backends/triton/flash_fwd.py",
        "        acc = acc * alpha[:, None]\n        if SPEC.DROPOUT", "        if SPEC.DROPOUT",
        ("tests/interpreter/test_triton.py", "-k", "equals and (d16 or d80)"), interpreted=True,
    ),
    "rescaling, splits": Mutation(
        "exact/backends/device/split_kv.py", "acc = acc * alpha + tl.sum", "acc = acc + tl.sum",
        ("tests/interpreter/test_paged.py", "-k", "any_number_of_programs"), interpreted=True,
    ),
    "lse, tiled": Mutation(
        "exact/backends/tiled/flash_fwd.py",
        "(_finite_pivot(m) + l.log())", "(_finite_pivot(m) + l)", (EXACT, "-k", "tiled and mha")
    ),
    "lse, triton": Mutation(
        "exact/backends/triton/flash_fwd.py", "+ tl.log2(l) * LN2", "+ tl.log2(l)",
        ("tests/interpreter/test_triton.py", "-k", "equals and d16"), interpreted=True,
    ),
    "place in a list, triton": Mutation(
        "exact/backends/triton/flash_bwd_kv.py", "n // (SPEC.LIST_T // BLOCK_T) * 2 + 1)", "n // (SPEC.LIST_T // BLOCK_T) * 2)",
        ("tests/interpreter/test_triton.py", "-k", "pairs_by_hand and packed"), interpreted=True,
    ),
    "bit of a pair, triton": Mutation(
        "exact/backends/device/listed.py", "(word >> (column % 32))", "(word >> (31 - column % 32))",
        ("tests/interpreter/test_triton.py", "-k", "pairs_by_hand and packed"), interpreted=True,
    ),
    "places past a sequence": Mutation(
        "exact/blocks/blocks.py", "is_row[:, None] & (local >= 0) & (local * keys < cu_k.diff()[of][:, None])", "local >= 0",
        ("tests/conformance/test_block_lists.py", "-k", "transposed"),
    ),
    "listed heads, tiled": Mutation(
        "exact/backends/tiled/listed.py", "return x[heads, None]", "return x[:1, None]",
        ("tests/conformance/test_block_lists.py", "-k", "pairs_by_hand and tiled"),
    ),
    "gradient of lse": Mutation(
        "exact/backends/tiled/flash_bwd.py", "D -= incoming.dlse[..., None]", "pass", (EXACT, "-k", "tiled and mha")
    ),
    "page offset, gather": Mutation(
        "kvcache/operators.py", "table[sequence, place // size].long(), place % size",
        "table[sequence, place // size].long(), (place + 1) % size", ("tests/unit/test_paged.py",),
    ),
    "page offset, triton": Mutation(
        "exact/backends/triton/paged_fwd.py", "v_lines = v_ptr + page * v_stride_p + (j % SPEC.PAGE_SIZE)",
        "v_lines = v_ptr + page * v_stride_p + ((j + 1) % SPEC.PAGE_SIZE)",
        ("tests/interpreter/test_paged.py", "-k", "packed_queries"),
        interpreted=True,
    ),
    "planes, copied": Mutation(
        "kvcache/pages.py", "*scales, *self.planes.values())", "*scales)",
        ("tests/engine/test_loki.py", "tests/engine/test_native_sparse.py", "-k", "forks"),
    ),
    "rows, given back early": Mutation(
        "kvcache/windows.py", "self._hold(table, range(self._first(position), held.stop))",
        "self._hold(table, range(held.stop, held.stop))", ("tests/unit/test_windows.py",),
    ),
    "rows, copied": Mutation(
        "kvcache/windows.py", "self._row_copies.append(Copy(self._row_of[source], self._row_of[target]))", "pass",
        ("tests/unit/test_windows.py", "tests/engine/test_native_sparse.py", "-k", "forks or whatever"),
    ),
    "rows, of a prefix": Mutation(
        "kvcache/windows.py", "keep = self._with_rows(blocks[:due])", "keep = due",
        ("tests/unit/test_windows.py", "tests/engine/test_native_sparse.py", "-k", "prefix or whatever"),
    ),
    "page offset, write": Mutation(
        "kvcache/page_kernels.py", "page, place = slot // SIZE, slot % SIZE", "page, place = slot // SIZE, (slot + 1) % SIZE",
        ("tests/interpreter/test_page_kernels.py", "-k", "slots"), interpreted=True,
    ),
    "hopper, the eighth bit of w8": Mutation(
        "runtime/hopper/ptx.py", "lop3.b32 s, w, 0x00800080, 0x43004300, 0xea", "lop3.b32 s, w, 0x00000080, 0x43004300, 0xea",
        ("tests/kernels/test_hopper_decoding.py", "-k", "become_exact or order_of_codes"),
    ),
    "targets, distances of ALiBi": Mutation(
        "exact/targets/calls.py", "lse = lse + targets.excess", "lse = lse + 0",
        ("tests/conformance/test_targets.py", "-k", "test_packed and tiled"),
    ),
    "targets, keys of sequences without queries": Mutation(
        "exact/targets/packed.py", "torch.where(queries > 0, first, end)", "first",
        ("tests/conformance/test_targets.py", "-k", "never_read"),
    ),
    "fuse, Gemma's norms": Mutation(
        "integrations/fusion/layers.py", 'plus_one = kind == "gemma_norm"', "plus_one = False",
        ("tests/integrations/test_fuse.py", "-k", "losses_and_gradients"),
    ),
    "fuse, labels": Mutation(
        "integrations/fusion/loss.py", "functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]", "labels",
        ("tests/integrations/test_fuse.py", "-k", "losses_and_gradients"),
    ),
    "rows, numbers that are not rounded": Mutation(
        "numerics/row_kernels.py", "codes = codes.to(tl.float8e4nv).to(tl.float32)", "codes = codes.to(tl.float32)",
        ("tests/interpreter/test_rounded_rows.py",), interpreted=True,
    ),
}  # fmt: skip
