"""Makes the inputs of a small model, by the names of its forward's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BATCH, LENGTH, TARGETS = 2, 13, 11
# ids below are those of padding, images and other special tokens
FIRST_TOKEN, SAMPLES = 12, 4000
# frames, height and width in patches of two images
GRID = torch.tensor([[1, 4, 4], [1, 4, 8]])


def inputs_of(model: Any, given: dict[str, Any], beside: bool) -> dict[str, Tensor]:
    """Returns the main input of a model, and what its forward asks for beside it.

    Args:
        model: a model of Transformers.
        given: arguments that no rule can make.
        beside: give it images, sounds and texts as well, where it takes them.
    """
    torch.manual_seed(3)
    accepted = inspect.signature(model.forward).parameters
    required = [n for n, p in accepted.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    names = dict.fromkeys([model.main_input_name, *required, *(name for name in _ALWAYS if name in accepted)])
    if model.config.is_encoder_decoder and "decoder_input_ids" in accepted:
        names["decoder_input_ids"] = None
    if beside:
        names |= dict.fromkeys(name for name in accepted if name in _MAKERS and name != "inputs_embeds")
    made = {name: _MAKERS[name](model.config) for name in names if name in _MAKERS and name not in given}
    return made | {name: make(model.config) if callable(make) else make for name, make in given.items()}


def _tokens(length: int) -> Callable[[Any], Tensor]:
    def make(config: Any) -> Tensor:
        size = getattr(config.get_text_config(), "vocab_size", None) or 64
        return torch.randint(FIRST_TOKEN, max(min(size, 64), FIRST_TOKEN + 2), (BATCH, length))

    return make


def _of(config: Any, *names: str, default: Any) -> Any:
    """Returns the first of these attributes that a configuration or one of its parts has."""
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    found = (getattr(part, name, None) for part in parts for name in names)
    value = next((value for value in found if value), default)
    return value[0] if isinstance(value, list | tuple) and not isinstance(default, tuple) else value


def _image(config: Any) -> Tensor:
    size = _of(config, "image_size", "img_size", "input_size", default=32)
    return torch.randn(BATCH, _of(config, "num_channels", "in_channels", "in_chans", default=3), size, size)


def _hidden(config: Any) -> Tensor:
    if hasattr(config, "spatial_merge_size"):
        # the flat patches of images of several sizes
        patch = _of(config, "patch_size", default=8) ** 2 * _of(config, "temporal_patch_size", default=1)
        return torch.randn(int(GRID.prod(1).sum()), patch * _of(config, "in_channels", "in_chans", "num_channels", default=3))
    return torch.randn(BATCH, LENGTH, _of(config, "hidden_size", "d_model", default=32))


def _video(config: Any) -> Tensor:
    image = _image(config)
    return image[:, None].expand(-1, _of(config, "num_frames", default=2), -1, -1, -1).clone()


def _features(config: Any) -> Tensor:
    bins = _of(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "feature_dim", default=80)
    frames = 2 * _of(config, "max_source_positions", default=32)
    return torch.randn(BATCH, min(frames, 64), bins)


def _boxes(config: Any) -> Tensor:
    corner = torch.randint(0, 20, (BATCH, LENGTH, 2))
    return torch.cat([corner, corner + 5], dim=-1)


_ALWAYS = ("bbox",)
_MAKERS: dict[str, Callable[[Any], Tensor]] = {
    "input_ids": _tokens(LENGTH),
    "decoder_input_ids": _tokens(TARGETS),
    "inputs_embeds": lambda config: torch.randn(BATCH, LENGTH, _of(config.get_text_config(), "hidden_size", default=32)),
    "hidden_states": _hidden,
    "pixel_values": _image,
    "pixel_values_videos": _video,
    "input_values": lambda config: torch.randn(BATCH, SAMPLES),
    "input_features": _features,
    "bbox": _boxes,
    "grid_thw": lambda config: GRID.clone(),
    "input_features_mask": lambda config: torch.ones(_features(config).shape[:1] + _features(config).shape[-1:]).long(),
    "query_embeds": lambda config: torch.randn(BATCH, LENGTH, _of(config, "hidden_size", default=32)),
}
