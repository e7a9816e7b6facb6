"""`quantise_model`: a whole model rounded to nearest, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import nn

from rooftile.errors import InvalidInput
from rooftile.numerics.block_floating import RULES, Rule
from rooftile.qat.convert import convert
from rooftile.qat.coverage import coverage_of
from rooftile.qat.patterns import SKIPPED, skip_given
from rooftile.qat.preparation import check_planned, prepare, restore
from rooftile.runtime.words import answers_foreign_words

Model = TypeVar("Model", bound=nn.Module)


@runtime_checkable
class Applied(Protocol):
    """A plan of formats, as `rooftile.plan` returns it."""

    def apply(self, model: Any) -> Any:
        """Quantises the model that it is for."""


@answers_foreign_words
def quantise_model(
    model: Model, format: str | Mapping[str, str] | Applied, *, group: int | None = None, rule: Rule = "floor",
    skip: Sequence[str] = SKIPPED, verbose: bool = True,
) -> Model:  # fmt: skip
    """Quantises the linear layers of a model in place, by rounding to nearest, and returns it.

    Each layer becomes a `rooftile.qat.QuantisedLinear` with the codes of `rooftile.quantise_weight`. Nothing is calibrated:
    methods that look at data (GPTQ, AWQ) are llm-compressor's, whose checkpoints `rooftile.LLM` reads; `rooftile.qat.prepare`
    trains.

    Args:
        model: any module. Layers whose class is `nn.Linear` itself, and `nn.Embedding` where a pattern names it.
        format: a word of `rooftile.quantise_weight`, also with a group ("int4:32", "int4:row"); {pattern of names: word}, of
            which the first that matches counts; or what `rooftile.plan` returned for this model, as its `apply` does.
        group: of int4: 32, 64, 128 (the default) or -1, a whole row, share a scale.
        rule: of mxfp8 and mxfp4, how powers of two follow from numbers, as in `rooftile.quantise_weight`: "floor" or "round_up".
        skip: patterns of layers that stay, where `format` is one word; all but the default must match one.
        verbose: prints in one line which share of the weights is quantised, and what is left out.

    Raises:
        InvalidInput: nothing is there to quantise, a pattern matches nothing, or a weight does not fit its format; the model is
            then as it was.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        >>> rooftile.quantise_model(model, {"0": "int4:32"})[0].quantised
        QuantisedWeight((64, 64), int4, group of 32, 2,304 bytes on cpu)
    """
    if isinstance(format, Applied):
        check_planned(group=group, rule=None if rule == RULES[0] else rule, skip=skip_given(skip))
        applied: Model = format.apply(model)
        return applied
    prepare(model, format, group=group, rule=rule, skip=skip, verbose=False)
    coverage = coverage_of(model, "quantised")
    try:
        convert(model)
    except InvalidInput:
        restore(model)
        raise
    if verbose:
        print(coverage)  # noqa: T201 -- the line is for the terminal
    return model
