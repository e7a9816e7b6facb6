"""Calibrates Loki for a model: runs it on a text, and fits a rotation to the keys of each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rooftile.approximate import Loki, LokiLayers
from rooftile.approximate.chosen_arguments import check_fraction
from rooftile.approximate.loki.definition import directions
from rooftile.engine.mixers.exact.masks import masks_of
from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact.api import attention_packed
from rooftile.fused.rope import Rotation, rotate
from rooftile.models import Decoder

# numbers of the weights that a calibration keeps, to know its model again
SAMPLE = 64


@torch.inference_mode()
def calibrate(
    decoder: Decoder, tokens: Sequence[int], *, dims: float = 0.25, keep: float = 0.25, length: int = 2048,
    say: Callable[[str], None] | None = None,
) -> LokiLayers:  # fmt: skip
    """Fits Loki to a model's keys on a text, with their rotary positions.

    Keys are not kept: of each layer only their sums and products are.

    Args:
        decoder: the model.
        tokens: the text, read in parts that begin at position 0; at least as many tokens as a head has dims.
        dims: share of the dimensions that choose.
        keep: share of the keys that are read.
        length: tokens per part.
        say: is told the progress.

    Raises:
        InvalidInput: the text is too short, or holds what is no token of the model.
        Unsupported: a layer of the model mixes its tokens in another way than by attention, or has sinks.
    """
    config = decoder.config
    other = next((mixer for mixer in config.mixers if mixer != "attention"), None)
    if other is not None:
        why = ", which choose keys by themselves" if other == "native_sparse" else ""
        raise Unsupported(f"the model has {other} layers{why}; Loki has attention in all layers")
    if config.sinks:
        raise Unsupported("the model has attention sinks, which Loki leaves out; calibrate a model without them")
    dims, keep = check_fraction("dims", dims), check_fraction("keep", keep)
    if len(tokens) < config.head_dim:
        raise InvalidInput(
            f"the text has {len(tokens):,} tokens; must have at least {config.head_dim}, the model's head dim, and better "
            "some thousands"
        )
    if min(tokens) < 0 or max(tokens) >= config.vocab_size:
        raise InvalidInput(f"the text has tokens from {min(tokens)} to {max(tokens)}; the model has 0 to {config.vocab_size - 1}")
    # `length` beyond the table of rotary positions would read outside of it
    length = max(min(length, config.max_len if decoder.rotary is None else len(decoder.rotary)), 1)
    moments = [Moments(config.kv_heads, config.head_dim, decoder.embedding.device) for _ in range(config.layers)]
    for start in range(0, len(tokens), length):
        if say is not None:
            say(f"{start:,} of {len(tokens):,} tokens")
        _read(decoder, tokens[start : start + length], moments)
    lokis, variances = [], []
    for n, one in enumerate(moments):
        covariance = one.covariance()
        if not covariance.isfinite().all():
            raise InvalidInput(f"the keys of layer {n} have NaN or infinite values; must be finite: try another dtype")
        p = directions(covariance)
        variances.append(torch.einsum("hdc,hde,hec->hc", p, covariance, p).float().cpu())
        lokis.append(Loki(p.float().cpu(), dims, keep, True, f"{config.family}, layer {n}"))
    return LokiLayers(lokis, sample=sample_of(decoder), variances=torch.stack(variances))


class Moments:
    """The count, sum and products of vectors (n, heads, dim), in fp64."""

    def __init__(self, heads: int, dim: int, device: torch.device) -> None:
        self.count = 0
        self.total = torch.zeros(heads, dim, dtype=torch.float64, device=device)
        self.products = torch.zeros(heads, dim, dim, dtype=torch.float64, device=device)

    def add(self, x: Tensor) -> None:
        """Adds vectors (n, heads, dim)."""
        x = x.double()
        self.count += len(x)
        self.total += x.sum(0)
        self.products += torch.einsum("nhd,nhe->hde", x, x)

    def covariance(self) -> Tensor:
        """Returns the covariance per head, (heads, dim, dim)."""
        mean = self.total / self.count
        return (self.products - self.count * mean[:, :, None] * mean[:, None]) / max(self.count - 1, 1)


def sample_of(decoder: Decoder) -> Tensor:
    """Returns some weights of the first layer's projection, by which a calibration knows its model again."""
    weight = decoder.layers[0].reader.dequantised().flatten()
    step = max(len(weight) // SAMPLE, 1)
    return weight[::step][:SAMPLE].float().cpu()


def _read(decoder: Decoder, tokens: Sequence[int], moments: list[Moments]) -> None:
    """Runs the model on one sequence, and adds the keys of each layer."""
    config, device = decoder.config, decoder.embedding.device
    ids = torch.tensor(tokens, device=device)
    cu, masks = torch.tensor([0, len(ids)]), masks_of(config)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, *more: Tensor) -> Tensor:
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        moments[layer].add(k)
        return attention_packed(q, k, v, cu, cu, masks[layer], scale=config.scale, softcap=config.softcap)

    decoder(ids, torch.arange(len(ids), device=device), attend)
