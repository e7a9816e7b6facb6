"""Builds one small model of each family of the installed Transformers, with random weights."""

from __future__ import annotations

from typing import Any

from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.integrations.every_model.exceptions import AS_DICTS, SIZES
from tests.integrations.every_model.sizes import smaller

# the class that shows most of a family: the one with both halves, else the one with logits; each contains the family's model
_KINDS = (
    "MODEL_FOR_SPEECH_SEQ_2_SEQ", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_MULTIMODAL_LM", "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_MASKED_LM", "MODEL",
)  # fmt: skip


def models() -> list[tuple[str, str]]:
    """Returns (family, name of a class) for every type of configuration of which Transformers' auto classes know a model."""
    found: dict[str, str] = {}
    for kind in _KINDS:
        for family, names in getattr(modeling_auto, f"{kind}_MAPPING_NAMES").items():
            found.setdefault(family, names if isinstance(names, str) else names[0])
    # a configuration with parts and that of its text may name one class
    by_class = {name: family for family, name in sorted(found.items(), reverse=True)}
    return sorted((family, name) for name, family in by_class.items())


def small_config(family: str, kind: Any) -> Any:
    """Returns a small configuration for a class of a family."""
    return _small(getattr(kind, "config_class", None) or CONFIG_MAPPING[family], SIZES.get(family, {}))


def _small(kind: Any, given: dict[str, Any]) -> Any:
    default = kind(**given.get("default", {}))
    changed: dict[str, Any] = smaller(default)
    for name in getattr(kind, "sub_configs", {}):
        there = getattr(default, name, None)
        if there is not None and not isinstance(there, dict):
            small = _small(type(there), SIZES.get(there.model_type, {}) | given.get(name, {}))
            changed[name] = small.to_dict() if kind.__name__ in AS_DICTS else small
    own = {name: value for name, value in given.items() if name not in (*kind.sub_configs, "default")}
    return kind(**given.get("default", {}) | changed | own)
