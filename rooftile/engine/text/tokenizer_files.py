"""Reads a tokenizer from a checkpoint folder: tokenizer.json and the settings beside it, like Transformers does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rooftile.errors import InvalidInput
from rooftile.weights.files.settings import check_readable, read_json, read_text

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_core(file: Path) -> Any:
    """Loads tokenizer.json with the package tokenizers."""
    try:
        from tokenizers import Tokenizer as Core
    except ImportError:
        raise InvalidInput("text needs the package tokenizers, which is not installed; pip install tokenizers") from None
    check_readable(file)
    try:
        return Core.from_file(str(file))
    # the package raises a bare Exception
    except Exception as error:
        raise InvalidInput(f"{file} is not a tokenizer ({error}); download it again") from None


def read_optional(file: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; returns an empty one if there is no file."""
    return read_json(file) if file.is_file() else {}


def read_settings(folder: Path) -> dict[str, Any]:
    """Reads tokenizer_config.json, with the special tokens of older checkpoints."""
    settings = read_optional(folder / "tokenizer_config.json")
    # older checkpoints name their special tokens in a file of their own; newer ones list all tokens in the settings
    if "added_tokens_decoder" not in settings:
        settings |= read_optional(folder / "special_tokens_map.json")
    return settings


def spelling(token: Any) -> str:
    """Returns a token's spelling; `token` is a string, or an object with its content and options."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise _strange(f"{token!r} for a token", "a string, or an object with its content")
    return content


def _strange(what: str, due: str) -> InvalidInput:
    return InvalidInput(f"the tokenizer's settings have {what[:80]}; must be {due}: download tokenizer_config.json again")


def token_ids(value: Any) -> tuple[int, ...]:
    """Returns the token ids in a setting that holds one id, a list of them, or null."""
    ids = value if isinstance(value, list) else [value]
    return tuple(id for id in ids if isinstance(id, int) and not isinstance(id, bool))


def add_tokens(core: Any, settings: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Adds the tokens that the settings name to the tokens of tokenizer.json, in Transformers' order, which decides their ids."""
    from tokenizers import AddedToken

    def made(token: Any, special: bool) -> Any:
        known = ("single_word", "lstrip", "rstrip", "normalized", "special")
        options = {name: token[name] for name in known if name in token} if isinstance(token, dict) else {}
        if not all(isinstance(value, bool) for value in options.values()):
            raise _strange(f"a token with {options}", "true or false each")
        return AddedToken(spelling(token), **(options | {"special": special or options.get("special", False)}))

    listed = settings.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(id.isdecimal() for id in listed):
        raise _strange(f"added_tokens_decoder {listed!r}", "an object with a token for each id")
    names = set(named.values())
    there = {repr(token) for token in core.get_added_tokens_decoder().values()}
    tokens = [made(listed[id], False) for id in sorted(listed, key=int)]
    tokens = [token for token in tokens if repr(token) not in there]
    for token in tokens:
        token.special = token.special or token.content in names
    spelt = {token.content for token in core.get_added_tokens_decoder().values()} | {token.content for token in tokens}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    if not isinstance(extra, list | dict):
        raise _strange(f"extra tokens {extra!r}", "a list of them, or an object")
    for token in [settings[name] for name in named] + list(extra.values() if isinstance(extra, dict) else extra):
        if spelling(token) not in spelt:
            spelt.add(spelling(token))
            tokens.append(made(token, True))
    core.add_tokens(tokens)


def read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Reads the chat template from its own file or from the settings; of several named ones it takes "default"."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    template = settings.get("chat_template")
    if isinstance(template, list):
        if not all(isinstance(entry, dict) and {"name", "template"} <= set(entry) for entry in template):
            raise _strange(f"chat_template {template!r}", "a template, or a list of them with their names")
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None
