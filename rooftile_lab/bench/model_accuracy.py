"""Measures a checkpoint in each format of weights: bytes, nats per token of a text, and the largest change of a logit.

A format's model reads the same pieces of the text as the model in its own dtype, by its own products: what is measured is what
`rooftile.LLM(folder, weights=format)` serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput
from rooftile.exact.api import attention
from rooftile.exact.masks import CAUSAL, Window
from rooftile.fused.rope import Rotation, rotate
from rooftile.models import Decoder
from rooftile.weights import QuantisedWeight
from rooftile.weights.files.formats import SPARSE, check_word
from rooftile.weights.files.methods import section_of
from rooftile.weights.two_four import TwoFour
from rooftile_lab.bench.weighing import tokens_per_second

FORMATS = ("fp8", "fp8_tile", "int8", "w8", "int4", "int4:32", "int4:row", "mxfp8", "mxfp4", "nvfp4", SPARSE)
# rows whose logits are in memory at once
AT_ONCE = 256
_BYTES = 256

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """One format of a model.

    Args:
        format: a word of `rooftile.quantise_weight`, "2:4", or the model's own dtype.
        nbytes: of all weights; None where the format does not fit the model.
        nats: per token of the text.
        above: nats per token above the model in its own dtype.
        largest_change: of a logit.
        tokens_s: tokens per second of one greedy answer, on a GPU.
        reason: why the format does not fit.
    """

    format: str
    nbytes: int | None = None
    nats: float | None = None
    above: float | None = None
    largest_change: float | None = None
    tokens_s: float | None = None
    reason: str = ""


def measure(
    folder: Path, text: str, device: torch.device, *, formats: Sequence[str] = FORMATS, length: int = 512, pieces: int = 8,
    say: Say = lambda words: None,
) -> list[Accuracy]:  # fmt: skip
    """Measures a checkpoint in its own dtype, and then in each format.

    Args:
        folder: a checkpoint in 16 or 32 bits.
        text: what is read; a checkpoint without a tokenizer and with 256 tokens reads bytes.
        device: where.
        formats: words of `rooftile.quantise_weight`, and "2:4".
        length: tokens of a piece, at most.
        pieces: how many, from the start of the text.
        say: is told the progress.

    Raises:
        InvalidInput: the checkpoint is quantised already or not read here, a word is none, or the text is too short.
    """
    for word in formats:
        check_word(word)
    if section_of(folder):
        raise InvalidInput(f"the checkpoint {folder} is quantised already; give the one in 16 bits")
    say("the model as it is")
    plain = Decoder.from_folder(folder, device=device)
    if set(plain.config.mixers) != {"attention"}:
        raise InvalidInput("the model has layers without exact attention; formats are compared on models of attention alone")
    tokens = tokens_of(folder, text, plain.config.vocab_size, min(length, plain.config.max_len), pieces).to(device)
    dtype = str(plain.embedding.dtype).removeprefix("torch.")
    with torch.inference_mode():
        read = [hidden_states(plain, piece[:-1]) for piece in tokens]
        nats, _ = compared(plain, tokens, read, read, plain)
        found = [Accuracy(format=dtype, nbytes=bytes_of(plain), nats=nats, above=0.0, largest_change=0.0)]
        for n, word in enumerate(formats, 1):
            say(f"{word}, format {n} of {len(formats)}")
            found.append(_in_format(folder, word, tokens, read, nats, plain))
    del plain
    if device.type != "cuda":
        return found
    return [_timed(one, folder, "auto" if n == 0 else one.format, device, say) for n, one in enumerate(found)]


def _in_format(folder: Path, word: str, tokens: Tensor, read: Sequence[Tensor], nats: float, plain: Decoder) -> Accuracy:
    try:
        decoder = Decoder.from_folder(folder, device=tokens.device, weights=word)
    except InvalidInput as error:
        return Accuracy(format=word, reason=str(error))
    own = [hidden_states(decoder, piece[:-1]) for piece in tokens]
    mine, largest = compared(decoder, tokens, own, read, plain)
    return Accuracy(format=word, nbytes=bytes_of(decoder), nats=mine, above=mine - nats, largest_change=largest)


def _timed(one: Accuracy, folder: Path, word: str, device: torch.device, say: Say) -> Accuracy:
    if one.reason:
        return one
    say(f"an answer with weights in {one.format}")
    return replace(one, tokens_s=tokens_per_second(folder, word, str(device)))


def tokens_of(folder: Path, text: str, vocabulary: int, length: int, pieces: int) -> Tensor:
    """Returns the first pieces of a text: (pieces, length + 1), fewer or one shorter where the text ends."""
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    if has_tokenizer:
        ids = torch.tensor(Tokenizer.from_folder(folder).encode(text))
    elif vocabulary == _BYTES:
        ids = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    else:
        raise InvalidInput(
            f"{folder} has no tokenizer and {vocabulary} tokens, so the text cannot be read; add tokenizer.json to the folder"
        )
    if len(ids) < 2:
        raise InvalidInput(f"the text has {len(ids)} tokens; must have 2 or more, since each is predicted from those before it")
    whole = (len(ids) - 1) // length
    if not whole:
        return ids[None]
    return torch.stack([ids[n * length : (n + 1) * length + 1] for n in range(min(whole, pieces))])


def hidden_states(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Returns the hidden states (tokens, hidden) of one sequence."""
    config = decoder.config

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, *more: Tensor) -> Tensor:
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        window = config.windows[layer]
        mask = CAUSAL if window is None else CAUSAL & Window(window - 1)
        o = attention(q[None], k[None], v[None], mask, scale=config.scale, softcap=config.softcap)
        return o[0]

    return decoder(tokens, torch.arange(len(tokens), device=tokens.device), attend)  # type: ignore[no-any-return]


def compared(
    decoder: Decoder, tokens: Tensor, own: Sequence[Tensor], read: Sequence[Tensor], plain: Decoder
) -> tuple[float, float]:  # fmt: skip
    """Returns the nats per token of hidden states, and the largest difference of their logits from the logits of `read`."""
    total, largest = 0.0, 0.0
    for piece, mine, theirs in zip(tokens, own, read, strict=True):
        for targets, rows, others in zip(piece[1:].split(AT_ONCE), mine.split(AT_ONCE), theirs.split(AT_ONCE), strict=True):
            logits = decoder.logits(rows).float()
            total += functional.cross_entropy(logits, targets, reduction="sum").item()
            largest = max(largest, (logits - plain.logits(others).float()).abs().max().item())
    return total / tokens[:, 1:].numel(), largest


def bytes_of(decoder: Decoder) -> int:
    """Returns the bytes of all weights, each counted once."""
    plain = {id(x): x.nbytes for x in decoder.parameters()}
    for module in decoder.modules():
        parts = getattr(module, "parts", ())
        plain |= {id(part): part.nbytes for part in parts if isinstance(part, QuantisedWeight | TwoFour | Tensor)}
    return sum(plain.values())
