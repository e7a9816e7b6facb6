"""`parallel.context`: models and calls that know nothing of it compute attention over the whole sequence."""

import pytest

from tests.parallel import context_model_cases as cases
from tests.parallel.processes import run_on


@pytest.mark.parametrize(
    ("ranks", "method", "packed", "checkpointed"),
    [(2, "gather", False, True), (3, "gather", True, False), (2, "ulysses", True, True)],
)
def test_a_model_of_transformers_has_one_process_s_gradients(ranks, method, packed, checkpointed):
    for alone, together, worst in run_on(ranks, cases.trained, method, packed, checkpointed):
        assert abs(alone - together) < 1e-5
        assert worst < 1e-6


def test_a_checkpoint_that_loses_the_context_is_refused():
    """Its second forward would compute attention over one rank's tokens, and say nothing."""
    for ours, ours_reentrant, of_torch, of_torch_reentrant in run_on(2, cases.refused_checkpoints):
        assert "checkpoint_contexts" in ours
        assert "checkpoint_contexts" in ours_reentrant
        assert "tensors" in of_torch
        assert "use_reentrant=False" in of_torch_reentrant


def test_calls_inside_and_outside():
    due = [
        "k has 12 tokens and q has 6",
        "packed sequences inside rooftile.parallel.context",
        "precision fp8 inside",
        "mask causal & targets(2) in attention over a sequence that ranks hold in parts",
        "attn_mask inside rooftile.parallel.context",
        "return_attn_probs with dropout inside",
        "key_padding_mask Tensor inside",
        "blocks Blocks inside",
        "mask BlockMask inside",
        "multi_head_attention_forward inside",
        "_scaled_dot_product_flash_attention_for_cpu inside",
        "reformer inside",
        "routing inside",
    ]
    for found in run_on(2, cases.calls):
        for got, part in zip(found.pop("refused"), due, strict=True):
            assert part in got
        assert found == dict.fromkeys(found, True)
