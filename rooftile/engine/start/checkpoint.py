"""Finds the folder of a checkpoint, and reads the sampling parameters that its authors recommend."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from rooftile.engine.sampling.params import SamplingParams
from rooftile.errors import InvalidInput
from rooftile.weights.files.folder import check_folder
from rooftile.weights.files.settings import read_json

# nothing else is downloaded: no pickles, no code
FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt")
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# other words of generation_config.json that change which tokens come, the values that change nothing, and what to give instead
NOT_READ: dict[str, tuple[tuple[object, ...], str]] = {
    "suppress_tokens": (([],), "logit_bias"),
    "begin_suppress_tokens": (([],), ""),
    "bad_words_ids": (([],), "bad_words"),
    "sequence_bias": (({}, []), ""),
    "stop_strings": (([], ""), "stop"),
    "no_repeat_ngram_size": ((0,), ""),
    "encoder_repetition_penalty": ((1.0,), ""),
    "typical_p": ((1.0,), ""),
    "epsilon_cutoff": ((0.0,), ""),
    "eta_cutoff": ((0.0,), ""),
    "forced_bos_token_id": ((), ""),
    "forced_eos_token_id": ((), ""),
    "exponential_decay_length_penalty": ((), ""),
    "min_length": ((0,), "min_tokens"),
    "min_new_tokens": ((0,), "min_tokens"),
    "guidance_scale": ((1.0,), ""),
}


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
    unread = [name for name, (neutral, _) in NOT_READ.items() if said.get(name) is not None and said[name] not in neutral]
    if unread:
        instead = [f"{NOT_READ[name][1]} for {name}" for name in unread if NOT_READ[name][1]]
        advice = f"; SamplingParams have {', '.join(instead)}" if instead else ""
        logging.getLogger(__name__).warning("%s: not applied: %s%s", file, ", ".join(unread), advice)
    try:
        return SamplingParams(**{name: said[name] for name in RECOMMENDED if said.get(name) is not None})
    except InvalidInput as error:
        raise InvalidInput(f'{file}: {error}; correct it, or give generation_config="none"') from None
