"""Reads the layer of multi-token prediction out of a decoder's own checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.models.checkpoints.experts import by_expert
from rooftile.models.checkpoints.names import names_of
from rooftile.models.checkpoints.quantised import CACHE_SCALES, take_module
from rooftile.models.checkpoints.stored import StoredTensor
from rooftile.models.checkpoints.weights import PLAIN, opened
from rooftile.models.config import ModelConfig
from rooftile.models.decoder import Decoder
from rooftile.models.drafts.mtp import MtpHead, MtpNames
from rooftile.models.projection import numbers_of
from rooftile.weights.files.folder import files_of, listed
from rooftile.weights.files.plan import Reader, plan_of

_MIMO = MtpNames(
    token_norm="token_layernorm", hidden_norm="hidden_layernorm", norm="final_layernorm", join="input_proj", shared=(),
    hidden_first=True, before_norm=True,
)  # fmt: skip
FAMILIES = {"deepseek_v3": MtpNames(), "glm4_moe": MtpNames(), "glm4_moe_lite": MtpNames(), "mimo": _MIMO}


class MtpPlan(NamedTuple):
    """A layer of multi-token prediction, before its weights are read.

    Args:
        folder: the checkpoint.
        config: the layer, as a model of one layer.
        names: the family's names.
        prefix: begins the names of its tensors, behind the decoder's prefix.
        there: how many such layers the checkpoint has; the first one is read.
    """

    folder: Path
    config: ModelConfig
    names: MtpNames
    prefix: str
    there: int

    @torch.inference_mode()
    def read(self, decoder: Decoder) -> MtpHead:
        """See `HeadPlan.read`; a projection that the checkpoint has quantised is dequantised."""
        head, reader = MtpHead(self.config, decoder, self.names), plan_of("auto", self.folder)
        with ExitStack() as stack:
            found = by_expert(self.stored(stack), self.config)
            for name, place in ((self.prefix + name, place) for name, place in head.tensors()):
                numbers = None if reader is None else self._dequantised(found, name, place, reader)
                if numbers is None:
                    self._check(found, name, tuple(place.shape))
                    numbers = found.pop(name).get_tensor()
                place.copy_(numbers)
            if found:
                raise self._refused(f"has {listed([one.name for one in found.values()])}", "no such layer of the family has that")
        return head

    def stored(self, stack: ExitStack) -> dict[str, StoredTensor]:
        """Opens the files, and returns the layer's tensors by their names behind the decoder's prefix."""
        names, found = names_of(self.config), dict[str, StoredTensor]()
        shared = tuple(f"{self.prefix}{name}" for name in self.names.shared)
        for path in files_of(self.folder):
            file = stack.enter_context(opened(path))
            for stored in (StoredTensor(file, name) for name in file.keys()):  # noqa: SIM118 a file cannot be iterated
                name = names.without_prefix(stored.name)
                if name.startswith(self.prefix) and name not in shared and not name.endswith(CACHE_SCALES):
                    found[name] = stored
        return found

    def _dequantised(self, found: dict[str, StoredTensor], name: str, place: Tensor, reader: Reader) -> Tensor | None:
        """Takes a weight that is quantised out of the stored tensors, and returns its numbers; None for a plain tensor."""
        module, _, last = name.rpartition(".")
        is_plain = name in found and found[name].dtype() in PLAIN
        if is_plain or last != "weight" or place.ndim != 2 or not reader.covers(module):
            return None
        tensors = {suffix: one.get_tensor() for suffix, one in take_module(found, module, reader).items()}
        rows, columns = place.shape
        return numbers_of(reader.read(module, tensors, (rows, columns)), place.dtype)

    def _check(self, found: dict[str, StoredTensor], name: str, shape: tuple[int, ...]) -> None:
        if name not in found:
            raise self._refused(f"lacks {name}", "download it again")
        stored = found[name]
        if stored.dtype() not in PLAIN:
            raise self._refused(f"has {stored.name} in {stored.dtype()}, and its config.json names no quantisation", "correct it")
        if stored.shape() != shape:
            raise self._refused(f"has {stored.name} of the shape {stored.shape()}", f"must be {shape}")

    def _refused(self, what: str, due: str) -> InvalidInput:
        return InvalidInput(f'speculative has the method "mtp", and {self.folder} {what}; {due}, or leave speculative out')


def plan_mtp(folder: Path, target: ModelConfig) -> MtpPlan:
    """Checks that a checkpoint has a layer of multi-token prediction that can be read.

    Raises:
        InvalidInput: it has no such layer.
        Unsupported: the decoder is of a family whose layers are not read.
    """
    names = FAMILIES.get(target.family)
    if names is None:
        raise Unsupported(
            f'speculative has the method "mtp", and {folder} is of the family {target.family}; layers of MTP are read from '
            f"{', '.join(FAMILIES)}: leave speculative out, or draft otherwise"
        )
    config = replace(
        target, layers=1, windows=target.windows[-1:], mixers=target.mixers[-1:], feed_forwards=target.feed_forwards[-1:],
        experts=target.experts if target.feed_forwards[-1] == "experts" else None, mtp_layers=0,
    )  # fmt: skip
    prefix = "mtp_layers.0." if target.family == "mimo" else f"layers.{target.layers}."
    plan = MtpPlan(folder, config, names, prefix, target.mtp_layers)
    with ExitStack() as stack:
        if not target.mtp_layers or not plan.stored(stack):
            raise InvalidInput(
                f'speculative has the method "mtp", and {folder} has no layers of MTP (num_nextn_predict_layers '
                f"{target.mtp_layers}, no {prefix}*): give a checkpoint that has them, or draft otherwise"
            )
    return plan
