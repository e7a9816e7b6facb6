"""Nats per byte that a small Llama loses by the format of its weights, on held-out English: one row for each format.

    llama-SEEDS    trained in fp32 from several seeds, on a CPU in about two minutes each; of each seed the difference counts

`above_nats` is the mean over seeds of nats per byte above fp32's, `low` and `high` are the least and the most of any seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from rooftile.cost.session import Session
from rooftile_lab.bench.learning.english import BYTES, English
from rooftile_lab.bench.needed import needed
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import figures, measured, timed_row
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.weighing import Weighed, weigh

# seeds, steps, batch, length, pieces of held-out text
CASES = {"llama-3": (3, 400, 8, 256, 64), "tiny-1": (1, 20, 2, 32, 2)}
GPU = ("llama-3",)
CPU = ("llama-3", "tiny-1")
QUICK = GPU


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each format."""
    for name in names:
        seeds, steps, batch, length, pieces = CASES[name]
        text = English.read(session.device)
        found: list[list[Weighed]] = []
        for seed in range(seeds):
            say(f"{name}: training, seed {seed + 1} of {seeds}")
            model = trained(text, seed, steps, batch, length, small=name.startswith("tiny"))
            found.append(weigh(model, *text.tests(pieces, length)))
        yield from rows_of(session, name, found)


def rows_of(session: Session, name: str, found: Sequence[Sequence[Weighed]]) -> Iterator[Row]:
    """The rows of all formats, from what each seed's model weighs; the first of each is the model as it was trained."""
    for each in zip(*found, strict=True):
        above = [one.nats - seed[0].nats for one, seed in zip(each, found, strict=True)]
        spreads = measured({"above_nats": above, "nats": [one.nats for one in each]})
        spreads["measures"]["above_nats"] = figures(mean(above))
        spreads["measures"]["projection_bytes"] = each[0].nbytes
        yield timed_row(
            session, [], dtype=session.dtype, suite="quality", case=name, backend=each[0].format, phase="fwd",
            problem="nats per byte of held-out English", settings={"seeds": len(each)}, **spreads,
        )  # fmt: skip


def trained(text: English, seed: int, steps: int, batch: int, length: int, *, small: bool = False) -> Any:
    """A Llama of Transformers with the shape of the report's, trained on bytes."""
    transformers = needed("quality", "transformers")
    hidden, width, heads = (64, 128, 2) if small else (192, 512, 6)
    torch.manual_seed(seed)
    words: dict[str, Any] = {
        "vocab_size": BYTES, "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": heads // 2, "max_position_embeddings": 4 * length,
        "initializer_range": hidden**-0.5, "bos_token_id": None, "eos_token_id": None, "attn_implementation": "sdpa",
    }  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**words))
    model = model.to(text.train.device).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens, targets = text.draw(batch, length, generator)
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
    return model
