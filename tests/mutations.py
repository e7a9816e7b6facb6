"""Breaks one line of a copy of the code at a time and prints which tests of `make test` fail.

    python -m tests.mutations              every mutation, as a Markdown table
    python -m tests.mutations NAME ...     these mutations

Exits with status 1 if the tests pass despite a mutation.
"""

# ruff: noqa: T201 - it prints its result
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXACT = "tests/conformance/test_exact.py"


@dataclass(frozen=True)
class Mutation:
    """A line of a file in `rooftile/`, its broken version, and the tests that must fail."""

    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    interpreted: bool = False


MUTATIONS = {
    "mask edge": Mutation(
        "masks.py", "high = i + self.right", "high = i + self.right + 1", ("tests/unit/test_masks.py",)
    ),
    "mask edge, tiled": Mutation(
        "backends/tiled/tiles.py", "j > mask.last_key(i))", "j > mask.last_key(i) + 1)", (EXACT, "-k", "tiled and causal")
    ),
    "mask edge, triton": Mutation(
        "backends/device/visibility.py", "(j <= i + mask.right)", "(j <= i + mask.right + 1)",
        ("tests/interpreter/test_triton.py", "-k", "equals and (d16 or d80)"), interpreted=True,
    ),
    "rescaling, tiled": Mutation(
        "backends/tiled/flash_fwd.py", "acc.mul_(alpha).baddbmm_(", "acc.baddbmm_(", (EXACT, "-k", "tiled and long")
    ),
    "rescaling, triton": Mutation(
        "backends/triton/flash_fwd.py", "        acc = acc * alpha[:, None]\n        if SPEC.DROPOUT", "        if SPEC.DROPOUT",
        ("tests/interpreter/test_triton.py", "-k", "equals and (d16 or d80)"), interpreted=True,
    ),
    "rescaling, splits": Mutation(
        "backends/device/split_kv.py", "acc = acc * alpha + tl.sum", "acc = acc + tl.sum",
        ("tests/interpreter/test_paged.py", "-k", "any_number_of_programs"), interpreted=True,
    ),
    "lse, tiled": Mutation(
        "backends/tiled/flash_fwd.py", "(_finite_pivot(m) + l.log())", "(_finite_pivot(m) + l)", (EXACT, "-k", "tiled and mha")
    ),
    "lse, triton": Mutation(
        "backends/triton/flash_fwd.py", "+ tl.log2(l) * LN2", "+ tl.log2(l)",
        ("tests/interpreter/test_triton.py", "-k", "equals and d16"), interpreted=True,
    ),
    "place in a list, triton": Mutation(
        "backends/triton/flash_bwd_kv.py", "n // (SPEC.LIST_T // BLOCK_T) * 2 + 1)", "n // (SPEC.LIST_T // BLOCK_T) * 2)",
        ("tests/interpreter/test_triton.py", "-k", "pairs_by_hand and packed"), interpreted=True,
    ),
    "bit of a pair, triton": Mutation(
        "backends/device/listed.py", "(word >> (column % 32))", "(word >> (31 - column % 32))",
        ("tests/interpreter/test_triton.py", "-k", "pairs_by_hand and packed"), interpreted=True,
    ),
    "places past a sequence": Mutation(
        "blocks/blocks.py", "is_row[:, None] & (local >= 0) & (local * keys < cu_k.diff()[of][:, None])", "local >= 0",
        ("tests/conformance/test_block_lists.py", "-k", "transposed"),
    ),
    "listed heads, tiled": Mutation(
        "backends/tiled/listed.py", "return x[heads, None]", "return x[:1, None]",
        ("tests/conformance/test_block_lists.py", "-k", "pairs_by_hand and tiled"),
    ),
    "gradient of lse": Mutation(
        "backends/tiled/flash_bwd.py", "D -= incoming.dlse[..., None]", "pass", (EXACT, "-k", "tiled and mha")
    ),
    "page offset, gather": Mutation(
        "kvcache/operators.py", "table[sequence, place // size].long(), place % size",
        "table[sequence, place // size].long(), (place + 1) % size", ("tests/unit/test_paged.py",),
    ),
    "page offset, triton": Mutation(
        "backends/triton/paged_fwd.py", "v_lines = v_ptr + page * v_stride_p + (j % SPEC.PAGE_SIZE)",
        "v_lines = v_ptr + page * v_stride_p + ((j + 1) % SPEC.PAGE_SIZE)",
        ("tests/interpreter/test_paged.py", "-k", "packed_queries"),
        interpreted=True,
    ),
    "loki, the last page": Mutation(
        "approximate/paged/loki.py", "scores = scores.masked_fill(last[:, None], math.inf)", "scores = scores",
        ("tests/serve/test_loki.py", "-k", "without_a_cache"),
    ),
    "loki, the last page, in a kernel": Mutation(
        "approximate/paged/kernels.py", "tl.where(n == pages - 1, float", "tl.where(n == pages, float",
        ("tests/interpreter/test_loki_pages.py", "-k", "best"), interpreted=True,
    ),
    "loki, shares of a head": Mutation(
        "approximate/paged/kernels.py", "l = l * tl.exp(m - pivot) + tl.sum(total", "l = l + tl.sum(total",
        ("tests/interpreter/test_loki_pages.py", "-k", "scores"), interpreted=True,
    ),
    "softmax, a piece's largest": Mutation(
        "fused/kernels/softmax.py", "scaled = sums * tl.exp(largest - above)", "scaled = sums",
        ("tests/interpreter/test_fused_gradients.py", "-k", "pieces"), interpreted=True,
    ),
    "norm, the mean of a long row": Mutation(
        "fused/kernels/norm.py", "x = tl.where(n < SIZE, _piece(x_ptr, n, SIZE) - mean, 0.0)",
        "x = _piece(x_ptr, n, SIZE) - mean",
        ("tests/interpreter/test_fused_gradients.py", "-k", "pieces"), interpreted=True,
    ),
    "norm, slopes of a long row": Mutation(
        "fused/kernels/norm_gradients.py", "tl.sum(products, 0) * inverse / SIZE)", "tl.sum(products, 0) / SIZE)",
        ("tests/interpreter/test_fused_gradients.py", "-k", "pieces"), interpreted=True,
    ),
    "text that cannot be made": Mutation(
        "serve/engine.py", "            self._note_failure(request, error)\n            return output_of(request, prompt)",
        "            raise", ("tests/serve/test_failures.py", "-k", "text_that"),
    ),
    "loki, page sums": Mutation(
        "approximate/paged/kernels.py", "seen = j < length\n", "seen = j <= length\n",
        ("tests/interpreter/test_loki_pages.py",), interpreted=True,
    ),
    "loki, recomputed": Mutation(
        "serve/runner.py", "works = apart(plan.work) if self.attention.splits_prompts else plan.work", "works = plan.work",
        ("tests/serve/test_loki.py", "-k", "schedule"),
    ),
    "planes, copied": Mutation(
        "kvcache/pages.py", "*scales, *self.planes.values()]", "*scales]",
        ("tests/serve/test_loki.py", "tests/serve/test_native_sparse.py", "-k", "forks"),
    ),
    "compressed keys, row": Mutation(
        "serve/attention/native_sparse.py", "ends % self.size // stride", "0 * ends",
        ("tests/serve/test_native_sparse.py", "-k", "without_a_cache"),
    ),
    "rows, given back early": Mutation(
        "kvcache/windows.py", "self._hold(table, range(self._first(position), held.stop))",
        "self._hold(table, range(held.stop, held.stop))", ("tests/unit/test_windows.py",),
    ),
    "rows, copied": Mutation(
        "kvcache/windows.py", "self._row_copies.append(Copy(self._row_of[source], self._row_of[target]))", "pass",
        ("tests/unit/test_windows.py", "tests/serve/test_native_sparse.py", "-k", "forks or whatever"),
    ),
    "rows, of a prefix": Mutation(
        "kvcache/windows.py", "keep = self._complete(table.blocks)", "keep = len(table.blocks)",
        ("tests/unit/test_windows.py", "tests/serve/test_native_sparse.py", "-k", "prefix or whatever"),
    ),
    "native sparse, beyond a block": Mutation(
        "approximate/paged/sparse_kernels/choice.py", "_weights(sums_ptr + SHAPE.NEW, ", "_weights(sums_ptr, ",
        ("tests/interpreter/test_native_sparse_pages.py", "-k", "small"), interpreted=True,
    ),
    "native sparse, window": Mutation(
        "approximate/paged/sparse_kernels/tokens.py", "tl.maximum(length - SHAPE.WINDOW, 0)",
        "tl.maximum(length - SHAPE.WINDOW + 1, 0)",
        ("tests/interpreter/test_native_sparse_pages.py", "-k", "small or gate"), interpreted=True,
    ),
    "choice, the neighbour's weight": Mutation(
        "approximate/selected/kernels/choice.py", "tl.where(b[None, :] == 0, left[:, None], before)", "before",
        ("tests/interpreter/test_selected.py", "-k", "both_blocks"), interpreted=True,
    ),
    "selected, a block of the union": Mutation(
        "approximate/selected/tiles.py", "bits.masked_fill(is_again, 0)", "bits.masked_fill(~is_new, 0)",
        ("tests/approximate/test_selected.py", "-k", "union"),
    ),
    "norm, parts of dw": Mutation(
        "fused/kernels/norm_gradients.py", "for first in range(0, parts, PARTS):", "for first in range(0, parts - PARTS, PARTS):",
        ("tests/interpreter/test_fused_gradients.py", "-k", "parts"), interpreted=True,
    ),
    "weights in one pass, the bits of a scale": Mutation(
        "matmul/kernels/weights.py", "scale.to(tl.bfloat16).to(tl.float32))", "scale)",
        ("tests/interpreter/test_quantised_weights.py", "-k", "bits and int4"), interpreted=True,
    ),
    "selected, a query that names a block again": Mutation(
        "approximate/selected/kernels/lists.py", "has_before & is_same & (query == before)", "there & (query < 0)",
        ("tests/interpreter/test_selected.py", "-k", "lists_of"), interpreted=True,
    ),
    "selected, the place of a part": Mutation(
        "approximate/selected/kernels/gradients.py", "kept = start // each * 2 + part", "kept = start // each + part",
        ("tests/interpreter/test_selected.py", "-k", "any_tiles"), interpreted=True,
    ),
    "selected, a part of a list": Mutation(
        "approximate/selected/kernels/gradients.py", "for part in range(count):", "for part in range(count - 1):",
        ("tests/interpreter/test_selected.py", "-k", "any_tiles"), interpreted=True,
    ),
    "page offset, write": Mutation(
        "kvcache/kernels.py", "page, place = slot // SIZE, slot % SIZE", "page, place = slot // SIZE, (slot + 1) % SIZE",
        ("tests/interpreter/test_page_kernels.py", "-k", "slots"), interpreted=True,
    ),
    "stop string, overlap": Mutation(
        "serve/text/detokenizer.py", "            while self.matched and self.text[self.matched] != character:\n"
        "                self.matched = self._borders[self.matched]",
        "            if self.text[self.matched] != character:\n                self.matched = 0",
        ("tests/serve/test_detokenizer.py",),
    ),
    "stop string, held back": Mutation(
        "serve/text/detokenizer.py", "text[: len(text) - held], text[len(text) - held :]", 'text, ""',
        ("tests/serve/test_detokenizer.py",),
    ),
    "text, half a character of several tokens": Mutation(
        "serve/text/pieces.py", "if not self._half or len(ids) == 1:", "if True:",
        ("tests/serve/test_detokenizer_lazy.py",),
    ),
    "text, a token that ends an answer": Mutation(
        "server/engine/following.py", "detokenizer.take_ids()", "answer.ids[-1:]",
        ("tests/server/test_answer_texts.py", "-k", "belongs_to_no_text"),
    ),
    "strided, a key twice": Mutation(
        "approximate/chosen/sparse_transformer.py",
        '0 if heads == "second" else -(-window // stride)',
        '0',
        ("tests/approximate/test_sparse_transformer.py",),
    ),
    "strided, edge of the window": Mutation(
        "approximate/chosen/sparse_transformer.py",
        'Window(window - 1) if pattern',
        'Window(window) if pattern',
        ("tests/approximate/test_sparse_transformer.py",),
    ),
    "fixed, the own summary": Mutation(
        "approximate/chosen/sparse_transformer.py",
        '        if heads == "second":\n            parts.append(_own',
        '        if heads == "none":\n            parts.append(_own',
        ("tests/approximate/test_sparse_transformer.py",),
    ),
    "reformer, N_ij": Mutation(
        "approximate/chosen/reformer.py",
        '    if once and sort.hash.shape[0] > 1:',
        '    if once and sort.hash.shape[0] > 99:',
        ("tests/approximate/test_reformer.py",),
    ),
    "reformer, the first chunk": Mutation(
        "approximate/chosen/reformer.py",
        '(chunk_i[..., :, None] - chunk_j[..., None, :]) % self.chunks <= 1',
        '((chunk_i[..., :, None] - chunk_j[..., None, :]).abs() * 2 - 1).abs() <= 1',
        ("tests/approximate/test_reformer.py",),
    ),
    "reformer, stable sort": Mutation(
        "approximate/chosen/reformer.py",
        'self.order = self.hash.sort(dim=-1, stable=True).indices',
        'self.order = (self.hash * self.T - torch.arange(self.T)).argsort(dim=-1)',
        ("tests/approximate/test_reformer.py",),
    ),
    "reformer, itself": Mutation(
        "approximate/chosen/reformer.py",
        'j < i if self.causal',
        'j <= i if self.causal',
        ("tests/approximate/test_reformer.py",),
    ),
    "routing, causal by rank": Mutation(
        "approximate/chosen/routing.py",
        'seen = keys[..., None, :] <= queries[..., :, None] + (S - T)',
        'seen = seen.tril()',
        ("tests/approximate/test_routing.py",),
    ),
    "routing, mean of clusters": Mutation(
        "approximate/chosen/routing.py",
        'total / count.clamp(min=1)',
        'total',
        ("tests/approximate/test_routing.py",),
    ),
    "routing, gradient in order": Mutation(
        "approximate/chosen/pairs.py",
        'dx = _add_flat(wide, index, ctx.rows)',
        'dx: Tensor = wide.new_zeros(ctx.rows, wide.shape[-1]).index_copy(0, index.flatten(), wide.flatten(0, -2))',
        ("tests/approximate/test_routing.py",),
    ),
    "gathered, itself": Mutation(
        "approximate/gathered/kernels/shape.py",
        '    if SHAPE.CAUSAL:\n        return j < i\n',
        '    if SHAPE.CAUSAL:\n        return j <= i\n',
        ("tests/interpreter/test_gathered.py", "-k", "rounds"), interpreted=True,
    ),
    "gathered, N_ij of the first chunk": Mutation(
        "approximate/gathered/kernels/shape.py",
        ' | (back == 1 - groups)',
        '',
        ("tests/interpreter/test_gathered.py", "-k", "rounds"), interpreted=True,
    ),
    "gathered, the first chunk": Mutation(
        "approximate/gathered/kernels/shape.py",
        'group = tl.where(group < 0, group + groups, group)',
        'group = tl.where(group < -1, group + groups, group)',
        ("tests/interpreter/test_gathered.py", "-k", "rounds"), interpreted=True,
    ),
    "gathered, mean of clusters": Mutation(
        "approximate/gathered/kernels/__init__.py",
        '(do / counts)',
        '(do * 1)',
        ("tests/interpreter/test_gathered.py", "-k", "groups_equal"), interpreted=True,
    ),
    "gathered, NaN": Mutation(
        "approximate/gathered/kernels/shape.py",
        'for repair in (False, True):',
        'for repair in (False,):',
        ("tests/interpreter/test_gathered.py", "-k", "nan"), interpreted=True,
    ),
    "loki, the short page": Mutation(
        "approximate/chosen/loki.py",
        'pages * page - S, 0)',
        '0, 0)',
        ("tests/approximate/test_loki.py",),
    ),
    "native sparse, the neighbour's weight": Mutation(
        "approximate/chosen/selection.py",
        'torch.nn.functional.pad(overlaps, (back, back)).unfold(0, back + 1, 1).sum(-1)',
        'torch.nn.functional.pad(overlaps, (back, back)).unfold(0, back + 1, 1).amax(-1)',
        ("tests/approximate/test_native_sparse.py",),
    ),
    "native sparse, order of ties": Mutation(
        "approximate/chosen/pairs.py",
        'score.sort(dim=-1, descending=True, stable=True).indices',
        'score.flip(-1).sort(dim=-1, descending=True, stable=True).indices.neg().add(score.shape[-1] - 1)',
        ("tests/approximate/test_native_sparse.py",),
    ),
    "training for a format, activations that were not rounded": Mutation(
        "qat/product.py",
        'dw = (dy.flatten(0, -2).T @ rows.flatten(0, -2).to(dy.dtype)).to(w.dtype)',
        'dw = (dy.flatten(0, -2).T @ x.flatten(0, -2).to(dy.dtype)).to(w.dtype)',
        ("tests/qat/test_gradients.py",),
    ),
    "training for a format, scales rounded late": Mutation(
        "qat/learned.py", '.to(STORED[format])', '.float()', ("tests/qat/test_learned.py",),
    ),
    "training for a format, codes of before": Mutation(
        "qat/layers.py",
        'now: tuple[int, ...] = (self.weight.data_ptr(), self.weight._version, self.qat.steps, self.training)',
        'now: tuple[int, ...] = (self.weight.data_ptr(), self.qat.steps, self.training)',
        ("tests/qat/test_gradients.py",),
    ),
    "native sparse, a block left out": Mutation(
        "approximate/selected/by_block.py",
        'there = (blocks >= 0)',
        'there = (blocks > 0)',
        ("tests/approximate/test_native_sparse.py",),
    ),
    "native sparse, causal in the own block": Mutation(
        "approximate/selected/by_block.py",
        '(place <= position[rows, None])',
        '(place <= position[rows, None] + 1)',
        ("tests/approximate/test_native_sparse.py",),
    ),
    "native sparse, complete blocks": Mutation(
        "approximate/chosen/native_sparse.py",
        'place = S - T - (length - 1)',
        'place = S - T - (length - 2)',
        ("tests/approximate/test_native_sparse.py",),
    ),
    "weights, scales rounded late": Mutation(
        "matmul/quantise.py", "rounded = scales.clamp(min=smallest).bfloat16()", "rounded = scales.clamp(min=smallest)",
        ("tests/unit/test_quantised_weight.py", "-k", "w8 or before_codes"),
    ),
    "weights, zero points": Mutation(
        "matmul/weight.py", "numbers - parts.zeros", "numbers + parts.zeros",
        ("tests/unit/test_quantised_weight.py", "-k", "zero_points or near"),
    ),
    "weights, int8 sums in fp32": Mutation(
        "matmul/definition.py", "EXACT = 1024", "EXACT = 16384", ("tests/matmul/test_linear.py", "-k", "int8_is_exact")
    ),
    "weights, nibbles": Mutation(
        "matmul/kernels/unpacked.py", "tl.interleave(pairs & 15, pairs >> 4)", "tl.interleave(pairs >> 4, pairs & 15)",
        ("tests/interpreter/test_quantised_products.py", "-k", "dequantised_bits"), interpreted=True,
    ),
    "weights, a split left out": Mutation(
        "matmul/kernels/scaled.py", "for split in tl.static_range(1, SPLITS)", "for split in tl.static_range(2, SPLITS)",
        ("tests/interpreter/test_quantised_products.py", "-k", "test_products"), interpreted=True,
    ),
    "weights, a scale of x": Mutation(
        "matmul/kernels/scaled.py", "x_scale = tl.load(x_scales_ptr + m, mask", "x_scale = tl.load(x_scales_ptr + 0 * m, mask",
        ("tests/interpreter/test_quantised_products.py", "-k", "not_split"), interpreted=True,
    ),
    "hopper, a partial's place": Mutation(
        "matmul/hopper/schedule.py", "return gl.load(to.partial(program, 0,", "return gl.load(to.partial(program, 1,",
        ("tests/kernels/test_hopper_products.py", "-k", "emulated"),
    ),
    "hopper, a gate's partial": Mutation(
        "matmul/hopper/schedule.py", "acc_2 = _sum_of_parts(start, last, tile_m, block + 1, place, to)",
        "acc_2 = _sum_of_parts(start, last, tile_m, block, place, to)",
        ("tests/kernels/test_hopper_products.py", "-k", "emulated_gates"),
    ),
    "hopper, the eighth bit of w8": Mutation(
        "hopper/ptx.py", "lop3.b32 s, w, 0x00800080, 0x43004300, 0xea", "lop3.b32 s, w, 0x00000080, 0x43004300, 0xea",
        ("tests/kernels/test_hopper_decoding.py", "-k", "become_exact or order_of_codes"),
    ),
    "hopper, order of x": Mutation(
        "matmul/hopper/widened.py", "2, 2, 2]).permute((0, 2, 4, 5, 1, 3))", "2, 2, 2]).permute((0, 2, 5, 4, 1, 3))",
        ("tests/kernels/test_hopper_products.py", "tests/kernels/test_hopper_decoding.py", "-k", "emulated or order_of_codes"),
    ),
    "hopper, scales of a gate in codes": Mutation(
        "matmul/hopper/gated_codes.py", "up = _scaled(up, n_0 + to.N, m,", "up = _scaled(up, n_0, m,",
        ("tests/kernels/test_hopper_products.py", "-k", "gates_of_codes"),
    ),
    "weights, gradient of x": Mutation(
        "matmul/product.py", "dx = (dy.to(dtype) @ _weight_of(ctx.saved_tensors, ctx.rest, dtype)).to(ctx.dtype)",
        "dx = torch.zeros(dy.shape[0], ctx.rest[3], dtype=ctx.dtype)", ("tests/matmul/test_linear.py", "-k", "gradients"),
    ),
    "gptq, zeros less one": Mutation(
        "models/checkpoints/layouts/gptq.py", "return stored.to(torch.int16) + 1", "return stored.to(torch.int16)",
        ("tests/models/test_quantised_checkpoints.py", "-k", "layout"),
    ),
    "awq, order in a word": Mutation(
        "models/checkpoints/layouts/awq.py", "torch.tensor(ORDER).argsort()", "torch.tensor(ORDER)",
        ("tests/models/test_quantised_checkpoints.py", "-k", "layout and awq"),
    ),
    "act-order": Mutation(
        "models/checkpoints/tensors.py", "order = groups.argsort(stable=True)", "order = groups.argsort(stable=True).flip(0)",
        ("tests/models/test_quantised_checkpoints.py", "-k", "layout and order"),
    ),
    "parts in one product, orders": Mutation(
        "models/checkpoints/quantised.py", "return torch.equal(a.order, b.order)", "return True",
        ("tests/models/test_quantised_checkpoints.py", "-k", "order or together"),
    ),
    "fused, gradient of a norm": Mutation(
        "fused/kernels/norm_gradients.py", "dx = g - unit * (products * inverse / SIZE)", "dx = g",
        ("tests/interpreter/test_fused_gradients.py", "-k", "norm"), interpreted=True,
    ),
    "fused, gradient of the stream": Mutation(
        "fused/norms.py", "return dx + dtotal, dw, db", "return dx, dw, db",
        ("tests/conformance/test_fused_gradients.py", "-k", "add"),
    ),
    "fused, softcap": Mutation(
        "fused/kernels/cross_entropy.py", "dz *= 1.0 - (z / softcap) * (z / softcap)", "dz *= 1.0",
        ("tests/interpreter/test_fused_gradients.py", "-k", "cross_entropy"), interpreted=True,
    ),
    "fused, ignored targets": Mutation(
        "fused/loss.py", "dz = torch.where((target == ignore_index)[:, None], 0.0, dz * dlosses[:, None])",
        "dz = dz * dlosses[:, None]", ("tests/conformance/test_fused_gradients.py", "-k", "cross_entropy"),
    ),
    "loss in the forward, its mean": Mutation(
        "fused/linear_loss.py", "share = one / (target != numbers[0]).sum() if mean else one", "share = one",
        ("tests/conformance/test_fused_gradients.py", "-k", "cross_entropy"),
    ),
    "fuse, Gemma's norms": Mutation(
        "integrations/fusion/layers.py", 'plus_one = kind == "gemma_norm"', "plus_one = False",
        ("tests/integrations/test_fuse.py", "-k", "losses_and_gradients"),
    ),
    "fuse, labels": Mutation(
        "integrations/fusion/loss.py", "functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]", "labels",
        ("tests/integrations/test_fuse.py", "-k", "losses_and_gradients"),
    ),
    "adamw, the rest of a weight": Mutation(
        "optim/split.py", "high = (bits + 0x8000) >> 16", "high = bits >> 16", ("tests/optim", "-k", "halves or split"),
    ),
    "adamw, the kernel's clipping": Mutation(
        "optim/kernels.py", "scale *= tl.load(clip_ptr).to(tl.float32)", "scale *= 1.0",
        ("tests/interpreter/test_adamw.py",), interpreted=True,
    ),
    "adamw, decay of what is kept": Mutation(
        "optim/kernels.py", "mask=there) != 0, 0.0, p)", "mask=there) == 0, 0.0, p)",
        ("tests/interpreter/test_adamw.py", "-k", "step"), interpreted=True,
    ),
    "adamw, decay that is clipped": Mutation(
        "optim/definition.py", "* numbers.left_out\n", "* numbers.left_out * (1.0 if clip is None else clip)\n",
        ("tests/qat/test_sparse.py", "tests/optim/test_adamw.py", "-k", "in_its_pass or leaves_out"),
    ),
    "weights, the bit of what lies inside": Mutation(
        "matmul/kernels/weights.py", "eights << tl.arange", "eights << 7 - tl.arange",
        ("tests/interpreter/test_quantised_weights.py", "-k", "one_pass"), interpreted=True,
    ),
    "weights, scales of what is left out": Mutation(
        "matmul/kernels/weights.py", "x = tl.where(tl.load(mask_ptr + row * CODES.K + k, mask=there, other=0) != 0, x, 0.0)",
        "x = tl.where(tl.load(mask_ptr + row * CODES.K + k, mask=there, other=0) != 2, x, 0.0)",
        ("tests/interpreter/test_quantised_weights.py", "-k", "one_pass"), interpreted=True,
    ),
    "rows, numbers that are not rounded": Mutation(
        "numerics/kernels.py", "codes = codes.to(tl.float8e4nv).to(tl.float32)", "codes = codes.to(tl.float32)",
        ("tests/interpreter/test_rounded_rows.py",), interpreted=True,
    ),
    "qat, flags that stay on the device": Mutation(
        "qat/finite.py", "for at in copy.nonzero().flatten().tolist():", "for at in ():", ("tests/qat/test_finite.py",),
    ),
    "qat, codes of a weight that was not looked at": Mutation(
        "qat/layers.py", "self.qat.steps, self.training)", "self.qat.steps)", ("tests/qat/test_finite.py", "-k", "at_once"),
    ),
    "plan, losses in steps": Mutation(
        "planning/choice.py", "math.ceil(loss / max_loss * STEPS - 1e-6)", "math.floor(loss / max_loss * STEPS)",
        ("tests/planning/test_choice.py",),
    ),
    "plan, launches": Mutation(
        "planning/costs.py", "return self.roofs(one.dtype).fixed_us + fill_us", "return fill_us",
        ("tests/planning/test_known_answers.py",),
    ),
    "plan, projections of one input": Mutation(
        "planning/targets/recording.py", "same_parent and a.number == b.number and", "same_parent and",
        ("tests/planning/test_modules.py",),
    ),
    "plan, a layer left rounded": Mutation(
        "planning/targets/modules.py", "            del layer.forward", "            pass",
        ("tests/planning/test_modules.py", "-k", "changed"),
    ),
    "plan, losses in training": Mutation(
        "planning/targets/modules.py", "        self._model.eval()\n", "", ("tests/planning/test_modules.py", "-k", "evaluation"),
    ),
    "plan, names as patterns": Mutation(
        "planning/targets/training.py", 'f"re:{re.escape(name)}$": word', "name: word",
        ("tests/planning/test_plan.py", "-k", "pattern"),
    ),
    "plan, a decoder left rounded": Mutation(
        "planning/targets/decoders.py", "projection.weight, projection.parts = weight, ()", "projection.weight = weight",
        ("tests/planning/test_decoder.py", "-k", "as_before"),
    ),
    "2:4, ties": Mutation(
        "sparsity/definition.py", "ab, ac, ad, bc, bd, cd = a >= b,", "ab, ac, ad, bc, bd, cd = a > b,",
        ("tests/sparsity/test_masks.py",),
    ),
    "2:4, the order of sums": Mutation(
        "sparsity/patterns.py", "PAIRS = tuple(combinations(range(4), 2))", "PAIRS = tuple(combinations(range(3, -1, -1), 2))",
        ("tests/sparsity/test_masks.py",),
    ),
    "2:4, a place": Mutation(
        "matmul/two_four/kernels.py", "(both & 0xFFFF).to(tl.uint64) << ((four << 4) & 48)",
        "(both & 0xFFFF).to(tl.uint64) << ((four << 2) & 48)",
        ("tests/interpreter/test_two_four.py", "-k", "products"), interpreted=True,
    ),
    "2:4, the last tile": Mutation(
        "matmul/two_four/kernels.py", "tl.minimum(step + 1, last - 1)", "tl.minimum(step, last - 1)",
        ("tests/interpreter/test_two_four.py", "-k", "products"), interpreted=True,
    ),
    "2:4, decay of what is kept": Mutation(
        "qat/masking.py", "torch.where(mask, 0.0, weight) * (rate", "torch.where(mask, weight, 0.0) * (rate",
        ("tests/qat/test_sparse.py", "-k", "decay"),
    ),
    "2:4, frozen masks": Mutation(
        "qat/masking.py", "steps >= recipe.freeze_from", "steps > recipe.freeze_from",
        ("tests/qat/test_sparse.py", "-k", "frozen"),
    ),
    "2:4, scales before masks": Mutation(
        "qat/layers.py", "whole(self.scales), flag, mask)", "whole(self.scales), flag)",
        ("tests/qat/test_sparse.py", "-k", "same_bits"),
    ),
    "plan, the recipe that is given": Mutation(
        "planning/targets/training.py", "Recipe() if sparsity is None else sparsity", "Recipe()",
        ("tests/planning/test_two_four.py", "-k", "recipe"),
    ),
    "plan, a refused layer left prepared": Mutation(
        "planning/targets/training.py", "qat.restore(inside)", "pass", ("tests/planning/test_two_four.py", "-k", "as_it_was"),
    ),
    "report, the bytes of a chosen format": Mutation(
        "report/planned.py", "/ count - kept.nbytes", "/ count", ("tests/report/test_report_planned.py",),
    ),
    "2:4, parts in one product": Mutation(
        "models/checkpoints/quantised.py", "isinstance(last, TwoFour) and _alike", "isinstance(last, QuantisedWeight) and _alike",
        ("tests/serve/test_two_four_weights.py", "-k", "one_product or patterns"),
    ),
    "2:4, layouts counted twice": Mutation(
        "serve/memory.py", "return peak - kept", "return peak", ("tests/serve/test_memory.py",),
    ),
    "requests ahead": Mutation(
        "server/http/protocol.py", "if len(self.pipeline) > limits.PIPELINED:", "if len(self.pipeline) > 9999:",
        ("tests/server/test_ahead.py",),
    ),
    "names that stand twice": Mutation(
        "server/http/body.py", "written != _kept_names(found)", "written < _kept_names(found)", ("tests/server/test_routes.py",)
    ),
    "room of bodies": Mutation(
        "server/http/body.py", "if self.held + taken > limits.BODIES * self.most:", "if taken > limits.BODIES * self.most:",
        ("tests/server/test_slow.py",),
    ),
    "room given back": Mutation(
        "server/http/body.py", "bodies.held -= taken", "bodies.held -= len(body)", ("tests/server/test_slow.py",)
    ),
    "ids as a whole": Mutation(
        "serve/text/prompt.py", "0 <= min(prompt) <= max(prompt) < vocabulary", "0 <= min(prompt)",
        ("tests/serve/test_prompts.py",),
    ),
    "order of a schema": Mutation(
        "serve/grammar.py", "key = json.dumps(structured)", "key = json.dumps(structured, sort_keys=True)",
        ("tests/server/test_structured.py", "-k", "properties_come"),
    ),
    "metrics before tokens": Mutation(
        "server/engine/remote.py", "get_running_loop().call_soon(self._noted, message.state)",
        "get_running_loop().call_later(1, self._noted, message.state)",
        ("tests/server/test_answering.py",),
    ),
}  # fmt: skip


def failures(mutation: Mutation) -> list[str]:
    """Returns the ids of the tests that fail in a mutated copy."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("rooftile", "tests", "benchmarks"):
            shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        file = Path(folder, "rooftile", mutation.file)
        source = file.read_text()
        assert source.count(mutation.before) == 1, f"{mutation.file} must have this exactly once: {mutation.before}"
        file.write_text(source.replace(mutation.before, mutation.after))
        environment = os.environ | {"PYTHONPATH": folder, "TRITON_INTERPRET": "1" if mutation.interpreted else "0"}
        options = ["-q", "--tb=no", "-p", "no:cacheprovider", "-m", "not sweep and not timing"]
        command = [sys.executable, "-m", "pytest", *options, *mutation.tests]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)


def main(names: list[str]) -> int:
    print("| mutation | line | before | after | tests | red |\n|---|---|---|---|---|--:|")
    survivors = 0
    for name in names or MUTATIONS:
        mutation = MUTATIONS[name]
        red = len(failures(mutation))
        survivors += not red
        before, after = (" ".join(code.split()) for code in (mutation.before, mutation.after))
        print(f"| {name} | `{mutation.file}` | `{before}` | `{after}` | `{' '.join(mutation.tests)}` | {red} |", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
