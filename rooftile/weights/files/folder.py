"""Checks a checkpoint's folder and finds its files, without torch: whatever loads one refuses a wrong path first."""

from __future__ import annotations

from pathlib import Path

from rooftile.errors import InvalidInput
from rooftile.weights.files.methods import refuse_gguf, section_of
from rooftile.weights.files.settings import read_json

# the files of peft, of mlx, and of older peft
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapters.safetensors", "adapter_model.bin")
# how many names an error sentence lists
SHOWN = 3
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MERGE = "or merge it once with peft, model.merge_and_unload().save_pretrained(new_folder), and give that folder"


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
            f"{folder} has an adapter beside the model ({', '.join(adapters)}), which is not read there: move its files "
            f"into a folder of their own, and give that as LLM(adapters={{name: folder}}) or --adapter name=folder, {_MERGE}"
        )
    if adapters:
        raise InvalidInput(
            f"{folder} has an adapter{_base_of(folder)} and no model: give the model's folder, and this one as "
            f"LLM(adapters={{name: folder}}) or --adapter name=folder, {_MERGE}"
        )
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


def files_of(folder: Path) -> list[Path]:
    """Returns the safetensors files of a checkpoint.

    Raises:
        InvalidInput: there are none, or some that the index names are missing.
    """
    if (folder / _INDEX).is_file():
        shards = read_json(folder / _INDEX).get("weight_map")
        names = sorted({str(name) for name in shards.values()}) if isinstance(shards, dict) else []
        # a downloaded index must not point at files outside the checkpoint
        if not names or any(Path(name).name != name for name in names):
            raise InvalidInput(f"{folder / _INDEX} has no weight_map of files beside it; download it again")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise InvalidInput(f"{folder} lacks {listed(missing)}, which {_INDEX} names; download it again")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise InvalidInput(
            f"{folder} has {listed(pickles)}, a pickle, which can run any code; only safetensors are read: "
            f"{_converted(folder, pickles)}"
        )
    refuse_gguf(folder)
    raise InvalidInput(f"{folder} has neither model.safetensors nor {_INDEX}; give the folder of a Hugging Face checkpoint")


def _converted(folder: Path, pickles: list[str]) -> str:
    """Says how to make safetensors of pickles: Transformers may not know what has quantised them."""
    if len(pickles) == 1 and section_of(folder):
        return (
            f"write its tensors once, without running its code, by save_file(torch.load({pickles[0]!r}, weights_only=True), "
            '"model.safetensors") of safetensors.torch'
        )
    return "convert it once with Transformers, AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"


def listed(names: list[str]) -> str:
    """Lists the first few names, and says how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
