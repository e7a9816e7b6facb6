"""`quantise_model`: a whole model rounded to nearest, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import nn

from rooftile.errors import InvalidInput
from rooftile.numerics.block_floating import Rule
from rooftile.qat.patterns import SKIPPED
from rooftile.qat.preparation import prepare, restore
from rooftile.qat.quantised_linear import convert
from rooftile.words import answers_foreign_words

Model = TypeVar("Model", bound=nn.Module)


class Planned(Protocol):
    """A plan of formats: `weights` is a dictionary {name of a module: format}, or "auto" where all stay as they are."""

    @property
    def weights(self) -> Mapping[str, str] | str:
        """The formats."""


@answers_foreign_words
def quantise_model(
    model: Model, format: str | Mapping[str, str] | Planned, *, group: int | None = None, rule: Rule = "floor",
    skip: Sequence[str] = SKIPPED,
) -> Model:  # fmt: skip
    """Quantises the linear layers of a model in place, by rounding to nearest, and returns it.

    Each layer becomes a `rooftile.qat.QuantisedLinear` with the codes of `rooftile.quantise_weight`. Nothing is calibrated:
    methods that look at data (GPTQ, AWQ) are llm-compressor's, whose checkpoints `rooftile.LLM` reads; `rooftile.qat.prepare`
    trains.

    Args:
        model: any module. Layers whose class is `nn.Linear` itself, and `nn.Embedding` where a pattern names it.
        format: a word of `rooftile.quantise_weight`, also with a group ("int4:32", "int4:row"); {pattern of names: word}, of
            which the first that matches counts; or a plan, whose `weights` is such a dictionary.
        group: of int4: 32, 64, 128 (the default) or -1, a whole row, share a scale.
        rule: of mxfp8 and mxfp4, how powers of two follow from numbers, as in `rooftile.quantise_weight`: "floor" or "round_up".
        skip: patterns of layers that stay, where `format` is one word; all but the default must match one.

    Raises:
        InvalidInput: nothing is there to quantise, a pattern matches nothing, or a weight does not fit its format; the model is
            then as it was.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        >>> rooftile.quantise_model(model, {"0": "int4:32"})[0].quantised
        QuantisedWeight((64, 64), int4, group of 32, 2,304 bytes on cpu)
    """
    is_plan = not isinstance(format, str | Mapping) and hasattr(format, "weights")
    words: Any = format.weights if is_plan else format  # type: ignore[union-attr]
    if is_plan and words == "auto":
        return model
    prepare(model, words, group=group, rule=rule, skip=skip)
    try:
        return convert(model)
    except InvalidInput:
        restore(model)
        raise
