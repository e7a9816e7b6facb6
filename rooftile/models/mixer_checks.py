"""Checks that the mixers of a configuration have their sizes, and go with what else it says."""

from __future__ import annotations

from typing import Any

from rooftile.errors import InvalidInput

# the configuration is made of what is imported here, so its type cannot be
ModelConfig = Any

# a downloaded file may ask for more memory than there is
MOST_NUMBERS = 1 << 40
# mixers whose sizes are attention's alone; only exact attention has windows
_WITHOUT_SIZES = ("attention", "native_sparse")


def check_mixers(config: ModelConfig) -> None:
    """Checks the mixers of all layers.

    Raises:
        InvalidInput: sizes are missing, or contradict another field.
    """
    _check_sizes(config)
    _check_latent(config)
    _check_native_sparse(config)


def _check_sizes(config: ModelConfig) -> None:
    for layer, (mixer, window) in enumerate(zip(config.mixers, config.windows, strict=True)):
        # a kind that was entered from outside has no field here
        if mixer in _WITHOUT_SIZES or not hasattr(config, mixer):
            continue
        if getattr(config, mixer) is None:
            raise InvalidInput(f"layer {layer} is {mixer}, and its sizes are None; must be {mixer.capitalize()}Sizes()")
        if window is not None:
            raise InvalidInput(
                f"layer {layer} is {mixer} and its window {window}; must be None: such a layer sees all tokens before"
            )
        if config.softcap is not None:
            raise InvalidInput(
                f"layer {layer} is {mixer} and softcap {config.softcap}; must be None: no kernel of it caps scores"
            )
        if config.sinks and mixer in ("linear", "performer"):
            raise InvalidInput(f"layer {layer} is {mixer} and the model has sinks; must have none: it has no softmax")


def _check_latent(config: ModelConfig) -> None:
    if "latent" not in config.mixers or config.latent is None:
        return
    layer, sizes = config.mixers.index("latent"), config.latent
    if config.query_growth is not None:
        raise InvalidInput(f"layer {layer} is latent and the model has growing queries; must have none")
    if config.head_dim != sizes.head_dim:
        raise InvalidInput(
            f"head_dim is {config.head_dim} and the latent sizes have {sizes.head_dim} numbers a head; must be alike"
        )
    if config.rotary is not None and config.rotary.dim != sizes.rotated:
        raise InvalidInput(f"rotary.dim is {config.rotary.dim} and the latent sizes rotate {sizes.rotated}; must be alike")


def _check_native_sparse(config: ModelConfig) -> None:
    sparse = [n for n, mixer in enumerate(config.mixers) if mixer == "native_sparse"]
    if not sparse:
        return
    if config.native_sparse is None:
        raise InvalidInput(f"layer {sparse[0]} is native_sparse, and its sizes are None; must be NativeSparseSizes()")
    if config.family in ("gpt2", "phi3"):
        raise InvalidInput(
            f"layer {sparse[0]} is native_sparse and the family {config.family}; must be one with a projection each, as llama"
        )
    without = {
        "a softcap": config.softcap is not None,
        "norms over all heads": config.qk_norm_of_all_heads,
        "sinks": config.sinks,
    }
    what = next((name for name, here in without.items() if here), None)
    if what is not None:
        raise InvalidInput(f"layer {sparse[0]} is native_sparse and the family {config.family} has {what}; must have none")
    window = next((n for n in sparse if config.windows[n] is not None), None)
    if window is not None:
        raise InvalidInput(f"layer {window} is native_sparse and has a window of its own; must have None: one branch has one")
    sizes = config.native_sparse
    wide = 4 * config.head_dim if sizes.hidden is None else sizes.hidden
    if wide * sizes.length * config.head_dim > MOST_NUMBERS:
        raise InvalidInput(f"native_sparse maps {sizes.length:,} x {config.head_dim} numbers to {wide:,}; may be fewer")
