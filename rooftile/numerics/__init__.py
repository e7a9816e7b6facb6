"""Quantisation: number formats with 8 bits or fewer, scales, and fake quantisation."""

from rooftile.numerics.block_floating import BLOCK_FORMATS, BlockScaled, quantise_blocks
from rooftile.numerics.fake_quant import fake_quantise
from rooftile.numerics.formats import FORMATS, Format, decode, encode
from rooftile.numerics.hadamard import hadamard, inverse_hadamard, signs_of
from rooftile.numerics.quantised_rows import ROW_FORMATS, QuantisedRows, quantise_rows
from rooftile.numerics.recipe import QuantisedQKV, quantise_qkv
from rooftile.numerics.scaling import BLOCK, GRANULARITIES, Granularity, Scaled, quantise
from rooftile.numerics.two_level import TwoLevelScaled, quantise_nvfp4

__all__ = [
    "BLOCK", "BLOCK_FORMATS", "FORMATS", "GRANULARITIES", "ROW_FORMATS", "BlockScaled", "Format", "Granularity", "QuantisedQKV",
    "QuantisedRows", "Scaled", "TwoLevelScaled", "decode", "encode", "fake_quantise", "hadamard", "inverse_hadamard", "quantise",
    "quantise_blocks", "quantise_nvfp4", "quantise_qkv", "quantise_rows", "signs_of",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Accepts American spellings."""
    british = name.replace("quantize", "quantise")
    if british in __all__:
        return globals()[british]
    raise AttributeError(f"module 'rooftile.numerics' has no attribute {name!r}")
