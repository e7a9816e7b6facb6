"""Tokenizers of every kind, and by definition the text that an answer adds to its prompt's."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from tempfile import mkdtemp

from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, normalizers, pre_tokenizers

from rooftile.engine.text.tokenizer import BYTES, Tokenizer
from tests.engine.folders import KINDS as SAVED
from tests.engine.folders import SPECIAL, save

# beside the saved ones: sentencepiece without a space before a text (Gemma), and without bytes; words that end in </w> (CLIP)
KINDS = (*SAVED, "no_prefix", "no_bytes", "metaspace_first", "word_ends")
PIECES = [
    *"▁abcdefghijklmnopqrstuvwxyz.,!?'#\n", "▁t", "th", "he", "▁the", "▁▁", "▁▁▁▁", "▁re", "turn", "▁return", "▁w", "or", "ld",
    "▁wor", "▁world", "▁he", "ll", "▁hell", "▁hello", "re", "tu", "rn", "é", "\ufffd",
]  # fmt: skip
MERGES = [
    ("▁", "t"), ("t", "h"), ("h", "e"), ("▁t", "he"), ("▁", "▁"), ("▁▁", "▁▁"), ("r", "e"), ("t", "u"), ("r", "n"), ("▁", "re"),
    ("tu", "rn"), ("▁re", "turn"), ("▁", "w"), ("o", "r"), ("l", "d"), ("▁w", "or"), ("▁wor", "ld"), ("▁", "he"), ("l", "l"),
    ("▁he", "ll"), ("▁hell", "o"),
]  # fmt: skip


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """A tokenizer with the special tokens of tests/engine/folders.py."""
    if kind in SAVED:
        return Tokenizer.from_folder(save(kind, Path(mkdtemp())))
    made = _word_ends() if kind == "word_ends" else _sentencepiece(kind)
    made.add_special_tokens(SPECIAL)
    return Tokenizer(made)


def _sentencepiece(kind: str) -> Core:
    bytes_ = [] if kind == "no_bytes" else [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: id for id, token in enumerate(dict.fromkeys(["<unk>", *bytes_, *PIECES, *(a + b for a, b in MERGES)]))}
    made = Core(models.BPE(vocabulary, MERGES, byte_fallback=bool(bytes_), fuse_unk=True, unk_token="<unk>"))
    replaced = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "metaspace_first":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)])
    elif kind == "no_prefix":
        made.normalizer, made.decoder = replaced, decoders.Sequence(steps)
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replaced])
        made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return made


def _word_ends() -> Core:
    letters = "abcdefghijklmnopqrstuvwxyz.,!?'#"
    tokens = [*letters, *(letter + "</w>" for letter in letters), "th", "the</w>"]
    vocabulary = {token: id for id, token in enumerate(["<unk>", *tokens])}
    made = Core(models.BPE(vocabulary, [("t", "h"), ("th", "e</w>")], unk_token="<unk>", end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.BPEDecoder(suffix="</w>")
    return made


def text_before(tokenizer: Tokenizer, prompt: list[int], skip: bool) -> str:
    """The prompt's text, up to a character that it has only begun."""
    prompt = [id for id in prompt if not tokenizer.is_silent(id, skip)]
    begun = _begun(b"".join(_raw(tokenizer, id) for id in prompt))
    if tokenizer.byte_ids:
        return tokenizer.decode(prompt[: len(prompt) - begun], skip)
    text = tokenizer.decode(prompt, skip)
    return text[:-1] if begun else text


def _raw(tokenizer: Tokenizer, id: int) -> bytes:
    """The bytes of a token, out of its spelling; a "x" where it is none of bytes."""
    spelt = tokenizer.token(id)
    if len(spelt) == 6 and spelt.startswith("<0x"):
        return bytes.fromhex(spelt[3:5])
    is_spelt = isinstance(tokenizer._core.decoder, decoders.ByteLevel) and all(character in BYTES for character in spelt)
    return bytes(BYTES[character] for character in spelt) if is_spelt else b"x"


def _begun(raw: bytes) -> int:
    """How many bytes at the end are the beginning of a character: some bytes behind them would make it whole."""
    for count in (3, 2, 1):
        for more in range(1, 4):
            for behind in product((0x80, 0x90, 0xBF), repeat=more):
                if len(raw) >= count and _is_character(raw[-count:] + bytes(behind)):
                    return count
    return 0


def _is_character(raw: bytes) -> bool:
    try:
        return len(raw.decode()) == 1
    except UnicodeDecodeError:
        return False
