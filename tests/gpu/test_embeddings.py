"""Vectors and scores of texts on a GPU against a CPU's in fp32, and against Transformers in the same dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from rooftile.engine import LLM
from tests.engine.embedding_folders import LONGEST, SIZES, TEXTS, WORDS, decoder_folder, encoder_folder, written

pytestmark = pytest.mark.gpu
MANY = [*TEXTS, *(" ".join(WORDS[n % 7 : n % 17]) for n in range(60))]


def vectors(llm: LLM, texts: list[str]) -> torch.Tensor:
    return torch.stack([each.embedding for each in llm.embed(texts, truncate_prompt_tokens=-1)])


@pytest.mark.parametrize("kind", ["bert", "modernbert", "decoder"])
def test_vectors_are_a_cpus(kind: str, tmp_path: Path, device: torch.device) -> None:
    if kind == "bert":
        folder = encoder_folder(tmp_path)
    elif kind == "decoder":
        folder = decoder_folder(tmp_path)
    else:
        sizes = SIZES | {"num_hidden_layers": 4, "local_attention": 6, "pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3}
        folder = written(transformers.ModernBertModel(transformers.ModernBertConfig(**sizes)), tmp_path)
    due = vectors(LLM(folder, device="cpu"), MANY)
    found = vectors(LLM(folder, device=device, max_batched_tokens=200), MANY)
    # products of fp32 on a GPU are in fp32, too, as PyTorch's default is
    torch.testing.assert_close(found, due, atol=2e-4, rtol=2e-4)


def test_scores_are_a_cpus(tmp_path: Path, device: torch.device) -> None:
    folder = encoder_folder(tmp_path, "BertForSequenceClassification", num_labels=1)
    due, found = (LLM(folder, device=where).score("the roof", MANY, truncate_prompt_tokens=-1) for where in ("cpu", device))
    assert [each.score for each in found] == pytest.approx([each.score for each in due], abs=2e-4)


def test_bfloat16_is_as_close_to_exact_as_transformers(tmp_path: Path, device: torch.device) -> None:
    folder = encoder_folder(tmp_path)
    exact = vectors(LLM(folder, device="cpu"), MANY)
    ours = vectors(LLM(folder, dtype="bf16", device=device), MANY)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.bfloat16).eval().to(device)
    own = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = []
    with torch.inference_mode():
        for text in MANY:
            ids = own(text, truncation=True, max_length=LONGEST, return_tensors="pt")["input_ids"].to(device)
            theirs.append(model(ids).last_hidden_state[0].float().mean(0).cpu())
    assert (ours - exact).abs().mean() <= 2 * (torch.stack(theirs) - exact).abs().mean()
