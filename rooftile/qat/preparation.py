"""`prepare` and what belongs to it: `restore`, `off`, `status`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import nn

from rooftile.errors import InvalidInput
from rooftile.numerics.block_floating import MX_ACTIVATIONS, RULES, Rule
from rooftile.qat.coverage import coverage_of
from rooftile.qat.foreign import check_not_quantised
from rooftile.qat.patterns import SKIPPED, skip_given
from rooftile.qat.prepared import fast_paths
from rooftile.qat.prepared.described import Preparation
from rooftile.qat.prepared.found import prepared_in, prepared_layers
from rooftile.qat.prepared.layers import Prepared, prepare_layer, restore_layer
from rooftile.qat.prepared.tensors import NamedWeight, PreparedModule, prepare_tensor, restore_module
from rooftile.qat.rounding.learned import first_scales
from rooftile.qat.rounding.masking import Masking
from rooftile.qat.rounding.product import ESTIMATORS
from rooftile.qat.rounding.slow import SlowFormatWarning
from rooftile.qat.selection import check_fits, check_masked_alone, check_sparse, chosen_in
from rooftile.qat.sharded import writes
from rooftile.qat.shared import check_shared
from rooftile.runtime.words import answers_foreign_words
from rooftile.weights.two_four import Recipe

Model = TypeVar("Model", bound=nn.Module)


@runtime_checkable
class Planned(Protocol):
    """A plan of formats, as `rooftile.plan` returns it."""

    def prepare(self, model: Any, *, estimator: str = "straight", start_step: int = 0, sparsity: Recipe | None = None) -> Any:
        """Prepares the model that it is for."""


@answers_foreign_words
def prepare(
    model: Model, format: str | Mapping[str, str | None] | Planned | None, *, group: int | None = None,
    skip: Sequence[str] = SKIPPED, estimator: str = "straight", start_step: int = 0, activations: str | None = None,
    rule: Rule = "floor", sparsity: Recipe | None = None, verbose: bool = True,
) -> Model:  # fmt: skip
    """Makes linear layers multiply with rounded or 2:4 weights, so that training makes up for what that costs.

    The forward of a layer is the product that serves it: codes and scales come from `rooftile.quantise_weight`, and formats
    that quantise activations (fp8, fp8_tile, int8) do so here, too. Gradients belong to the rounded numbers; scales count as
    constants. Parameters stay the same tensors under the same names, so optimisers and state dicts see no difference.

    A GPU without FP8 units computes fp8 and fp8_tile by the definition, and a warning says so.

    Args:
        model: any module; changed in place. Only layers whose class is `nn.Linear` itself are rounded, and `nn.Embedding` where
            a pattern names it (its weights alone).
        format: a word of `rooftile.quantise_weight`, also with a group ("int4:32", "int4:row"); or {pattern of names: word}, of
            which the first that matches counts ("auto" leaves a layer as it is). A pattern has * and ?, or is a regular
            expression after "re:". Or what `rooftile.plan` returned for this model. None rounds nothing, and needs `sparsity`.
        group: of int4: 32, 64, 128 (the default) or -1, a whole row, share a scale.
        skip: patterns of layers that stay, where `format` is one word; all but the default must match one.
        estimator: "straight": the gradient of a rounded weight is the weight's; "clip": it is 0 for weights that lie more than
            half a code beyond the format's numbers; "lsq", for int4, w8 and int8: scales are parameters, too (`weight_scale` of
            each layer, fp32, in state dicts), and have a gradient. Make the optimiser after `prepare`, so that it holds them, and
            load weights before it, since the first scales follow from them.
        start_step: the step from which on weights are rounded. The `torch.optim.Optimizer` that holds a weight counts its steps,
            from now on. They are no part of a state dict: `rooftile.qat.state_dict` has them.
        activations: "mxfp4" or "mxfp8", for layers in that format: their inputs are rounded to it, too, 32 numbers of a row to a
            power of two. No kernel here multiplies them, so it is computed by the definition: slower than without.
        rule: of mxfp8 and mxfp4, how powers of two follow from numbers, as in `rooftile.quantise_weight`: "floor" or "round_up".
        sparsity: makes the weights of the linear layers 2:4: masked first, then rounded with the scales of what is kept, or with
            learned ones. A mask is chosen anew after `refresh` steps of an optimiser, whose gradient gets the decay right before
            it steps.
        verbose: prints in one line which share of the weights is prepared, and what is left out.

    Returns:
        The model.

    Raises:
        InvalidInput: nothing is there to prepare, a pattern matches nothing, a layer is prepared already, a format or 2:4 does
            not fit the shape of a weight, or a weight to be made 2:4 is frozen; one that is frozen later is refused by the
            forward in training. A weight that holds NaN or infinity is refused by the forward; in training on a GPU, after the
            optimiser's first step, by `optimizer.step()` one step later, so that no forward waits for the device.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        >>> rooftile.qat.prepare(model, {"0": "int4:32", "2": "int8"})
        >>> model(torch.randn(3, 64)).sum().backward()

    Jacob et al., arXiv:1712.05877; Bengio et al., arXiv:1308.3432; Esser et al., arXiv:1902.08153 ("lsq").
    """
    if activations is not None and (not isinstance(activations, str) or activations not in MX_ACTIVATIONS):
        raise InvalidInput(
            f"activations are {activations!r}; must be {' or '.join(map(repr, MX_ACTIVATIONS))}, or None for what the format says"
        )
    if estimator not in ESTIMATORS:
        raise InvalidInput(f"estimator is {estimator!r}; must be one of {', '.join(ESTIMATORS)}")
    # NumPy's integers are integers
    step: object = start_step
    if isinstance(step, bool) or not isinstance(step, Integral) or step < 0:
        raise InvalidInput(f"start_step is {start_step!r}; must be a number of steps, 0 or more")
    start_step = int(step)
    _check_sparsity(format, sparsity)
    if isinstance(format, Planned):
        ruled = None if rule == RULES[0] else rule
        check_planned(group=group, activations=activations, rule=ruled, skip=skip_given(skip))
        planned: Model = format.prepare(model, estimator=estimator, start_step=start_step, sparsity=sparsity)
        return planned
    found = dict(prepared_in(model))
    if found:
        raise InvalidInput(f"{next(iter(found))} is prepared already; restore the model first")
    check_not_quantised(model)
    chosen = chosen_in(model, format, group, skip, estimator, activations, rule, sparsity is not None)
    for name, (layer, rounding) in chosen.items():
        if rounding is None:
            check_masked_alone(name, layer, estimator, activations)
        else:
            check_fits(name, layer, rounding)
        check_sparse(name, layer, sparsity)
    # layers that share a weight share its scales
    scales: dict[int, nn.Parameter] = {}
    warning = SlowFormatWarning()
    for name, (layer, rounding) in chosen.items():
        if rounding is not None and estimator == "lsq" and id(layer.weight) not in scales:
            # all numbers of a 2:4 weight count, because what is left out may come back
            first = first_scales(layer.weight, rounding.format, rounding.group)  # type: ignore[arg-type]
            scales[id(layer.weight)] = nn.Parameter(first)
        # rows of an embedding are looked up, so half of their numbers would save nothing
        masking = None if sparsity is None or isinstance(layer, nn.Embedding | NamedWeight) else Masking(sparsity)
        preparation = Preparation(rounding, name, start_step, masking=masking, warning=warning)
        if isinstance(layer, NamedWeight):
            prepare_tensor(layer, preparation)
            continue
        try:
            prepare_layer(layer, preparation, scales.get(id(layer.weight)))
        except InvalidInput:
            # a weight with NaN has no mask
            restore(model)
            raise
    try:
        check_shared(model)
    except InvalidInput:
        restore(model)
        raise
    fast_paths.close(model, Prepared)
    if verbose and writes():
        print(coverage_of(model))  # noqa: T201 -- the line is for the terminal
    return model


@answers_foreign_words
def restore(model: Model) -> Model:
    """Undoes `prepare`, and returns the model. Weights stay as they were trained.

    Raises:
        InvalidInput: the model is not prepared.
    """
    for _, layer in prepared_layers(model):
        if isinstance(layer, Prepared):
            restore_layer(layer)
    for module in list(model.modules()):
        if isinstance(module, PreparedModule):
            restore_module(module)
    fast_paths.reopen(model)
    return model


@contextmanager
@answers_foreign_words
def off(model: nn.Module) -> Iterator[None]:
    """Computes without rounding inside the block, to compare with.

    Raises:
        InvalidInput: the model is not prepared.

    Example:
        >>> with rooftile.qat.off(model):
        ...     full = loss(model, data)
    """
    # a layer that is restored inside of the block has no state any more
    states = [layer.qat for _, layer in prepared_layers(model)]
    for state in states:
        state.ignored += 1
    try:
        yield
    finally:
        for state in states:
            state.ignored -= 1


def check_planned(**given: object) -> None:
    """Raises InvalidInput for an argument that stands beside a plan."""
    for name, value in given.items():
        if value is not None:
            raise InvalidInput(f"{name} is {value!r} and format a plan, which has chosen and timed its own; leave {name} out")


def _check_sparsity(format: object, sparsity: object) -> None:
    if sparsity is not None and not isinstance(sparsity, Recipe):
        raise InvalidInput(f"sparsity is {sparsity!r}; must be a rooftile.sparsity.Recipe, or None")
    words = format.values() if isinstance(format, Mapping) else (format,)
    if sparsity is None and None in words:
        raise InvalidInput("format is None and so is sparsity, so nothing would change; give one of them")
