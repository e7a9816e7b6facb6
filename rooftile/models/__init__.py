"""Decoders loaded from Hugging Face checkpoint folders: one module for all families, which differ only in configuration;
and a small one to train."""

from typing import TYPE_CHECKING

from rooftile.models.config import ModelConfig
from rooftile.models.decoder import Decoder
from rooftile.models.layers import Attend
from rooftile.models.mixers import NativeSparseSizes

if TYPE_CHECKING:
    from rooftile.models.trainable import TrainableDecoder

__all__ = ["Attend", "Decoder", "ModelConfig", "NativeSparseSizes", "TrainableDecoder"]


def __getattr__(name: str) -> object:
    # it imports the modules of approximate methods, which serving does not need
    if name == "TrainableDecoder":
        from rooftile.models import trainable

        return trainable.TrainableDecoder
    raise AttributeError(f"module 'rooftile.models' has no attribute {name!r}")
