"""`Tokenizer`: turns text into token ids and back, with the files of a checkpoint folder.

The folder's tokenizer.json is read with the package tokenizers, and a folder that has only older files with Transformers. Both
are imported when they are needed. No code of a folder is ever run, except its chat template, in a sandbox (`chat_template.py`). A
template comes only from the folder, never with a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

from rooftile.engine.text.chat_template import render, template_of
from rooftile.engine.text.tokenizer_files import (
    NAMED,
    add_tokens,
    read_core,
    read_optional,
    read_settings,
    read_template,
    spelling,
    token_ids,
)
from rooftile.errors import InvalidInput

# a text without a bound can bring a service down: its bytes are counted before it is encoded
MOST_BYTES = 4 * 2**20

# sets of shown special tokens that are kept: a model has one or two
VIEWS = 16
# bytes, or tokens, from which on other threads would notice that the interpreter is held
LONG = 16 * 2**10
# Transformers removes the spaces of these from decoded text where a checkpoint asks for it, in this order
CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class Tokenizer:
    """The tokenizer of a checkpoint folder; it encodes and decodes like Transformers' AutoTokenizer.

    A special token that is spelt out in a text is encoded as that token. An application that must not allow this removes them
    from its users' texts.

    Args:
        core: a tokenizer of the package tokenizers.
        named: the special tokens by name, such as bos_token; a chat template may use them.
        template: the chat template, a Jinja program; None if there is none.
        cleans_up: whether spaces before punctuation are removed from decoded text.
        eos_ids: the tokens that end a text.
        place: the folder it comes from, for error messages.

    Example:
        >>> tokenizer = Tokenizer.from_folder("checkpoints/qwen")   # doctest: +SKIP
        >>> tokenizer.decode(tokenizer.encode("Hello"))             # doctest: +SKIP
        'Hello'
    """

    def __init__(
        self,
        core: Any,
        *,
        named: Mapping[str, str] | None = None,
        template: str | None = None,
        cleans_up: bool = False,
        eos_ids: Sequence[int] = (),
        place: str = "the checkpoint",
    ) -> None:
        self._core = core
        self._named = dict(named or {})
        self._template = template
        # Transformers never cleans up after BPE, whose spaces belong to the text
        self.cleans_up = cleans_up and type(core.model).__name__ != "BPE"
        own = core.token_to_id(self._named["eos_token"]) if "eos_token" in self._named else None
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*([] if own is None else [own]), *eos_ids]))
        self._place = place
        self._texts: dict[int, str] = {}
        self._first_texts: dict[int, str] = {}
        self._spelling: dict[int, bool] = {}
        self._shown: frozenset[int] = frozenset()
        self._views: dict[tuple[str, ...], Tokenizer] = {}
        # a prompt is neither cut nor padded
        core.no_truncation()
        core.no_padding()

    @classmethod
    def from_folder(
        cls, path: str | Path, *, place: str | None = None, template: str | Path | None = None
    ) -> Tokenizer:  # fmt: skip
        """Loads the tokenizer of a checkpoint folder: tokenizer.json, or older files through Transformers.

        Args:
            path: the folder.
            place: how error messages about prompts name it; None names the folder.
            template: a chat template in place of the folder's: a file, or its text.

        Raises:
            InvalidInput: the folder has no tokenizer, or one that needs code from the folder.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise InvalidInput(f"{folder} is not a folder; a tokenizer is read from a checkpoint's folder")
        eos_ids = token_ids(read_optional(folder / "generation_config.json").get("eos_token_id"))
        own = None if template is None else template_of(template)
        if not (folder / "tokenizer.json").is_file():
            return _through_transformers(folder, eos_ids, place, own)
        settings = read_settings(folder)
        named = {name: spelling(settings[name]) for name in NAMED if settings.get(name)}
        core = read_core(folder / "tokenizer.json")
        add_tokens(core, settings, named)
        core.encode_special_tokens = settings.get("split_special_tokens") is True
        return cls(
            core,
            named=named,
            template=read_template(folder, settings) if own is None else own,
            cleans_up=settings.get("clean_up_tokenization_spaces") is True,
            eos_ids=eos_ids,
            place=str(folder) if place is None else place,
        )

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included. A model may have logits for more."""
        size: int = self._core.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token, added ones included, by its spelling."""
        found: dict[str, int] = self._core.get_vocab(with_added_tokens=True)
        return found

    @property
    def special(self) -> frozenset[str]:
        """The spellings of the special tokens."""
        return frozenset(self.token(id) for id in self._special_ids)

    @property
    def template(self) -> str | None:
        """The chat template; None if there is none."""
        return self._template

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return self._template is not None

    def token(self, id: int) -> str:
        """Returns the vocabulary's spelling of a token, or "" if there is no such id; the token's text is decode([id])."""
        return self._core.id_to_token(id) or ""

    def encode_many(self, texts: Sequence[str], *, most_bytes: int = MOST_BYTES) -> list[list[int]]:
        """Encodes texts together, with the tokens that the checkpoint puts around each, in several threads.

        Raises:
            InvalidInput: a text is too long, or has half of a surrogate pair in it.
        """
        for text in texts:
            _check_text(text, most_bytes)
        return [found.ids for found in self._core.encode_batch_fast(list(texts), add_special_tokens=True)]

    def encode_cut(self, text: str, most: int) -> list[int]:
        """Encodes a text whose end is left out, so that it has `most` tokens with those around it; fewer stay as they are."""
        _check_text(text, MOST_BYTES)
        inner = self._core.encode(text, add_special_tokens=False)
        inner.truncate(max(0, most - self._core.num_special_tokens_to_add(False)))
        ids: list[int] = self._core.post_process(inner, None, True).ids
        return ids[:most]

    def encode_pair(
        self, first: str, second: str, most: int | None = None, *, most_bytes: int = MOST_BYTES
    ) -> tuple[list[int], list[int]]:
        """Encodes two texts as one, with the tokens that the checkpoint puts around and between them.

        Args:
            first, second: the texts.
            most: the tokens of both that are kept; the longer one loses its end, then both do. None keeps all.
            most_bytes: the longest text that is accepted, in bytes of UTF-8.

        Returns:
            The token ids, and the type of each token.

        Raises:
            InvalidInput: a text is too long, or has half of a surrogate pair in it.
        """
        for text in (first, second):
            _check_text(text, most_bytes)
        one, two = (self._core.encode(text, add_special_tokens=False) for text in (first, second))
        if most is not None:
            kept = _shares(len(one), len(two), max(0, most - self._core.num_special_tokens_to_add(True)))
            for each, length in zip((one, two), kept, strict=True):
                each.truncate(length)
        found = self._core.post_process(one, two, True)
        return found.ids[:most], found.type_ids[:most]

    def encode(self, text: str, special: bool = True, *, most_bytes: int = MOST_BYTES) -> list[int]:
        """Encodes a text.

        Args:
            text: the text.
            special: whether to add the tokens that the checkpoint puts around a text, such as the one that begins it.
            most_bytes: the longest text that is accepted, in bytes of UTF-8.

        Raises:
            InvalidInput: the text is too long, or has half of a surrogate pair in it.
        """
        size = _check_text(text, most_bytes)
        # only a batch lets other threads go on while it is encoded; the fast kind keeps no offsets, which are not read
        if size > LONG:
            ids: list[int] = self._core.encode_batch_fast([text], add_special_tokens=special)[0].ids
        else:
            ids = self._core.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Decodes token ids; an id that is not in the vocabulary has no text."""
        given = list(ids)
        if skip_special and self._shown:
            given, skip_special = [id for id in given if id not in self._special_ids], False
        if len(given) > LONG:
            text: str = self._core.decode_batch([given], skip_special_tokens=skip_special)[0]
        else:
            text = self._core.decode(given, skip_special_tokens=skip_special)
        return _cleaned(text) if self.cleans_up else text

    def text_of(self, id: int) -> str:
        """Returns the text that a token has behind others, with its leading space; half of a character is U+FFFD."""
        text = self._texts.get(id)
        if text is None:
            text = self._texts[id] = self._text_behind_others(id)
        return text

    def first_text_of(self, id: int) -> str:
        """Returns the text that a token has where a text begins: many tokenizers leave out its leading space there."""
        text = self._first_texts.get(id)
        if text is None:
            text = self._first_texts[id] = self.decode([id], skip_special=False)
        return text

    def bytes_of(self, id: int) -> bytes:
        """Returns the bytes that a token has behind others, also of one that is half of a character."""
        raw = self._raw(id)
        return self.text_of(id).encode() if raw is None else raw

    def _raw(self, id: int) -> bytes | None:
        """Returns the bytes of a token that stands for bytes; None for one that stands for text."""
        byte = self.byte_ids.get(id)
        if byte is not None:
            return bytes([byte])
        return bytes(BYTES[character] for character in self.token(id)) if self.spells_bytes(id) else None

    def _text_behind_others(self, id: int) -> str:
        raw = self._raw(id)
        if raw is not None:
            return raw.decode(errors="replace")
        # the second of two is not at the beginning, whatever decode does there
        once, twice = self.decode([id], skip_special=False), self.decode([id, id], skip_special=False)
        return twice[len(once) :] if twice.startswith(once) else once

    def spells_bytes(self, id: int) -> bool:
        """Tells whether a token adds bytes to a text, the same ones beside any others: its spelling has a character for each."""
        found = self._spelling.get(id)
        if found is None:
            spelt = "" if id in self._added_ids or not self._spells_bytes else self.token(id)
            found = self._spelling[id] = spelt != "" and all(character in BYTES for character in spelt)
        return found

    def chat(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, *, continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None, tools: Sequence[Mapping[str, Any]] | None = None,
        special: bool = False, most_bytes: int = MOST_BYTES,
    ) -> list[int]:  # fmt: skip
        """Encodes a conversation with the checkpoint's chat template.

        Args:
            messages: dictionaries with a role and content each.
            add_generation_prompt: whether to end where the model's answer begins.
            continue_final_message: whether to end in the text of the last message, the assistant's, which the model continues.
            chat_template_kwargs: variables that the template reads, such as enable_thinking.
            special: whether to add the tokens that the checkpoint puts around a text; a template writes its own.
            tools: the functions that the model may call, in OpenAI's form.
            most_bytes: the longest text that the template may write, in bytes of UTF-8.

        Raises:
            InvalidInput: there is no chat template, or it refuses these messages or does not read one of the variables; or the
                last message cannot be continued.
        """
        if self._template is None:
            raise InvalidInput(f"{self._place} has no chat template; send a prompt instead of messages")
        written = render(
            self._template, messages, add_generation_prompt, self._named, self._place,
            variables=chat_template_kwargs or {}, continue_final_message=continue_final_message, tools=tools,
        )  # fmt: skip
        return self.encode(written, special, most_bytes=most_bytes)

    def to_json(self) -> str:
        """Returns the tokenizer as the text of a tokenizer.json, with all added tokens."""
        text: str = self._core.to_str()
        return text

    def is_silent(self, id: int, skip_special: bool) -> bool:
        """Tells whether decode skips an id: a special token that is left out, or an id that is not in the vocabulary."""
        return (skip_special and id in self._special_ids) or self._core.id_to_token(id) is None

    def is_added(self, id: int) -> bool:
        """Tells whether a token stands outside of the vocabulary's pieces: a special one, or one such as <think>."""
        return id in self._added_ids

    def showing(self, tokens: Sequence[str]) -> Tokenizer:
        """Returns this tokenizer, of which some special tokens are text like others."""
        key = tuple(tokens)
        if key in self._views:
            return self._views[key]
        shown = frozenset(id for id in self._special_ids if self.token(id) in tokens)
        other = copy(self) if shown else self
        if shown:
            other._shown, other._special_ids = shown, self._special_ids - shown
        if len(self._views) < VIEWS:
            self._views[key] = other
        return other

    def special_tokens(self, texts: Iterable[str]) -> tuple[str, ...]:
        """Returns the special tokens that are spelt in some texts."""
        found = self._special_spellings
        return () if found is None else tuple(dict.fromkeys(token for text in texts for token in found.findall(text)))

    def id_of(self, token: str) -> int | None:
        """Returns the id of a special token by its spelling; None if there is no such special token."""
        id: int | None = self._core.token_to_id(token)
        return id if id in self._special_ids else None

    def added_id(self, text: str) -> int | None:
        """Returns the added token that a text spells; None if it spells none."""
        id: int | None = self._core.token_to_id(text)
        return id if id in self._added_ids else None

    @cached_property
    def added_tokens(self) -> tuple[str, ...]:
        """The spellings of the added tokens, a longer one before one that begins like it."""
        return tuple(sorted(filter(None, map(self.token, self._added_ids)), key=len, reverse=True))

    def is_special(self, id: int) -> bool:
        """Tells whether a token is a special one."""
        return id in self._special_ids

    def spells_special(self, text: str) -> bool:
        """Tells whether a text has the spelling of a special token in it."""
        return self._special_spellings is not None and self._special_spellings.search(text) is not None

    @cached_property
    def plain_id(self) -> int | None:
        """A token whose text is letters of ASCII, perhaps behind a space; None if there is none."""
        ids = (id for id in range(self.vocab_size) if id not in self._added_ids and id not in self.byte_ids)
        return next((id for id in ids if (text := self.text_of(id)).strip().isalpha() and text.isascii()), None)

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        """The byte of each token that stands for one byte (byte fallback), by id; decode joins neighbouring ones."""
        if not self._decodes_with("ByteFallback"):
            return {}
        spelt = ((f"<0x{byte:{case}}>", byte) for byte in range(256) for case in ("02X", "02x"))
        found = {self._core.token_to_id(token): byte for token, byte in spelt}
        return {id: byte for id, byte in found.items() if id is not None}

    @cached_property
    def _spells_bytes(self) -> bool:
        """Whether each character of a token's spelling stands for a byte (see BYTES)."""
        return self._decodes_with("ByteLevel")

    def _decodes_with(self, part: str) -> bool:
        decoder = self._core.decoder
        return decoder is not None and f'"{part}"'.encode() in decoder.__getstate__()

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._core.get_added_tokens_decoder())

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(id for id, token in self._core.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def _special_spellings(self) -> re.Pattern[str] | None:
        spelt = [re.escape(self.token(id)) for id in self._special_ids if self.token(id)]
        return re.compile("|".join(spelt)) if spelt else None


def _check_text(text: str, most_bytes: int) -> int:
    """Returns the bytes of a text; refuses one that is too long, or is no text."""
    if not isinstance(text, str):
        raise InvalidInput(f"a text is a {type(text).__name__}; must be a string")
    # a character has at least one byte
    if len(text) > most_bytes:
        raise InvalidInput(f"a text has {len(text)} characters; may have at most {most_bytes} bytes")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidInput(f"character {error.start} of a text is half of a surrogate pair; must be whole") from None
    if size > most_bytes:
        raise InvalidInput(f"a text has {size} bytes; may have at most {most_bytes}")
    return size


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns how many tokens of two texts are kept: all of a short one, half of the room each otherwise."""
    if first + second <= room:
        return first, second
    short = min(first, second, room // 2)
    return (short, room - short) if first <= second else (room - short, short)


def _byte_alphabet() -> dict[str, int]:
    """Returns the bytes by the characters that GPT-2's vocabulary spells them with: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTES = _byte_alphabet()


def _cleaned(text: str) -> str:
    for pattern in CLEANED:
        text = text.replace(pattern, pattern.strip())
    return text


def _through_transformers(folder: Path, eos_ids: tuple[int, ...], place: str | None, own: str | None) -> Tokenizer:
    """Loads a folder without tokenizer.json: one with a sentencepiece model, or with a vocabulary and merges."""
    refusal = f"{folder} has no tokenizer.json"
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise InvalidInput(f"{refusal}; other files need Transformers: pip install transformers") from None
    try:
        theirs = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    # readers of old files raise many kinds of errors; each means that the folder has no usable tokenizer
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InvalidInput(f"{refusal}, and Transformers reads none from its other files: {reason}") from error
    core = getattr(theirs, "backend_tokenizer", None)
    if core is None:
        raise InvalidInput(f"{refusal}, and {type(theirs).__name__} of Transformers is not a fast tokenizer; save it as one")
    template = theirs.chat_template if own is None else own
    return Tokenizer(
        core,
        named=theirs.special_tokens_map,
        template=template.get("default") if isinstance(template, dict) else template,
        cleans_up=bool(theirs.clean_up_tokenization_spaces),
        eos_ids=eos_ids,
        place=str(folder) if place is None else place,
    )
