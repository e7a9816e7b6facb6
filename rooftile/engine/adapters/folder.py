"""Reads a folder of PEFT: adapter_config.json and adapter_model.safetensors, checked whole before anything is kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.engine.adapters.peft_config import FILE, PeftConfig
from rooftile.engine.adapters.targets import Target, Targets
from rooftile.errors import InvalidInput, Unsupported
from rooftile.runtime.dtypes import dtype_word

WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
_PREFIX = "base_model.model."
_SIDES = {".lora_A.weight": 0, ".lora_B.weight": 1}
# tensors of what is not computed, by a word of their names
_REFUSED = {
    "lora_magnitude_vector": "DoRA, which scales the rows of the merged weight, is not computed",
    "lora_embedding": "embeddings cannot change with a request",
    "modules_to_save": "whole modules cannot change with a request",
    "lora_B.bias": "biases of adapters are not added",
    "embed_tokens": "embeddings cannot change with a request",
    "lm_head": "the output head cannot change with a request",
}
_FLOATS = ("F64", "F32", "BF16", "F16")


class Update(NamedTuple):
    """The matrices of one module: A (r, in) and B (out, r), which is multiplied by the scale already."""

    a: Tensor
    b: Tensor


class Adapter(NamedTuple):
    """An adapter in memory.

    Args:
        path: its folder.
        updates: the targets, and the matrices of each.
        rank: the largest rank.
    """

    path: Path
    updates: Sequence[tuple[Target, Update]]
    rank: int


def read_adapter(path: str | Path, targets: Targets, most_rank: int) -> Adapter:
    """Reads an adapter.

    Args:
        path: the folder that PEFT's save_pretrained has written.
        targets: the modules of the model.
        most_rank: the largest rank that there is room for.

    Raises:
        InvalidInput: the folder has no adapter, or one that does not fit the model; the sentence says why.
        Unsupported: the adapter has what is not computed.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InvalidInput(f"{folder} is not a folder; give one of an adapter, with {FILE} and {WEIGHTS}")
    config = PeftConfig.of(folder)
    file = folder / WEIGHTS
    if not file.is_file():
        if (folder / PICKLE).is_file():
            raise InvalidInput(
                f"{folder} has {PICKLE}, a pickle, which can run any code; only safetensors are read: save it again with "
                "save_pretrained(folder, safe_serialization=True)"
            )
        raise InvalidInput(f"{folder} has no {WEIGHTS}; give the folder of an adapter that peft's save_pretrained has written")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt", device="cpu") as tensors:
            return _read(folder, tensors, config, targets, most_rank)
    except (SafetensorError, OSError) as error:
        raise InvalidInput(f"{file} cannot be read: {error}; save the adapter again") from None


def _read(folder: Path, tensors: Any, config: PeftConfig, targets: Targets, most_rank: int) -> Adapter:
    names: dict[str, list[str | None]] = {}
    for name in tensors.keys():  # noqa: SIM118  (an open file is no dictionary)
        module, side = _parsed(folder, name)
        names.setdefault(module, [None, None])[side] = name
    if not names:
        raise InvalidInput(f"{folder / WEIGHTS} has no tensors; save the adapter again")
    rank = max(config.rank_of(module) for module in names)
    if rank > most_rank:
        raise InvalidInput(f"{folder} has a rank of {rank}, and there is room for {most_rank}: make max_adapter_rank larger")
    # all shapes before the first tensor is read
    found = {module: _target(folder, tensors, config, targets, module, pair) for module, pair in names.items()}
    if len({(each.place, each.part) for each in found.values()}) < len(found):
        raise InvalidInput(f"{folder / WEIGHTS} has two parts for one module, under two names; save the adapter again")
    updates = []
    for module, (a, b) in names.items():
        first, second = tensors.get_tensor(a), tensors.get_tensor(b)
        # in fp32 at least: the product is rounded once, to the model's dtype
        scaled = second.to(torch.promote_types(second.dtype, torch.float32)) * config.scale_of(module)
        for name, stored, held in ((a, first, first), (b, second, scaled)):
            if not stored.isfinite().all():
                raise InvalidInput(f"{name} in {folder / WEIGHTS} has NaN or infinity; train the adapter again")
            if not held.to(targets.dtype).isfinite().all():
                raise InvalidInput(
                    f"{name} in {folder / WEIGHTS} has numbers that {dtype_word(targets.dtype)}, the model's dtype, cannot hold: "
                    "train the adapter again, or give the model another dtype"
                )
        updates.append((found[module], Update(first, scaled)))
    return Adapter(folder, updates, rank)


def _parsed(folder: Path, name: str) -> tuple[str, int]:
    """Returns the module of a tensor in Transformers' names, and whether the tensor is A (0) or B (1)."""
    for word, why in _REFUSED.items():
        if word in name:
            raise Unsupported(f"{folder / WEIGHTS} has {_said(name)}; {why}: merge it with peft, model.merge_and_unload()")
    for end, side in _SIDES.items():
        if name.endswith(end) and name.startswith(_PREFIX):
            return name[len(_PREFIX) : -len(end)], side
    raise InvalidInput(f"{folder / WEIGHTS} has {_said(name)}, which is no part of an adapter in peft's names; save it with peft")


def _target(
    folder: Path, tensors: Any, config: PeftConfig, targets: Targets, module: str, pair: list[str | None]
) -> Target:  # fmt: skip
    """Returns the target of a module whose tensors fit it."""
    if None in pair:
        there, lacks = ("lora_A", "lora_B") if pair[1] is None else ("lora_B", "lora_A")
        raise InvalidInput(f"{folder / WEIGHTS} has {there} of {_said(module)} and no {lacks}; save the adapter again")
    target = targets.find(module)
    if target is None:
        raise InvalidInput(
            f"{folder} has a part for {_said(module)}, and the model ({targets.family}, {targets.ends()}) has no such "
            "module: give an adapter of this model"
        )
    rank = config.rank_of(module)
    for name, due in zip(pair, ((rank, target.inputs), (target.rows, rank)), strict=True):
        view = tensors.get_slice(name)
        shape, dtype = tuple(view.get_shape()), str(view.get_dtype())
        if shape != due:
            raise InvalidInput(
                f"{name} in {folder / WEIGHTS} is {shape}; this model and a rank of {rank} ({FILE}) need {due}: give an adapter "
                "of this model"
            )
        if dtype not in _FLOATS:
            raise InvalidInput(f"{name} in {folder / WEIGHTS} is {dtype}; must be one of {', '.join(_FLOATS)}")
    return target


def _said(name: str) -> str:
    """Returns a name of a file's tensor for a sentence: a hostile one may be long, or hold what a terminal obeys."""
    return name[:120] if name.isprintable() else repr(name[:120])
