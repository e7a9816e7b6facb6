"""Broken lines of decoders of our own: sums as a state, what a folder says of them, and what is trained."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

SERVED = "tests/engine/test_hybrids.py"
CONFIG = "tests/models/test_hybrid.py"

MUTATIONS = {
    "sums, the exponent of no key": Mutation(
        "engine/mixers/recurrent/linear.py", "largest.masked_fill((z == 0).all(-1), -math.inf)", "largest",
        (SERVED, "-k", "far_below"),
    ),
    "sums, not rotated": Mutation(
        "engine/mixers/recurrent/linear.py", "q, k = rotate(q, rotation), rotate(k, rotation)", "pass",
        (SERVED, "-k", "trained_module and linear"),
    ),
    "sums, not kept": Mutation(
        "engine/mixers/recurrent/linear.py", "        kept.index_copy_(0, slots, x)", "        pass",
        (SERVED, "-k", "trained_module and performer"),
    ),
    "sums, a step's decay": Mutation(
        "recurrent/linear/step.py", "        state.s.mul_(keep[..., None, None])\n", "",
        ("tests/approximate/test_performer.py", "-k", "in_place"),
    ),
    "hybrid, sections that no layer reads": Mutation(
        "models/mixers.py", "if name not in said), None)", "if False), None)", (CONFIG, "-k", "contradicts_itself")
    ),
    "hybrid, the eps of a norm": Mutation(
        "models/mixing_modules.py", 'options["eps"] = config.norm_eps', 'options["eps"] = 1e-2', (SERVED, "-k", "mamba2")
    ),
    "hybrid, the balance of the last layer alone": Mutation(
        "models/trainable.py", "for routing in self.routings]", "for routing in self.routings[-1:]]", (CONFIG, "-k", "balance")
    ),
}  # fmt: skip
