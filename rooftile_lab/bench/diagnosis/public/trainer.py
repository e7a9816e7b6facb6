"""Trains a small Llama of Transformers in steps as its Trainer makes them: --way plain, lora, checkpointing or autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from rooftile_lab.bench.diagnosis.public.course import Course


class LoRA(nn.Module):
    """A frozen product with a trained one of low rank beside it."""

    def __init__(self, inner: nn.Linear, rank: int) -> None:
        super().__init__()
        self.inner, self.down = inner.requires_grad_(False), nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 2.0 * self.up(self.down(x))


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    model.requires_grad_(False)
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj, rank)  # type: ignore[union-attr]
        layer.self_attn.v_proj = LoRA(layer.self_attn.v_proj, rank)  # type: ignore[union-attr]
    return model


class Trainer:
    """Runs the step of a trainer: inputs to the device, the loss, its backward, the clipped update, the schedule."""

    def __init__(self, model: nn.Module, device: torch.device, autocast: bool) -> None:
        self.model, self.device, self.autocast = model.to(device).train(), device, autocast
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(trained, lr=1e-4)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimiser, total_iters=1000)

    def training_step(self, inputs: dict[str, Tensor]) -> Tensor:
        inputs = {name: x.to(self.device) for name, x in inputs.items()}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss: Tensor = self.model(**inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.schedule.step()
        self.model.zero_grad()
        return loss.detach()


def main() -> None:
    course = Course(way="plain")
    way = course.options.way
    vocabulary, batch, length, width, layers, heads = course.sized(
        (1000, 4, 128, 384, 2, 6), (32000, 8, 1024, 2048, 16, 32), (16, 1, 8, 16, 2, 2)
    )
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=max(16, width * 8 // 3 // 8 * 8), num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 2), use_cache=False, pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    if way == "lora":
        model = with_adapters(model, rank=2 if course.size == "tiny" else 8)
    if way == "checkpointing":
        model.gradient_checkpointing_enable()
    trainer = Trainer(model, course.device, autocast=way == "autocast")
    texts = torch.randint(vocabulary, (64, length))
    while course.goes_on():
        chosen = texts[torch.randint(len(texts), (batch,))]
        trainer.training_step({"input_ids": chosen, "attention_mask": torch.ones_like(chosen), "labels": chosen})


if __name__ == "__main__":
    main()
