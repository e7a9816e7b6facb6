"""Decoders that are loaded from checkpoint folders of Hugging Face: one module, many families by configuration."""

from rooftile.models.config import ModelConfig
from rooftile.models.decoder import Decoder
from rooftile.models.layers import Attend

__all__ = ["Attend", "Decoder", "ModelConfig"]
