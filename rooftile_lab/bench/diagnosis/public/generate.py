"""Lets a GPT-2 of Transformers write answers by `generate`, under inference_mode."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rooftile_lab.bench.diagnosis.public.course import Course


def main() -> None:
    course = Course()
    width, layers, heads, vocabulary, batch, prompt = course.sized(
        (192, 4, 4, 2000, 2, 32), (768, 12, 12, 50257, 8, 256), (16, 4, 4, 16, 1, 2)
    )
    config = GPT2Config(
        n_embd=width, n_layer=layers, n_head=heads, vocab_size=vocabulary, n_positions=1024, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(config)
    model.to(course.device).eval()
    ids = torch.randint(vocabulary, (batch, prompt), device=course.device)
    with torch.inference_mode():
        while course.goes_on():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=True, top_k=8, pad_token_id=0)


if __name__ == "__main__":
    main()
