"""Every family of models of Transformers at toy size: outputs and gradients equal those of eager attention, or it is refused.

`make test` runs one class for each kind of fault that was found; all of them have the mark `sweep`. The verdicts are those of
docs/reference/transformers-models.md, whose lines `scripts/write_transformers_models.py` keeps in `every_model/rows.jsonl`.
"""

from __future__ import annotations

import pytest
import torch
import transformers

from rooftile.integrations import transformers as integration
from scripts.write_transformers_models import kept, written_with
from tests.integrations.every_model.build import models
from tests.integrations.every_model.compare import compare

pytestmark = [pytest.mark.usefixtures("registered"), pytest.mark.filterwarnings("ignore")]

SHARE = {
    "BloomForCausalLM": "makes a mask, and adds None to its own scores",
    "CLIPModel": "two towers, one causal",
    "DPRQuestionEncoder": "an encoder whose pooling reads padded tokens",
    "DeepseekV3ForCausalLM": "values of another head dim",
    "GitForCausalLM": "a table of classes by the name",
    "GptOssForCausalLM": "sinks and windows",
    "JambaForCausalLM": "a recurrence that reads padded tokens",
    "Llama4ForCausalLM": "chunks",
    "MambaForCausalLM": "no attention",
    "NemotronAsrStreamingEncoder": "reads numbers as booleans",
    "Qwen2VLForConditionalGeneration": "packed position_ids of three axes",
    "T5ForConditionalGeneration": "a learned bias",
    "T5GemmaForConditionalGeneration": "windows that count the query or not",
    "Wav2Vec2Model": "sound",
    "WhisperForConditionalGeneration": "cross-attention from a cache",
    "XLMWithLMHeadModel": "a boolean mask by its own rules",
}
ROWS, WRITTEN_WITH = kept(), written_with()


def classes():
    return [pytest.param(family, name, id=name, marks=() if name in SHARE else pytest.mark.sweep) for family, name in models()]


@pytest.mark.parametrize(("family", "name"), classes())
def test_a_family_is_equal_or_refused(family, name):
    known = ROWS.get(name)
    if known is None and transformers.__version__ == WRITTEN_WITH:
        pytest.fail("the page lacks it: run scripts/write_transformers_models.py")
    if known is not None and known.reason.startswith("takes longer"):
        pytest.skip(known.reason)
    row = compare(family, name)
    assert row.verdict != "differs", row.reason
    # from version to version a model begins to ask for attention, or can be built
    if transformers.__version__ == WRITTEN_WITH:
        assert (row.verdict, row.compared) == (known.verdict, known.compared)


def test_the_page_has_every_family():
    assert set(SHARE) <= ROWS.keys()
    assert not [row for row in ROWS.values() if row.verdict == "differs"]
    if transformers.__version__ != WRITTEN_WITH:
        # a newer one has further families, whose outputs and gradients the sweep compares all the same
        assert len(ROWS.keys() & {name for _, name in models()}) > 500
        pytest.skip(f"the page was written with Transformers {WRITTEN_WITH}, and this is {transformers.__version__}")
    assert {name for _, name in models()} == ROWS.keys()


@pytest.mark.parametrize("fault", ["a window too wide", "no mask", "no padding", "a lost bias"])
def test_the_comparison_finds_faults(fault, monkeypatch):
    """Each of the faults that the sweep is for, planted."""
    attend = integration._attend

    def spoilt(module, q, k, v, mask, call, options):
        if fault == "no mask":
            mask = torch.zeros(1, 1, q.shape[1], k.shape[1])
        elif fault == "a lost bias":
            call = call._replace(position_bias=None)
        elif mask is not None and hasattr(mask, "decision"):
            decision = mask.decision
            if fault == "no padding":
                decision = decision._replace(sequences=None)
            elif decision.pattern.left is not None:
                decision = decision._replace(pattern=decision.pattern & integration.Window(decision.pattern.left - 1))
            mask.decision = decision
        return attend(module, q, k, v, mask, call, options)

    monkeypatch.setattr(integration, "_attend", spoilt)
    name = "T5ForConditionalGeneration" if fault == "a lost bias" else "T5GemmaForConditionalGeneration"
    assert compare(ROWS[name].family, name).verdict == "differs"
