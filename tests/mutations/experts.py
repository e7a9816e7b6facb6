"""Broken lines of routers, experts and the balance loss."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

ROUTING, EXPERTS, BALANCE = (f"tests/moe/test_{name}.py" for name in ("routing", "experts", "balance"))
BACKWARD = "tests/interpreter/test_experts_backward.py"
FAMILIES, SERVED = "tests/models/test_expert_families.py", "tests/engine/test_experts.py"

MUTATIONS = {
    "router, the gate renormalised": Mutation("moe/routing.py", "if router.normalise:", "if True:", (ROUTING,)),
    "router, a group's score": Mutation(
        "moe/routing.py", "by_group.topk(2, -1).values.sum(-1)", "by_group.sum(-1)", (ROUTING,)
    ),
    "router, what is masked": Mutation("moe/routing.py", "[..., None], -math.inf)", "[..., None], 0.0)", (ROUTING,)),
    "router, the bias in the gate": Mutation(
        "moe/routing.py", "else scores.gather(-1, chosen)", "else (scores if bias is None else scores + bias).gather(-1, chosen)",
        (ROUTING,),
    ),
    "router, ties": Mutation(
        "moe/routing.py", "scores.sort(dim=-1, descending=True, stable=True).indices[..., : router.active]",
        "scores.topk(router.active, -1).indices", (ROUTING, "-k", "ties"),
    ),
    "router, a detached score": Mutation(
        "moe/routing.py", "gates = z.gather(-1, chosen).softmax(-1)", "gates = z.detach().gather(-1, chosen).softmax(-1)",
        (ROUTING, "-k", "gradients"),
    ),
    "experts, the order of rows": Mutation(
        "moe/sorting.py", "index_copy_(0, self.order, rows)", "copy_(rows[self.order])", (EXPERTS, "-k", "sorted")
    ),
    "experts, the gate's gradient": Mutation(
        "moe/by_expert.py", "(wide_a * wide_e)", "(g * wide_a * wide_e)",
        (EXPERTS, "-k", "sorted"),
    ),
    "experts, a clamp's gradient": Mutation("moe/activations.py", "da * gate * s * up_moves", "da * gate * s", (EXPERTS,)),
    "experts, the shared gate": Mutation("moe/by_expert.py", "* s * (1 - s)", "* s", (EXPERTS, "-k", "sorted")),
    "experts, an empty expert's neighbour": Mutation("moe/products.py", "if start < end:", "if start + 1 < end:", (EXPERTS,)),
    "experts, a neighbour's bits": Mutation(
        "moe/products.py", "product, E = linear_as_defined if deterministic else functional.linear",
        "product, E = functional.linear", (EXPERTS, "-k", "neighbours"),
    ),
    "experts, a neighbour's exponential": Mutation(
        "moe/products.py", "return torch.cat([function(row) for row in x.split(1)])", "return function(x)",
        ("tests/moe", "-k", "neighbours"),
    ),
    "experts, infinity of another expert": Mutation(
        "moe/definition.py", "torch.where(is_used, gate * z, 0)", "gate * z", (EXPERTS, "-k", "overflows")
    ),
    "experts, a tile too few": Mutation(
        "moe/products.py", "// ROWS + min(count, x.shape[0])", "// ROWS + min(count, x.shape[0]) - 1", (EXPERTS, "-k", "tiles")
    ),
    "experts, another expert's rows in a gradient": Mutation(
        "moe/kernels/gradients.py", "left = tl.load(left, mask=here[:, None] & (m < OUT)[None, :], other=0.0)",
        "left = tl.load(left, mask=(m < OUT)[None, :], other=0.0)", (BACKWARD, "-k", "odd"), interpreted=True,
    ),
    "experts, the gate in a kernel's gradient": Mutation(
        "moe/kernels/activations.py", "_gradient(gate, up, g * e, ACTIVATION)", "_gradient(gate, up, e, ACTIVATION)",
        (BACKWARD, "-k", "odd"), interpreted=True,
    ),
    "experts, the token of a sorted row": Mutation(
        "moe/kernels/sorting.py", "(i // K).to(tl.int64)", "(i % K).to(tl.int64)", ("tests/interpreter/test_experts_sorting.py",),
        interpreted=True,
    ),
    "experts, a choice that is no expert": Mutation(
        "moe/kernels/gradients.py", 'tl.where(is_expert, dx.to(tl.float32), float("nan"))', "dx.to(tl.float32)",
        (BACKWARD, "-k", "no_expert"), interpreted=True,
    ),
    "experts, gate and up exchanged": Mutation(
        "models/checkpoints/experts.py", "zip(parts, weight.chunk(len(parts), -2), strict=True)",
        "zip(parts, weight.chunk(len(parts), -2)[::-1], strict=True)", (FAMILIES, "-k", "transformers or definitions"),
    ),
    "experts, gates of DeepSeekMoE": Mutation(
        "models/experts/families.py", 'normalise=active > 1 and settings.flag("norm_topk_prob")', "normalise=True",
        (FAMILIES, "-k", "deepseek"),
    ),
    "experts, pairs of gpt-oss": Mutation(
        "models/checkpoints/gpt_oss.py", "x.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)", "x",
        (FAMILIES, "-k", "transformers or mxfp4"),
    ),
    "experts, sinks of another layer": Mutation(
        "engine/mixers/exact/step.py", "self.options.get(layer, NO_OPTIONS)", "self.options.get(0, NO_OPTIONS)",
        (SERVED, "-k", "gpt_oss"),
    ),
    "experts, neighbours on a CPU": Mutation(
        "engine/steps/runner.py", "self._multiply: Multiply = linear if deterministic else functional.linear",
        "self._multiply: Multiply = functional.linear", (SERVED, "-k", "neighbours"),
    ),
    "selection, norms left out": Mutation(
        "models/mamba/mamba_layer.py", "        if self.selection_norms:", "        if False:",
        ("tests/engine/test_recurrent.py", "-k", "logprobs and (falcon or jamba)"),
    ),
    "balance, over the batch": Mutation(
        "moe/balance.py", "return torch.searchsorted(cu[1:], rows, right=True)", "return torch.zeros_like(rows).long()",
        (BALANCE,),
    ),
    "balance, scores of a sigmoid": Mutation(
        "moe/balance.py", "scores = scores / (scores.sum(-1, keepdim=True) + LEAST)", "scores = scores * 1", (BALANCE,)
    ),
    "balance, the step of a bias": Mutation("moe/balance.py", "counts.mean() - counts", "counts - counts.mean()", (BALANCE,)),
}  # fmt: skip
