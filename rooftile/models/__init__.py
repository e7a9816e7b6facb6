"""Decoders loaded from Hugging Face checkpoint folders: one module for all families, which differ only in configuration;
and a small one to train.

    config.json -> config, families -> decoder (layers, mixers) <- checkpoints <- tensors of the folder
    tokens -> embedding -> layers: norm, projection, the caller's mixing, feed-forward -> norm -> hidden states -> logits

config          `ModelConfig`; `families` has an entry for each architecture
decoder         `Decoder`
drafts          layers that draft for a decoder: heads of EAGLE-3, and a checkpoint's own of multi-token prediction
encoders        `Encoder`: BERT, XLM-R, ModernBERT
delta           layers with a gated delta net
latent          layers with multi-head latent attention
layers          a layer, `Attend`: what the caller brings to mix tokens
placement       `Placement`: where tensors are, and which part of a model that several ranks share; `parts` has its sizes
projection      projections and norms
feed_forward    what follows: dense, or in `experts`
layer_kinds     the class of each kind of layer: `attention_layer`, and in `linear`, `mamba`, `delta` and `latent`
mixers          how a layer mixes its tokens: attention, Native Sparse Attention, a recurrence
mamba           layers of Mamba-1 and Mamba-2
linear          layers of linear attention and Performer
hybrid          config.json of our own family, with any mixer in any layer
positions       windows and positions by layer; `rotary` has the wavelengths
checkpoints     from and to files
trainable       `TrainableDecoder`; `mixing_modules` has its mixers
"""

from typing import TYPE_CHECKING

from rooftile.runtime.late_names import late_names

if TYPE_CHECKING:
    from rooftile.models.config import ModelConfig
    from rooftile.models.decoder import Decoder
    from rooftile.models.delta.sizes import DeltaSizes
    from rooftile.models.encoders.encoder import Encoder
    from rooftile.models.encoders.sizes import EncoderSizes, HeadSizes
    from rooftile.models.experts.sizes import ExpertSizes
    from rooftile.models.latent.sizes import LatentSizes
    from rooftile.models.layers import Attend
    from rooftile.models.linear.sizes import LinearSizes, PerformerSizes
    from rooftile.models.mamba.sizes import Mamba2Sizes, MambaSizes
    from rooftile.models.mixers import NativeSparseSizes
    from rooftile.models.trainable import TrainableDecoder

__all__ = [
    "Attend", "Decoder", "DeltaSizes", "Encoder", "EncoderSizes", "ExpertSizes", "HeadSizes", "LatentSizes", "LinearSizes",
    "Mamba2Sizes", "MambaSizes", "ModelConfig", "NativeSparseSizes", "PerformerSizes", "TrainableDecoder",
]  # fmt: skip

# late: the server's process reads a tokenizer's files without torch, and serving needs no modules of approximate methods
__getattr__ = late_names(
    "rooftile.models",
    {
        "Attend": "rooftile.models.layers", "Decoder": "rooftile.models.decoder", "ModelConfig": "rooftile.models.config",
        "DeltaSizes": "rooftile.models.delta.sizes", "LinearSizes": "rooftile.models.linear.sizes",
        "LatentSizes": "rooftile.models.latent.sizes", "PerformerSizes": "rooftile.models.linear.sizes",
        "Encoder": "rooftile.models.encoders.encoder", "EncoderSizes": "rooftile.models.encoders.sizes",
        "HeadSizes": "rooftile.models.encoders.sizes", "ExpertSizes": "rooftile.models.experts.sizes",
        "Mamba2Sizes": "rooftile.models.mamba.sizes", "MambaSizes": "rooftile.models.mamba.sizes",
        "NativeSparseSizes": "rooftile.models.mixers", "TrainableDecoder": "rooftile.models.trainable",
    },
)  # fmt: skip


def __dir__() -> list[str]:
    """Returns the public names."""
    return sorted(__all__)
