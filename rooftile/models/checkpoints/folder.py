"""Checks that a path is a checkpoint's folder, without torch: whatever loads one refuses a wrong path first."""

from __future__ import annotations

from pathlib import Path

from rooftile.errors import InvalidInput
from rooftile.models.checkpoints.methods import refuse_gguf
from rooftile.models.settings import read_json

# the files of peft, of mlx, and of older peft
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapters.safetensors", "adapter_model.bin")
_MERGE = "merge it once with peft, model.merge_and_unload().save_pretrained(new_folder), and give that folder"


def check_folder(path: str | Path) -> Path:
    """Returns the path of a checkpoint's folder.

    An adapter beside a model is refused: Transformers would apply it, and without it the model answers differently.

    Raises:
        InvalidInput: it is no folder, has no config.json, is GGUF, or has the files of an adapter.
    """
    folder = Path(path)
    config = folder / "config.json"
    adapters = [name for name in _ADAPTERS if (folder / name).is_file()]
    if adapters and config.is_file():
        raise InvalidInput(
            f"{folder} has an adapter beside the model ({', '.join(adapters)}), and adapters are not read: {_MERGE}; "
            "or move its files away"
        )
    if adapters:
        raise InvalidInput(f"{folder} has an adapter{_base_of(folder)} and no model, and adapters are not read: {_MERGE}")
    if not config.is_file():
        refuse_gguf(folder)
    if not folder.is_dir():
        raise InvalidInput(f"{folder} is not a folder; give one with config.json and *.safetensors, downloaded beforehand")
    if not config.is_file():
        raise InvalidInput(f"{folder} has no config.json; give the folder of a Hugging Face checkpoint")
    return folder


def _base_of(folder: Path) -> str:
    """Returns which model an adapter is for, as far as its configuration says."""
    file = folder / "adapter_config.json"
    base = read_json(file).get("base_model_name_or_path") if file.is_file() else None
    return f" for {base[:80]}" if isinstance(base, str) else ""
