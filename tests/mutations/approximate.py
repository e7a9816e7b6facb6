"""Broken lines of approximate attention."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MUTATIONS = {
    "loki, the last page": Mutation(
        "approximate/loki/decoding.py", "scores = scores.masked_fill(last[:, None], math.inf)", "scores = scores",
        ("tests/engine/test_loki.py", "-k", "without_a_cache"),
    ),
    "loki, the last page, in a kernel": Mutation(
        "approximate/loki/decoding_kernels.py", "tl.where(n == pages - 1, float", "tl.where(n == pages, float",
        ("tests/interpreter/test_loki_pages.py", "-k", "best"), interpreted=True,
    ),
    "loki, shares of a head": Mutation(
        "approximate/loki/decoding_kernels.py", "l = l * tl.exp(m - pivot) + tl.sum(total", "l = l + tl.sum(total",
        ("tests/interpreter/test_loki_pages.py", "-k", "scores"), interpreted=True,
    ),
    "loki, page sums": Mutation(
        "approximate/loki/decoding_kernels.py", "seen = j < length\n", "seen = j <= length\n",
        ("tests/interpreter/test_loki_pages.py",), interpreted=True,
    ),
    "native sparse, beyond a block": Mutation(
        "approximate/native_sparse/decoding_kernels/block_choice.py", "_weights(sums_ptr + SHAPE.NEW, ", "_weights(sums_ptr, ",
        ("tests/interpreter/test_native_sparse_pages.py", "-k", "small"), interpreted=True,
    ),
    "native sparse, window": Mutation(
        "approximate/native_sparse/decoding_kernels/tokens.py", "tl.maximum(length - SHAPE.WINDOW, 0)",
        "tl.maximum(length - SHAPE.WINDOW + 1, 0)",
        ("tests/interpreter/test_native_sparse_pages.py", "-k", "small or gate"), interpreted=True,
    ),
    "choice, the neighbour's weight": Mutation(
        "approximate/native_sparse/selected/kernels/block_choice.py",
        "tl.where(b[None, :] == 0, left[:, None], before)", "before",
        ("tests/interpreter/test_selected.py", "-k", "both_blocks"), interpreted=True,
    ),
    "selected, a block of the union": Mutation(
        "approximate/native_sparse/selected/tiles.py", "bits.masked_fill(is_again, 0)", "bits.masked_fill(~is_new, 0)",
        ("tests/approximate/test_selected.py", "-k", "union"),
    ),
    "selected, a query that names a block again": Mutation(
        "approximate/native_sparse/selected/kernels/lists.py", "has_before & is_same & (query == before)", "there & (query < 0)",
        ("tests/interpreter/test_selected.py", "-k", "lists_of"), interpreted=True,
    ),
    "selected, the place of a part": Mutation(
        "approximate/native_sparse/selected/kernels/gradients.py",
        "kept = start // each * 2 + part", "kept = start // each + part",
        ("tests/interpreter/test_selected.py", "-k", "any_tiles"), interpreted=True,
    ),
    "selected, a part of a list": Mutation(
        "approximate/native_sparse/selected/kernels/gradients.py", "for part in range(count):", "for part in range(count - 1):",
        ("tests/interpreter/test_selected.py", "-k", "any_tiles"), interpreted=True,
    ),
    "strided, a key twice": Mutation(
        "approximate/sparse_transformer/attention.py",
        '0 if heads == "second" else -(-window // stride)',
        '0',
        ("tests/approximate/test_sparse_transformer.py",),
    ),
    "strided, edge of the window": Mutation(
        "approximate/sparse_transformer/attention.py",
        'Window(window - 1) if pattern',
        'Window(window) if pattern',
        ("tests/approximate/test_sparse_transformer.py",),
    ),
    "fixed, the own summary": Mutation(
        "approximate/sparse_transformer/attention.py",
        '        if heads == "second":\n            parts.append(_own',
        '        if heads == "none":\n            parts.append(_own',
        ("tests/approximate/test_sparse_transformer.py",),
    ),
    "reformer, N_ij": Mutation(
        "approximate/reformer/attention.py",
        '    if once and sort.hash.shape[0] > 1:',
        '    if once and sort.hash.shape[0] > 99:',
        ("tests/approximate/test_reformer.py",),
    ),
    "reformer, the first chunk": Mutation(
        "approximate/reformer/attention.py",
        '(chunk_i[..., :, None] - chunk_j[..., None, :]) % self.chunks <= 1',
        '((chunk_i[..., :, None] - chunk_j[..., None, :]).abs() * 2 - 1).abs() <= 1',
        ("tests/approximate/test_reformer.py",),
    ),
    "reformer, stable sort": Mutation(
        "approximate/reformer/attention.py",
        'self.order = self.hash.sort(dim=-1, stable=True).indices',
        'self.order = (self.hash * self.T - torch.arange(self.T)).argsort(dim=-1)',
        ("tests/approximate/test_reformer.py",),
    ),
    "reformer, itself": Mutation(
        "approximate/reformer/attention.py",
        'j < i if self.causal',
        'j <= i if self.causal',
        ("tests/approximate/test_reformer.py",),
    ),
    "routing, causal by rank": Mutation(
        "approximate/routing/attention.py",
        'seen = keys[..., None, :] <= queries[..., :, None] + (S - T)',
        'seen = seen.tril()',
        ("tests/approximate/test_routing.py",),
    ),
    "routing, mean of clusters": Mutation(
        "approximate/routing/attention.py",
        'total / count.clamp(min=1)',
        'total',
        ("tests/approximate/test_routing.py",),
    ),
    "routing, gradient in order": Mutation(
        "approximate/gathered/pairs.py",
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
        "approximate/loki/attention.py",
        'pages * page - S, 0)',
        '0, 0)',
        ("tests/approximate/test_loki.py",),
    ),
    "native sparse, the neighbour's weight": Mutation(
        "approximate/native_sparse/selection.py",
        'torch.nn.functional.pad(overlaps, (back, back)).unfold(0, back + 1, 1).sum(-1)',
        'torch.nn.functional.pad(overlaps, (back, back)).unfold(0, back + 1, 1).amax(-1)',
        ("tests/approximate/test_native_sparse.py",),
    ),
    "native sparse, order of ties": Mutation(
        "approximate/gathered/pairs.py",
        'score.sort(dim=-1, descending=True, stable=True).indices',
        'score.flip(-1).sort(dim=-1, descending=True, stable=True).indices.neg().add(score.shape[-1] - 1)',
        ("tests/approximate/test_native_sparse.py",),
    ),
    "native sparse, a block left out": Mutation(
        "approximate/native_sparse/selected/by_block.py",
        'there = (blocks >= 0)',
        'there = (blocks > 0)',
        ("tests/approximate/test_native_sparse.py",),
    ),
    "native sparse, causal in the own block": Mutation(
        "approximate/native_sparse/selected/by_block.py",
        '(place <= position[rows, None])',
        '(place <= position[rows, None] + 1)',
        ("tests/approximate/test_native_sparse.py",),
    ),
    "native sparse, complete blocks": Mutation(
        "approximate/native_sparse/attention.py",
        'place = S - T - (length - 1)',
        'place = S - T - (length - 2)',
        ("tests/approximate/test_native_sparse.py",),
    ),
}  # fmt: skip
