"""Finds the folder of a checkpoint, and reads the sampling parameters that its authors recommend."""

from __future__ import annotations

import re
from pathlib import Path

from rooftile.errors import InvalidInput
from rooftile.models.checkpoints.folder import check_folder
from rooftile.models.settings import read_json
from rooftile.serve.sampling.params import SamplingParams

# nothing else is downloaded: no pickles, no code
FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt")
RECOMMENDED = ("temperature", "top_p", "top_k", "repetition_penalty")


def find_folder(model: str | Path, *, download: bool = False) -> Path:
    """Returns the folder of a checkpoint. Needs no torch, so that a wrong path is refused at once.

    Args:
        model: the folder, or a name on the Hugging Face Hub such as "Qwen/Qwen3-0.6B", which is looked up in the Hub's cache on
            this machine.
        download: whether to download what the cache lacks.

    Raises:
        InvalidInput: the name is neither a folder nor in the cache, or cannot be downloaded; or the folder has no checkpoint.
    """
    name = str(model)
    if not is_hub_name(model):
        return check_folder(model)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise InvalidInput(
            f"{model} is not a folder; a name on the Hub needs huggingface_hub: pip install huggingface_hub"
        ) from None
    try:
        return check_folder(snapshot_download(name, local_files_only=not download, allow_patterns=list(FILES)))
    except LocalEntryNotFoundError as error:
        if download:
            raise InvalidInput(f"{model} cannot be downloaded: the Hugging Face Hub does not answer") from error
        raise InvalidInput(
            f"{model} is neither a folder nor in the Hugging Face Hub's cache here; run `hf download {model}`, or give "
            "download=True"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InvalidInput(f"{model} cannot be downloaded: {reason}") from error


def is_hub_name(model: str | Path) -> bool:
    """Tells whether a model is named as on the Hugging Face Hub, and is no folder here."""
    is_named = isinstance(model, str) and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model) is not None
    return is_named and not Path(model).is_dir()


def recommended_params(folder: Path) -> SamplingParams:
    """Returns the sampling parameters of generation_config.json, and the usual ones where it says nothing.

    Raises:
        InvalidInput: a value there makes no sense.
    """
    file = folder / "generation_config.json"
    said = read_json(file) if file.is_file() else {}
    try:
        return SamplingParams(**{name: said[name] for name in RECOMMENDED if said.get(name) is not None})
    except InvalidInput as error:
        raise InvalidInput(f'{file}: {error}; correct it, or give generation_config="none"') from None
