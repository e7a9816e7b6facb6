"""The methods of the study, each as the mixer of a small decoder, and decoders with equally many parameters.

Each approximate method may read about a quarter of a text of `length` tokens, or hold a state of fixed size. Reformer and Routing
run in their strict form, because a model of English that may look ahead, if only to choose keys, is not compared fairly.

Mamba-2 and the gated delta net keep a state in all layers. The hybrid has Mamba-2, and attention in every second layer: in two of
four.
"""

from __future__ import annotations

from typing import Any

import torch

from rooftile.errors import InvalidInput
from rooftile.models import TrainableDecoder

EXACT, HYBRID = "exact", "hybrid"
# without a causal form: it can answer questions, but not predict the next byte
NOT_CAUSAL = ("linformer",)
METHODS = (
    EXACT, "linear", "performer", "linformer", "strided", "fixed", "reformer", "routing", "native_sparse", "mamba2", "delta",
    HYBRID,
)  # fmt: skip


def mixer_of(method: str, length: int, hidden: int = 64) -> dict[str, Any]:
    """The mixer of a method in a decoder of width `hidden` and of texts of `length` tokens, a power of two of at least 32.

    Raises:
        InvalidInput: there is no such method, or the length is another.
    """
    if length < 32 or length & (length - 1):
        raise InvalidInput(f"length is {length}; must be a power of two of at least 32, from which all methods' sizes follow")
    eighth, sixteenth, heads = length // 8, length // 16, max(hidden // 32, 1)
    found: dict[str, dict[str, Any]] = {
        EXACT: {"name": "attention"},
        "linear": {"name": "linear"},
        "performer": {"name": "performer", "m": 128},
        "linformer": {"name": "linformer", "length": length, "r": length // 4},
        "strided": {"name": "sparse_transformer", "stride": eighth, "pattern": "strided"},
        "fixed": {"name": "sparse_transformer", "stride": eighth, "pattern": "fixed", "summary": 2},
        "reformer": {"name": "reformer", "chunk": eighth, "rounds": 2, "buckets": 16, "strict": True},
        "routing": {"name": "routing", "clusters": 4, "strict": True},
        # 4 blocks of a sixteenth, a window, and the compressed keys; the paper's compression is an MLP with more parameters
        "native_sparse": {
            "name": "native_sparse", "block_size": sixteenth, "length": sixteenth // 2, "stride": max(sixteenth // 4, 1),
            "count": 4, "window": eighth, "compression": "linear",
        },
        "mamba2": {"name": "mamba2", "head_dim": 16, "state_size": 32},
        # keys and values as wide as the decoder
        "delta": {"name": "delta", "key_heads": heads, "value_heads": heads, "key_dim": 32, "value_dim": 32},
    }  # fmt: skip
    if method not in found:
        raise InvalidInput(f"there is no method {method!r}; has {', '.join(METHODS)}")
    return found[method]


def mixers_of(method: str, length: int, layers: int, hidden: int = 64) -> list[dict[str, Any]]:
    """The mixer of each layer: of a method in all of them, or of the hybrid, whose last layer attends."""
    if method != HYBRID:
        return [mixer_of(method, length, hidden)] * layers
    return [mixer_of(EXACT if (layers - n) % 2 else "mamba2", length) for n in range(layers)]


def decoder_of(
    method: str, vocab_size: int, *, heads: int, hidden: int, layers: int, length: int, seed: int = 0
) -> TrainableDecoder:
    """A decoder with random weights; its feed-forward is as wide as leaves it the parameters of the exact one, to a row."""
    sizes: dict[str, Any] = {
        "heads": heads, "kv_heads": max(heads // 2, 1), "hidden": hidden, "layers": layers, "max_len": length,
    }  # fmt: skip
    exact_ffn = 2 * hidden

    def made(name: str, ffn: int) -> TrainableDecoder:
        torch.manual_seed(seed)
        return TrainableDecoder(vocab_size, ffn=ffn, mixers=mixers_of(name, length, layers, hidden), **sizes)

    with torch.random.fork_rng(devices=[]):
        due = made(EXACT, exact_ffn).parameter_count
        surplus = made(method, exact_ffn).parameter_count - due
        # a column more of gate, up and down in each layer
        ffn = exact_ffn - round(surplus / (3 * hidden * layers))
        if ffn < 1:
            more = f"{method} has {surplus:,} parameters more than exact attention, which has {due:,}"
            raise InvalidInput(f"{more}; give a larger hidden")
        return made(method, ffn)
