"""Adapters with random weights in PEFT's folders, and models into which they are merged by hand."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


def modules_of(model: nn.Module, targets: Sequence[str]) -> dict[str, nn.Module]:
    """The modules of Transformers' model whose names end with one of the targets."""
    return {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in targets}


def sizes_of(module: Any) -> tuple[int, int]:
    """The outputs and inputs of a linear module; GPT-2's keep their weights the other way round."""
    rows, columns = module.weight.shape
    return (rows, columns) if isinstance(module, nn.Linear) else (columns, rows)


def write_adapter(
    folder: Path, model: nn.Module, targets: Sequence[str], rank: int, *, seed: int = 0, alpha: float | None = None,
    strength: float = 0.2, ranks: Mapping[str, int] | None = None, alphas: Mapping[str, float] | None = None,
    rooted: bool = False, **config: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Writes an adapter, and returns what it adds to each module's weight (out, in) by the module's name."""
    generator = torch.Generator().manual_seed(seed)
    ranks, alphas, alpha = ranks or {}, alphas or {}, 2.0 * rank if alpha is None else alpha
    tensors, added = {}, {}
    for name, module in modules_of(model, targets).items():
        outputs, inputs = sizes_of(module)
        its = next((value for key, value in ranks.items() if re.match(rf"(.*\.)?({key})$", name)), rank)
        own = next((value for key, value in alphas.items() if re.match(rf"(.*\.)?({key})$", name)), alpha)
        a = torch.randn(its, inputs, generator=generator) / inputs**0.5
        b = torch.randn(outputs, its, generator=generator) * strength
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        added[name] = b @ a * (own / (its**0.5 if rooted else its))
    folder.mkdir(parents=True, exist_ok=True)
    written = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "use_rslora": rooted, "bias": "none",
        "target_modules": list(targets), "rank_pattern": dict(ranks), "alpha_pattern": dict(alphas), "use_dora": False,
        "modules_to_save": None, "init_lora_weights": True, **config,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(written))
    save_file(tensors, folder / "adapter_model.safetensors")
    return added


@torch.no_grad()
def merged(model: nn.Module, added: Mapping[str, Tensor], folder: Path) -> Path:
    """Saves a copy of a model with an adapter merged into its weights."""
    copied: Any = copy.deepcopy(model)
    for name, delta in added.items():
        module = copied.get_submodule(name)
        module.weight += delta if isinstance(module, nn.Linear) else delta.T
    copied.save_pretrained(folder)
    return folder
