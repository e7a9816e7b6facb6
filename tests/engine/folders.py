"""Small tokenizers of each kind, saved as checkpoints save them."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The roof is tiled, and a tile's edge isn't its end. Don't stop!", "the stop string stops the stream of strings",
    "ab abc abcd bcd cde; STOP STOPS ##END## ... ??", "Grüße aus Köln – naïve café", "1234567890 12 34 56", "a . b , c ' d",
]  # fmt: skip
TEXTS = [
    "", " ", "Hello  world", " the stop", "naïve café 😀👩‍👩‍👧 日本語", "<|user|>hi<|end|> there<think>x", "a\n\n b\t",
    "it 's , n't .",
]  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('no system here') }}{% endif %}<|user|>{{ message['role'] }}: {{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)
SPECIAL = ["<|begin|>", "<|end|>", "<|user|>"]
KINDS = ("byte_level", "byte_fallback", "unigram", "cleaned", "wordpiece")


def core(kind: str) -> Tokenizer:
    """A tokenizer with three special tokens and <think>, which is added and not special."""
    made = {"byte_level": _byte_level, "byte_fallback": _byte_fallback, "wordpiece": _wordpiece}.get(kind, _unigram)()
    made.add_special_tokens(SPECIAL)
    made.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    begin = made.token_to_id("<|begin|>")
    made.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", begin)])
    return made


def save(kind: str, folder: Path, **settings: object) -> Path:
    """Saves it as Transformers does."""
    options = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    options["clean_up_tokenization_spaces"] = kind == "cleaned"
    PreTrainedTokenizerFast(tokenizer_object=core(kind), **(options | settings)).save_pretrained(folder)
    return folder


def _byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    return made


def _pieces() -> dict[str, int]:
    """The vocabulary of a sentencepiece model: bytes, characters, some words, and the sign for what cannot be read."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    characters = sorted({c for text in CORPUS for c in text.replace(" ", "▁") if c.isascii() or c == "▁"})
    words = ["▁t", "th", "he", "▁the", "▁st", "st", "op", "▁stop", "▁▁", "▁a", "ab", "cd", "abcd", "n't", "é", "\ufffd"]
    return {token: id for id, token in enumerate(dict.fromkeys(["<unk>", *bytes_, *characters, *words]))}


def _byte_fallback() -> Tokenizer:
    merges = [
        ("▁", "t"),
        ("t", "h"),
        ("h", "e"),
        ("▁t", "he"),
        ("s", "t"),
        ("o", "p"),
        ("▁", "st"),
        ("▁st", "op"),
        ("▁", "▁"),
    ]
    made = Tokenizer(models.BPE(_pieces(), merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return made


def _unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram([(token, -float(len(token) == 1)) for token in _pieces()], 0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return made


def _wordpiece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    return made
