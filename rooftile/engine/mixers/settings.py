"""The settings that do not go with `approximate=`; nothing here imports torch, so that a command can refuse them first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rooftile.errors import Unsupported


def check_approximate(given: Mapping[str, Any], *, fp8: bool) -> None:
    """Refuses settings of an engine that do not go with an approximation, as far as it need not be loaded.

    Args:
        given: the settings by name.
        fp8: whether the cache is in FP8.

    Raises:
        Unsupported: they do not go together.
    """
    if given.get("approximate") is None:
        return
    if given.get("deterministic"):
        raise Unsupported("approximate and deterministic are both given; Loki's choice of pages depends on the last bits")
    if fp8:
        raise Unsupported('approximate is given and kv_dtype is "fp8"; Loki has caches in the dtype of the model')
