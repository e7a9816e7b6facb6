"""Decoders loaded from Hugging Face checkpoint folders: one module for all families, which differ only in configuration."""

from rooftile.models.config import ModelConfig
from rooftile.models.decoder import Decoder
from rooftile.models.layers import Attend
from rooftile.models.mixers import NativeSparseSizes

__all__ = ["Attend", "Decoder", "ModelConfig", "NativeSparseSizes"]
