"""Files of tensors and numbers: how rotations are kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from rooftile.errors import InvalidInput


def write_tensors(held: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes a dictionary of tensors and numbers."""
    try:
        torch.save(held, Path(path))
    except (OSError, RuntimeError) as error:
        raise InvalidInput(f"{path} cannot be written: {' '.join(str(error).split())[:200]}") from error


def read_tensors(path: str | os.PathLike[str], writer: str) -> Any:
    """Reads what `write_tensors` wrote, for the function or command `writer`; nothing in the file is run."""
    try:
        return torch.load(Path(path), map_location="cpu", weights_only=True)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:
        raise InvalidInput(f"{path} is no file of {writer}") from error
