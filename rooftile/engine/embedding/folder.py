"""`Recipe`: what a folder says about the way from hidden states to vectors, as sentence-transformers writes it.

Nothing here imports torch: the server's process reads the prompts and the longest text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rooftile.errors import InvalidInput, Unsupported
from rooftile.weights.files.settings import read_json

MODULES = "modules.json"
POOLINGS = ("cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean")
# names of the prompts of texts that are searched for, the first that is there
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
# the fields of older folders, in the order in which their vectors are joined
_FLAGS = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
_ACTIVATIONS = {"Identity": None, "Tanh": "tanh", "Sigmoid": "sigmoid", "ReLU": "relu", "GELU": "gelu"}


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on a vector after pooling: a projection, whose tensors a folder has, or division by its length."""

    kind: Literal["project", "normalise"]
    folder: Path | None = None
    activation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model's vectors are made.

    Args:
        pooling: the kinds of pooling whose vectors are joined.
        steps: what follows.
        prompts: texts that may be put before a text, by name.
        default_prompt: the name of the prompt of texts for which none is named.
        longest: the longest text in tokens that the folder asks for.
        lower: whether texts are read in lower case.
        pair_types: whether the tokens of a pair's second text have the type 1, where the model has types.
        score_activation: the function of a cross-encoder's one logit that is its score: "sigmoid", or None for the logit.
    """

    pooling: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    longest: int | None = None
    lower: bool = False
    pair_types: bool = True
    score_activation: str | None = "sigmoid"

    @property
    def normalises(self) -> bool:
        """Whether vectors have the length 1."""
        return bool(self.steps) and self.steps[-1].kind == "normalise"

    def prompt(self, name: str | None) -> str:
        """Returns the text of a prompt; None names the default one, and "" where there is none.

        Raises:
            InvalidInput: the model has no prompt of this name.
        """
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if not isinstance(name, str) or name not in self.prompts:
            has = ", ".join(map(repr, self.prompts)) or "none"
            raise InvalidInput(f"prompt_name is {repr(name)[:80]}; the model has {has}")
        return self.prompts[name]


def recipe_of(folder: Path, *, causal: bool) -> Recipe:
    """Reads the recipe of a folder; one without modules.json has the last token's vector (a decoder) or the mean of all.

    Args:
        folder: the folder.
        causal: whether the model is a decoder.

    Raises:
        InvalidInput: a file makes no sense.
        Unsupported: a module is none of those that are here.
    """
    said = _optional(folder / "config_sentence_transformers.json")
    older = _optional(folder / "sentence_bert_config.json")
    pooling, steps = _modules(folder) if (folder / MODULES).is_file() else (None, ())
    prompts = said.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise InvalidInput(
            f"config_sentence_transformers.json of {folder} has prompts {str(prompts)[:60]}; must be texts by name"
        )
    tokenizer = _optional(folder / "tokenizer_config.json")
    lengths = [older.get("max_seq_length"), tokenizer.get("model_max_length")]
    known = [int(each) for each in lengths if isinstance(each, int | float) and not isinstance(each, bool) and 1 <= each < 1e9]
    default = said.get("default_prompt_name")
    recipe = Recipe(
        pooling=pooling or (("lasttoken",) if causal else ("mean",)), steps=steps,
        prompts={name: text or "" for name, text in prompts.items()}, default_prompt=default,
        longest=min(known, default=None), lower=older.get("do_lower_case") is True,
        pair_types=_has_types(tokenizer), score_activation=_score_activation(folder, said),
    )  # fmt: skip
    recipe.prompt(None)
    return recipe


def query_prompts(recipe: Recipe) -> tuple[str | None, str | None]:
    """Returns the names of the prompts of queries and of documents; None for none, or for the default one."""
    found = next((name for name in DOCUMENT_PROMPTS if name in recipe.prompts), None)
    return ("query" if "query" in recipe.prompts else None), found


def _modules(folder: Path) -> tuple[tuple[str, ...] | None, tuple[Step, ...]]:
    """Returns the pooling and the steps of modules.json."""
    import json

    from rooftile.weights.files.settings import read_text

    try:
        listed = json.loads(read_text(folder / MODULES))
    except (RecursionError, ValueError) as error:
        raise InvalidInput(f"{folder / MODULES} is not JSON: {error}; download it again") from None
    if not isinstance(listed, list) or not all(isinstance(each, dict) and isinstance(each.get("type"), str) for each in listed):
        raise InvalidInput(f"{folder / MODULES} must be a list of objects with a type each; download it again")
    pooling: tuple[str, ...] | None = None
    steps: list[Step] = []
    for place, each in enumerate(listed):
        kind, own = each["type"].rpartition(".")[2], folder / str(each.get("path", ""))
        if not own.resolve().is_relative_to(folder.resolve()):
            raise InvalidInput(f"{folder / MODULES} names {each['path']!r}, outside of the folder; download it again")
        if kind == "Transformer" and place == 0:
            if own.resolve() != folder.resolve():
                raise Unsupported(f"{folder / MODULES} has its model in {each['path']!r}; supported is one in the folder itself")
        elif kind == "Pooling" and pooling is None and place:
            pooling = _pooling(own)
        elif kind == "Normalize" and pooling is not None:
            steps.append(Step("normalise"))
        elif kind == "Dense" and pooling is not None:
            steps.append(_projection(own))
        else:
            raise Unsupported(
                f"{folder / MODULES} has a module {each['type'][:80]} at place {place}; supported are Transformer, Pooling, and "
                "then Dense and Normalize"
            )
    return pooling, tuple(steps)


def _pooling(folder: Path) -> tuple[str, ...]:
    said = _optional(folder / "config.json")
    if said.get("include_prompt", True) is not True:
        raise Unsupported(f"{folder} leaves the prompt out of pooling (include_prompt); supported is pooling of all tokens")
    named = said.get("pooling_mode")
    if named is None:
        found = [kind for flag, kind in _FLAGS.items() if said.get(flag)] or ["mean"]
    else:
        found = list(named) if isinstance(named, list) else [named]
    strange = [kind for kind in found if kind not in POOLINGS]
    if strange or not found:
        raise Unsupported(f"{folder} has pooling {str(strange)[:60]}; supported are {', '.join(POOLINGS)}")
    return tuple(found)


def _projection(folder: Path) -> Step:
    said = _optional(folder / "config.json")
    if said.get("use_residual"):
        raise Unsupported(f"{folder} has use_residual; supported is a projection alone")
    names = {said.get(name, "sentence_embedding") for name in ("module_input_name", "module_output_name")}
    if names != {"sentence_embedding"}:
        raise Unsupported(f"{folder} projects {', '.join(map(str, names))}; supported is sentence_embedding")
    return Step("project", folder, _activation(said.get("activation_function", "Tanh"), folder))


def _has_types(tokenizer: Mapping[str, Any]) -> bool:
    """Tells whether the tokenizer of a folder gives a model the types of tokens, as Transformers' class does."""
    named = tokenizer.get("model_input_names")
    return "token_type_ids" in named if isinstance(named, list) else tokenizer.get("tokenizer_class") != "TokenizersBackend"


def _score_activation(folder: Path, said: Mapping[str, Any]) -> str | None:
    config = _optional(folder / "config.json")
    nested = config.get("sentence_transformers")
    named = said.get("activation_fn") or (nested.get("activation_fn") if isinstance(nested, dict) else None)
    return _activation(named or config.get("sbert_ce_default_activation_function") or "Sigmoid", folder)


def _activation(name: Any, folder: Path) -> str | None:
    last = str(name).rpartition(".")[2]
    if last not in _ACTIVATIONS:
        raise Unsupported(f"{folder} has activation {str(name)[:80]!r}; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[last]


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
