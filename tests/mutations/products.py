"""Broken lines of products, fused operations, sparsity and the optimiser."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

EXACT = "tests/conformance/test_exact.py"

MUTATIONS = {
    "softmax, a piece's largest": Mutation(
        "fused/kernels/softmax.py", "scaled = sums * tl.exp(largest - above)", "scaled = sums",
        ("tests/interpreter/test_fused_gradients.py", "-k", "pieces"), interpreted=True,
    ),
    "norm, the mean of a long row": Mutation(
        "fused/kernels/norm.py", "x = tl.where(n < SIZE, _piece(x_ptr, n, SIZE, \"evict_last\") - mean, 0.0)",
        "x = _piece(x_ptr, n, SIZE, \"evict_last\") - mean",
        ("tests/interpreter/test_fused_gradients.py", "-k", "pieces"), interpreted=True,
    ),
    "norm, slopes of a long row": Mutation(
        "fused/kernels/norm_gradients.py", "tl.sum(products, 0) * inverse / SIZE)", "tl.sum(products, 0) / SIZE)",
        ("tests/interpreter/test_fused_gradients.py", "-k", "pieces"), interpreted=True,
    ),
    "norm, parts of dw": Mutation(
        "fused/kernels/norm_gradients.py", "for first in range(0, parts, PARTS):", "for first in range(0, parts - PARTS, PARTS):",
        ("tests/interpreter/test_fused_gradients.py", "-k", "parts"), interpreted=True,
    ),
    "weights in one pass, the bits of a scale": Mutation(
        "weights/triton/weights.py", "scale.to(tl.bfloat16).to(tl.float32))", "scale)",
        ("tests/interpreter/test_quantised_weights.py", "-k", "bits and int4"), interpreted=True,
    ),
    "weights, scales rounded late": Mutation(
        "weights/quantise.py", "rounded = scales.clamp(min=smallest).bfloat16()", "rounded = scales.clamp(min=smallest)",
        ("tests/unit/test_quantised_weight.py", "-k", "w8 or before_codes"),
    ),
    "weights, zero points": Mutation(
        "weights/weight.py", "numbers - parts.zeros", "numbers + parts.zeros",
        ("tests/unit/test_quantised_weight.py", "-k", "zero_points or near"),
    ),
    "weights, int8 sums in fp32": Mutation(
        "weights/definition.py", "EXACT = 1024", "EXACT = 16384", ("tests/weights/test_linear.py", "-k", "int8_is_exact")
    ),
    "weights, nibbles": Mutation(
        "weights/triton/unpacked.py", "tl.interleave(pairs & 15, pairs >> 4)", "tl.interleave(pairs >> 4, pairs & 15)",
        ("tests/interpreter/test_quantised_products.py", "-k", "dequantised_bits"), interpreted=True,
    ),
    "weights, a split left out": Mutation(
        "weights/triton/scaled.py", "for split in tl.static_range(1, SPLITS)", "for split in tl.static_range(2, SPLITS)",
        ("tests/interpreter/test_quantised_products.py", "-k", "test_products"), interpreted=True,
    ),
    "weights, a scale of x": Mutation(
        "weights/triton/scaled.py", "x_scale = tl.load(x_scales_ptr + m, mask", "x_scale = tl.load(x_scales_ptr + 0 * m, mask",
        ("tests/interpreter/test_quantised_products.py", "-k", "not_split"), interpreted=True,
    ),
    "hopper, a partial's place": Mutation(
        "weights/hopper/schedule.py", "return gl.load(to.partial(program, 0,", "return gl.load(to.partial(program, 1,",
        ("tests/kernels/test_hopper_products.py", "-k", "emulated"),
    ),
    "hopper, a gate's partial": Mutation(
        "weights/hopper/schedule.py", "acc_2 = _in_rows(_sum_of_parts(start, last, tile_m, block + 1, place, to)",
        "acc_2 = _in_rows(_sum_of_parts(start, last, tile_m, block, place, to)",
        ("tests/kernels/test_hopper_products.py", "-k", "emulated_gates"),
    ),
    "hopper, the rows of a tile": Mutation(
        "weights/hopper/schedule.py", "across = self.tiles // self.spread", "across = self.tiles",
        ("tests/kernels/test_hopper_schedule.py", "tests/kernels/test_hopper_products.py", "-k", "share_all_steps or emulated"),
    ),
    "hopper, parts side by side": Mutation(
        "weights/hopper/schedule.py", ".permute((1, 4, 2, 0, 3, 5))", ".permute((1, 5, 2, 0, 3, 4))",
        ("tests/kernels/test_hopper_products.py", "-k", "emulated_products"),
    ),
    "hopper, order of x": Mutation(
        "weights/hopper/widened.py", "2, 2, 2]).permute((0, 2, 4, 5, 1, 3))", "2, 2, 2]).permute((0, 2, 5, 4, 1, 3))",
        ("tests/kernels/test_hopper_products.py", "tests/kernels/test_hopper_decoding.py", "-k", "emulated or order_of_codes"),
    ),
    "hopper, scales of a gate in codes": Mutation(
        "weights/hopper/gated_codes.py", "up = with_scales(up, n_0 + to.N, m_0,", "up = with_scales(up, n_0, m_0,",
        ("tests/kernels/test_hopper_products.py", "-k", "gates_of_codes"),
    ),
    "weights, gradient of x": Mutation(
        "weights/product.py", "dx = (dy.to(dtype) @ _weight_of(ctx.saved_tensors, ctx.rest, dtype)).to(ctx.dtype)",
        "dx = torch.zeros(dy.shape[0], ctx.rest[3], dtype=ctx.dtype)", ("tests/weights/test_linear.py", "-k", "gradients"),
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
        "fused/linear_loss_operators.py", "share = losses.new_ones(()) if count is None else 1.0 / count.to(losses.dtype)",
        "share = losses.new_ones(())", ("tests/conformance/test_fused_gradients.py", "-k", "cross_entropy"),
    ),
    "split loss, a count of one rank": Mutation(
        "fused/linear_loss.py", "dist.all_reduce(count, group=parts.tokens.group)", "pass",
        ("tests/parallel/test_split_loss.py", "-k", "agrees"),
    ),
    "split loss, a largest of one rank": Mutation(
        "fused/split_vocabulary.py", "dist.all_reduce(most, dist.ReduceOp.MAX, group=ranks.group)", "pass",
        ("tests/parallel/test_split_loss.py", "-k", "agrees"),
    ),
    "split loss, smoothing over a part": Mutation(
        "fused/split_vocabulary.py", "into=z, whole=parts.V)", "into=z, whole=z.shape[1] or 1)",
        ("tests/parallel/test_split_loss.py", "-k", "agrees"),
    ),
    "adamw, the rest of a weight": Mutation(
        "optim/split.py", "high = (bits + 0x8000) >> 16", "high = bits >> 16", ("tests/optim", "-k", "halves or split"),
    ),
    "adamw, the kernel's clipping": Mutation(
        "optim/adamw_kernels.py", "scale *= tl.load(clip_ptr).to(tl.float32)", "scale *= 1.0",
        ("tests/interpreter/test_adamw.py",), interpreted=True,
    ),
    "adamw, decay of what is kept": Mutation(
        "optim/adamw_kernels.py", "mask=there) != 0, 0.0, p)", "mask=there) == 0, 0.0, p)",
        ("tests/interpreter/test_adamw.py", "-k", "step"), interpreted=True,
    ),
    "adamw, decay that is clipped": Mutation(
        "optim/definition.py", "* numbers.left_out\n", "* numbers.left_out * (1.0 if clip is None else clip)\n",
        ("tests/qat/test_sparse.py", "tests/optim/test_adamw.py", "-k", "in_its_pass or leaves_out"),
    ),
    "weights, the bit of what lies inside": Mutation(
        "weights/triton/weights.py", "eights << tl.arange", "eights << 7 - tl.arange",
        ("tests/interpreter/test_quantised_weights.py", "-k", "one_pass"), interpreted=True,
    ),
    "weights, scales of what is left out": Mutation(
        "weights/triton/weights.py", "x = tl.where(tl.load(mask_ptr + row * CODES.K + k, mask=there, other=0) != 0, x, 0.0)",
        "x = tl.where(tl.load(mask_ptr + row * CODES.K + k, mask=there, other=0) != 2, x, 0.0)",
        ("tests/interpreter/test_quantised_weights.py", "-k", "one_pass"), interpreted=True,
    ),
    "2:4, ties": Mutation(
        "weights/two_four/definition.py", "ab, ac, ad, bc, bd, cd = a >= b,", "ab, ac, ad, bc, bd, cd = a > b,",
        ("tests/weights/two_four/test_masks.py",),
    ),
    "2:4, the order of sums": Mutation(
        "weights/two_four/patterns.py",
        "PAIRS = tuple(combinations(range(4), 2))", "PAIRS = tuple(combinations(range(3, -1, -1), 2))",
        ("tests/weights/two_four/test_masks.py",),
    ),
    "2:4, a place": Mutation(
        "weights/two_four/product/few_rows.py", "(both & 0xFFFF).to(tl.uint64) << ((four << 4) & 48)",
        "(both & 0xFFFF).to(tl.uint64) << ((four << 2) & 48)",
        ("tests/interpreter/test_two_four.py", "-k", "products"), interpreted=True,
    ),
    "2:4, the last tile": Mutation(
        "weights/two_four/product/few_rows.py", "tl.minimum(step + 1, last - 1)", "tl.minimum(step, last - 1)",
        ("tests/interpreter/test_two_four.py", "-k", "products"), interpreted=True,
    ),
    "2:4 on Hopper, where a pattern's values are": Mutation(
        "runtime/hopper/ptx.py", "5: (1, 3), 6: (2, 3), 7: (0, 1)}", "5: (0, 3), 6: (2, 3), 7: (0, 1)}",
        ("tests/kernels/test_hopper_two_four.py", "-k", "spreads"),
    ),
    "2:4 on Hopper, the last step": Mutation(
        "weights/hopper/two_four.py", "if step + 1 < run.stop:", "if step + 2 < run.stop:",
        ("tests/kernels/test_hopper_two_four.py", "-k", "emulated and 13"),
    ),
    "INT8 of many rows, the last band of tiles": Mutation(
        "weights/hopper/many_rows.py", "size = gl.minimum(GROUP, self.rows - band * GROUP)", "size = GROUP",
        ("tests/kernels/test_hopper_products.py", "-k", "many_rows"),
    ),
}  # fmt: skip
