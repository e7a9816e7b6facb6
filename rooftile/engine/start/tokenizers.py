"""Finds an engine's tokenizer, and checks that a draft model has the same."""

from __future__ import annotations

from pathlib import Path

from rooftile.engine.settings.config import EngineConfig
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def find_tokenizer(model: object, config: EngineConfig) -> Tokenizer | None:
    """Loads the tokenizer that is asked for, or the checkpoint's; None if its folder has no file of one."""
    folder = config.tokenizer if config.tokenizer is not None else _own_folder(model)
    if folder is None and config.chat_template is not None:
        raise InvalidInput("chat_template is given, and the model has no tokenizer; give a folder with one as tokenizer=")
    return None if folder is None else Tokenizer.from_folder(folder, template=config.chat_template)


def check_draft_tokenizer(model: object, config: EngineConfig, draft: object) -> None:
    """Checks that a token means the same to a draft model: that the vocabularies are equal, and the same tokens special.

    The models may have logits for more tokens than the tokenizer has, and not for equally many: the rows of an embedding are
    often padded to a round number. A decoder without a folder has no tokenizer to compare.

    Raises:
        InvalidInput: the tokenizers differ; the sentence has the first token that does.
    """
    ours = _own_folder(model) if config.tokenizer is None else Path(config.tokenizer)
    theirs = _own_folder(draft)
    if ours is None or theirs is None or _same_files(ours, theirs):
        return
    one, other = (
        {(id, token, token in found.special) for token, id in found.vocabulary.items()} for found in _read(ours, theirs)
    )
    if one != other:
        id, token, _ = min(one ^ other)
        whose = "the model's" if (id, token) in {each[:2] for each in one - other} else "the draft model's"
        raise InvalidInput(
            f"the draft model, {theirs}, has another tokenizer than the model: {len(one ^ other):,} entries differ, the first "
            f"{token!r} ({id}), {whose}; give a draft model with the same vocabulary and special tokens"
        )


def _read(*folders: Path) -> list[Tokenizer]:
    return [Tokenizer.from_folder(folder) for folder in folders]


def _own_folder(model: object) -> Path | None:
    """Returns a checkpoint's folder if it has a file of a tokenizer."""
    if isinstance(model, str | Path) and any((Path(model) / name).is_file() for name in TOKENIZER_FILES):
        return Path(model)
    return None


def _same_files(ours: Path, theirs: Path) -> bool:
    """Whether both folders have the same files of a tokenizer that is read from one, so that nothing more need be compared."""
    pairs = [(ours / name, theirs / name) for name in TOKENIZER_FILES[:2]]
    return all(one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes() for one, other in pairs)
