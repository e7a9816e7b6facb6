"""`PeftConfig`: adapter_config.json, as far as an adapter that is served needs it; all else is refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rooftile.errors import InvalidInput, Unsupported
from rooftile.weights.files.settings import read_json

FILE = "adapter_config.json"
MOST_RANK = 256
# the rank of adapters that there is room for, where nothing says more
LEAST_RANK = 16
_MERGE = "merge it with peft, model.merge_and_unload()"
# begin the words of ways to make an adapter that change the base's weights, too, and are saved so unless peft converts them
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
# a pattern of peft is a regular expression; only names are read, since a hostile one may take for ever
_NAME = re.compile(r"\^?[\w.]+")


class _Refusal(NamedTuple):
    """A field that is refused, unless its value is harmless."""

    field: str
    harmless: Callable[[Any], bool]
    why: str


_REFUSED = (
    _Refusal("use_dora", lambda x: not x, f"DoRA, which scales the rows of the merged weight, is not computed: {_MERGE}"),
    _Refusal("modules_to_save", lambda x: not x, f"whole modules cannot change with a request: {_MERGE}"),
    _Refusal("bias", lambda x: x in (None, "none"), f"biases cannot change with a request: {_MERGE}"),
    _Refusal("lora_bias", lambda x: not x, f"biases of adapters are not added: {_MERGE}"),
    _Refusal("trainable_token_indices", lambda x: not x, f"embeddings cannot change with a request: {_MERGE}"),
    _Refusal("target_parameters", lambda x: not x, f"adapters of bare parameters, as of experts, are not read: {_MERGE}"),
    _Refusal("layer_replication", lambda x: not x, "layers are not repeated"),
    _Refusal("use_qalora", lambda x: not x, f"its input is pooled, which is not computed: {_MERGE}"),
    _Refusal("alora_invocation_tokens", lambda x: not x, "an adapter is on for a whole request, and not from some tokens on"),
    _Refusal("arrow_config", lambda x: not x, "a request chooses its adapter, and no router does"),
    _Refusal(
        "init_lora_weights",
        lambda x: not (isinstance(x, str) and x.lower().startswith(_CHANGES_BASE)),
        "it changes the base's weights, too: save it with path_initial_model_for_weight_conversion",
    ),
)


class PeftConfig(NamedTuple):
    """An adapter's configuration.

    Args:
        path: the file.
        rank: the rank of modules that no pattern names.
        alpha: the same for alpha.
        ranks, alphas: by the names of modules, or their ends.
        rooted: whether the scale is alpha / sqrt(r).
    """

    path: Path
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    rooted: bool

    @classmethod
    def of(cls, folder: Path) -> PeftConfig:
        """Reads a folder's adapter_config.json.

        Raises:
            InvalidInput: there is none, or a value makes no sense.
            Unsupported: the adapter is of another kind, or has what is not computed.
        """
        path = folder / FILE
        if not path.is_file():
            raise InvalidInput(f"{folder} has no {FILE}; give the folder of an adapter that peft's save_pretrained has written")
        given = read_json(path)
        kind = given.get("peft_type")
        if kind != "LORA":
            raise Unsupported(f'{path} has peft_type {_said(kind)}; has "LORA"')
        for field, harmless, why in _REFUSED:
            if not harmless(given.get(field)):
                raise Unsupported(f"{path} has {field} {_said(given[field])}; {why}")
        return cls(
            path,
            _rank(path, "r", given.get("r", 8)),
            _alpha(path, "lora_alpha", given.get("lora_alpha", 8)),
            {name: _rank(path, "rank_pattern", value) for name, value in _patterns(path, given, "rank_pattern")},
            {name: _alpha(path, "alpha_pattern", value) for name, value in _patterns(path, given, "alpha_pattern")},
            bool(given.get("use_rslora")),
        )

    @property
    def most_rank(self) -> int:
        """The largest rank."""
        return max(self.rank, *self.ranks.values(), 1)

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module's part."""
        found = _matching(self.ranks, module)
        return self.rank if found is None else self.ranks[found]

    def scale_of(self, module: str) -> float:
        """Returns what a module's part is multiplied by."""
        found = _matching(self.alphas, module)
        alpha, rank = self.alpha if found is None else self.alphas[found], self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rooted else rank)


def room_for(folders: Iterable[Path]) -> int:
    """Returns the rank for which there is room where `max_adapter_rank` says none: the largest of some adapters.

    Raises:
        InvalidInput, Unsupported: one cannot be read, or is refused.
    """
    return max([LEAST_RANK, *(PeftConfig.of(folder).most_rank for folder in folders)])


def _matching(patterns: Mapping[str, Any], module: str) -> str | None:
    """Returns the first pattern that is a module's name, or its end from a dot on; one that begins with ^ is a whole name."""
    for name in patterns:
        if module == name.removeprefix("^") or (name[0] != "^" and module.endswith(f".{name}")):
            return name
    return None


def _patterns(path: Path, given: Mapping[str, Any], field: str) -> list[tuple[str, Any]]:
    found = given.get(field) or {}
    if not isinstance(found, dict):
        raise InvalidInput(f"{path} has {field} {_said(found)}; must be an object of modules' names")
    for name in found:
        if not _NAME.fullmatch(name):
            raise Unsupported(f"{path} has {_said(name)} in {field}; regular expressions are not read: write modules' names")
    return list(found.items())


def _rank(path: Path, field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_RANK:
        raise InvalidInput(f"{path} has a rank of {_said(value)} ({field}); must be a whole number from 1 to {MOST_RANK}")
    return value


def _alpha(path: Path, field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e6:
        raise InvalidInput(f"{path} has an alpha of {_said(value)} ({field}); must be a number of at most 1e6")
    return float(value)


def _said(value: Any) -> str:
    return repr(value)[:60]
