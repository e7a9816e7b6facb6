"""Broken lines of training for a format, plans and the report."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MUTATIONS = {
    "training for a format, activations that were not rounded": Mutation(
        "qat/rounding/product.py",
        'dw = (dy.flatten(0, -2).T @ rows.flatten(0, -2).to(dy.dtype)).to(w.dtype)',
        'dw = (dy.flatten(0, -2).T @ x.flatten(0, -2).to(dy.dtype)).to(w.dtype)',
        ("tests/qat/test_gradients.py",),
    ),
    "training for a format, scales rounded late": Mutation(
        "qat/rounding/learned.py", '.to(STORED[format])', '.float()', ("tests/qat/test_learned.py",),
    ),
    "training for a format, another eps": Mutation(
        "qat/rounding/codes.py", "w, rounding.format, rounding.group,", "w * (w.abs() > 1e-12), rounding.format, rounding.group,",
        ("tests/qat/test_prepare.py", "-k", "server"),
    ),
    "training for a format, another eps in the kernel": Mutation(
        "weights/triton/weights.py", "1.1754943508222875e-38", "1e-30", ("tests/interpreter/test_quantised_weights.py",), True,
    ),
    "training for a format, scales rounded after codes were taken": Mutation(
        "weights/quantise.py",
        "codes = (groups / scales.float().unsqueeze(-1)).round().clamp(-half, half - 1)",
        "codes = (groups / divided(groups.abs().amax(-1, keepdim=True), half - 0.5)).round().clamp(-half, half - 1)",
        ("tests/qat/test_prepare.py", "-k", "server"),
    ),
    "training for a format, learned scales rounded after codes were taken": Mutation(
        "qat/rounding/learned.py", "_steps(w, stored, group).round()",
        "_steps(w, scales.detach().clamp(min=LEAST), group).round()",
        ("tests/qat/test_learned.py",),
    ),
    "training for a format, codes of before": Mutation(
        "qat/prepared/rounded.py",
        'now: tuple[int, ...] = (self.parameter.data_ptr(), self.parameter._version, self.qat.steps)',
        'now: tuple[int, ...] = (self.parameter.data_ptr(), self.qat.steps)',
        ("tests/qat/test_gradients.py",),
    ),
    "training for a format, codes of before the first step": Mutation(
        "qat/prepared/rounded.py", "torch.is_grad_enabled() and self.qat.steps > 0", "torch.is_grad_enabled()",
        ("tests/qat/test_gradients.py", "-k", "codes"),
    ),
    "qat, flags that stay on the device": Mutation(
        "qat/rounding/finite.py", "for at in copy.nonzero().flatten().tolist():", "for at in ():", ("tests/qat/test_finite.py",),
    ),
    "qat, codes of a weight that was not looked at": Mutation(
        "qat/prepared/rounded.py", "trains = self.training and", "trains =", ("tests/qat/test_finite.py", "-k", "at_once"),
    ),
    "plan, losses in steps": Mutation(
        "planning/knapsack.py", "math.ceil(min(loss / max_loss, 2.0) * STEPS - 1e-6)", "math.floor(loss / max_loss * STEPS)",
        ("tests/planning/test_knapsack.py",),
    ),
    "plan, launches": Mutation(
        "planning/costs.py", "return self.roofs(one.dtype).fixed_us + fill_us", "return fill_us",
        ("tests/planning/test_known_answers.py",),
    ),
    "plan, weights that the cache holds": Mutation(
        "planning/timing.py", "max(ceil(CACHES * self._cache_bytes / nbytes), 1) if replayed else 1", "1",
        ("tests/planning/test_decoder.py", "-k", "cache_holds"),
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
        "planning/targets/training.py", "{Name(name): word", "{name: word",
        ("tests/planning/test_plan.py", "-k", "pattern"),
    ),
    "plan, a decoder left rounded": Mutation(
        "planning/targets/decoders.py", "projection.weight, projection.parts = weight, ()", "projection.weight = weight",
        ("tests/planning/test_decoder.py", "-k", "as_before"),
    ),
    "2:4, decay of what is kept": Mutation(
        "qat/rounding/masking.py", "torch.where(mask, 0.0, weight) * (rate", "torch.where(mask, weight, 0.0) * (rate",
        ("tests/qat/test_sparse.py", "-k", "decay"),
    ),
    "2:4, frozen masks": Mutation(
        "qat/rounding/masking.py", "steps >= recipe.freeze_from", "steps > recipe.freeze_from",
        ("tests/qat/test_sparse.py", "-k", "frozen"),
    ),
    "2:4, scales before masks": Mutation(
        "qat/prepared/rounded.py", "whole(self.scales), flag, mask)", "whole(self.scales), flag)",
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
        "report/planned.py", "/ count - kept.nbytes", "/ count", ("tests/report/test_report_planned.py",), package="rooftile_lab",
    ),
}  # fmt: skip
