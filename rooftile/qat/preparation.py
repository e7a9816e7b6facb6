"""`prepare` and what belongs to it: `restore`, `off`, `status`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import nn

from rooftile import shown
from rooftile.errors import InvalidInput
from rooftile.matmul.formats import group_of, parsed, weight_format
from rooftile.matmul.quantise import check_rule
from rooftile.matmul.weight import dequantised
from rooftile.numerics.block_floating import RULES, Rule
from rooftile.qat.codes import Rounding, inside
from rooftile.qat.layers import PREPARED, Preparation, Prepared, described, prepare_layer, restore_layer, word_of
from rooftile.qat.learned import RANGES, first_scales
from rooftile.qat.masking import Masking
from rooftile.qat.patterns import SKIPPED, check_patterns, means, skip_given, skipped
from rooftile.qat.product import ACTIVATIONS, ESTIMATORS
from rooftile.qat.sharded import whole
from rooftile.qat.slow import Told
from rooftile.sparsity import Recipe, compress
from rooftile.words import answers_foreign_words

Model = TypeVar("Model", bound=nn.Module)


@runtime_checkable
class Planned(Protocol):
    """A plan of formats, as `rooftile.plan` returns it."""

    def prepare(
        self, model: Any, *, estimator: str = "straight", start_step: int = 0, sparsity: Recipe | None = None
    ) -> Any:
        """Prepares the model that it is for."""


@answers_foreign_words
def prepare(
    model: Model, format: str | Mapping[str, str | None] | Planned | None, *, group: int | None = None,
    skip: Sequence[str] = SKIPPED, estimator: str = "straight", start_step: int = 0, activations: str | None = None,
    rule: Rule = "floor", sparsity: Recipe | None = None,
) -> Model:  # fmt: skip
    """Makes linear layers multiply with rounded or 2:4 weights, so that training makes up for what that costs.

    The forward of a layer is the product that serves it: codes and scales are those of `rooftile.quantise_weight`, and formats
    that quantise activations (fp8, fp8_tile, int8) do so here, too. Gradients are those of the rounded numbers; scales count as
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
    if activations is not None and (not isinstance(activations, str) or activations not in ACTIVATIONS):
        raise InvalidInput(
            f"activations are {activations!r}; must be {' or '.join(map(repr, ACTIVATIONS))}, or None for what the format says"
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
    found = dict(_prepared(model))
    if found:
        raise InvalidInput(f"{next(iter(found))} is prepared already; restore the model first")
    chosen = _chosen(model, format, group, skip, estimator, activations, rule)
    for name, (layer, rounding) in chosen.items():
        if rounding is None:
            _check_masked_alone(name, layer, estimator, activations)
        else:
            _check_fits(name, layer, rounding)
        _check_sparse(name, layer, sparsity)
    # layers that share a weight share its scales
    scales: dict[int, nn.Parameter] = {}
    told = Told()
    for name, (layer, rounding) in chosen.items():
        if rounding is not None and estimator == "lsq" and id(layer.weight) not in scales:
            # all numbers of a 2:4 weight count, because what is left out may come back
            first = first_scales(layer.weight, rounding.format, rounding.group)  # type: ignore[arg-type]
            scales[id(layer.weight)] = nn.Parameter(first)
        # rows of an embedding are looked up, so half of their numbers would save nothing
        masking = None if sparsity is None or isinstance(layer, nn.Embedding) else Masking(sparsity)
        preparation = Preparation(rounding, name, start_step, masking=masking, told=told)
        try:
            prepare_layer(layer, preparation, scales.get(id(layer.weight)))
        except InvalidInput:
            # a weight with NaN has no mask
            restore(model)
            raise
    return model


def restore(model: Model) -> Model:
    """Undoes `prepare`, and returns the model. Weights stay as they were trained.

    Raises:
        InvalidInput: the model is not prepared.
    """
    for _, layer in prepared_layers(model):
        restore_layer(layer)
    return model


@contextmanager
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


@dataclass(frozen=True, slots=True)
class LayerStatus:
    """One layer: its name, format, numbers, bytes when served, relative error by rounding and masking, share that is clipped,
    steps, and for 2:4 the share of places that changed when the mask was last chosen anew."""

    name: str
    format: str
    numbers: int
    nbytes: int
    error: float
    clipped: float
    steps: int
    flips: float | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """The prepared layers of a model; `print` it for a table."""

    layers: tuple[LayerStatus, ...]

    def __repr__(self) -> str:
        formats = ", ".join(dict.fromkeys(one.format for one in self.layers))
        numbers, nbytes = (sum(getattr(one, name) for one in self.layers) for name in ("numbers", "nbytes"))
        return f"Status({shown.counted(len(self.layers), 'layer')} in {formats}: {numbers:,} numbers, {nbytes:,} bytes)"

    def _repr_html_(self) -> str:
        rows = (
            (
                one.name, one.format, f"{one.numbers:,}", f"{one.nbytes:,}", f"{one.error:.2%}", f"{one.clipped:.2%}",
                f"{one.steps:,}", "-" if one.flips is None else f"{one.flips:.2%}",
            )
            for one in self.layers
        )  # fmt: skip
        head = ("layer", "format", "numbers", "bytes", "error", "clipped", "steps", "flips")
        return shown.card(shown.table(head, rows, words=(0, 1)))

    def __str__(self) -> str:
        width = max(len("layer"), *(len(one.name) for one in self.layers))
        words = max(9, *(len(one.format) for one in self.layers))
        heads = f"{'error':>8} {'clipped':>8} {'steps':>6} {'flips':>8}"
        lines = [f"{'layer':{width}}  {'format':{words}} {'numbers':>12} {'bytes':>12} {heads}"]
        for one in self.layers:
            flips = "-" if one.flips is None else f"{one.flips:.2%}"
            sizes = f"{one.numbers:12,} {one.nbytes:12,} {one.error:8.2%} {one.clipped:8.2%} {one.steps:6,} {flips:>8}"
            lines.append(f"{one.name:{width}}  {one.format:{words}} {sizes}")
        return "\n".join(lines)


def status(model: nn.Module) -> Status:
    """Returns what each prepared layer rounds to or keeps, and what that changes now.

    The error is the norm of what rounding and masking change over the norm of the weight; "clipped" is the share of weights that
    lie more than half a code beyond the format's numbers.

    Raises:
        InvalidInput: the model is not prepared.
    """
    return Status(tuple(_status(name, layer) for name, layer in prepared_layers(model)))


def _status(name: str, layer: Prepared) -> LayerStatus:
    w, kept = whole(layer.weight).detach().float(), layer.kept_weight().detach()
    clipped, masking = 0.0, layer.qat.masking
    if layer.qat.rounding is None:
        nbytes, rounded = compress(kept, layer.mask).nbytes, kept.float()
    else:
        codes = layer.codes()
        nbytes, rounded = codes.nbytes, dequantised(codes.parts, codes.format, codes.group, codes.shape, w.dtype)
        clipped = 1.0 - inside(kept, codes).float().mean().item()
    size = w.norm().item()
    error = (rounded - w).norm().item() / size if size else 0.0
    flips = None if masking is None else 0.0 if masking.flips is None else masking.flips.item()
    return LayerStatus(name, described(layer.qat), w.numel(), nbytes, error, clipped, layer.qat.steps, flips)


def prepared_layers(model: nn.Module) -> list[tuple[str, Prepared]]:
    """Returns the prepared layers by their names.

    Raises:
        InvalidInput: there is none.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model is {type(model).__name__}; must be a torch.nn.Module")
    found = list(_prepared(model))
    if not found:
        raise InvalidInput("the model is not prepared; call rooftile.qat.prepare first")
    return found


def _prepared(model: nn.Module) -> Iterator[tuple[str, Prepared]]:
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model is {type(model).__name__}; must be a torch.nn.Module")
    return ((name, layer) for name, layer in model.named_modules() if isinstance(layer, Prepared))


def _chosen(
    model: nn.Module, format: str | Mapping[str, str | None] | None, group: int | None, skip: Sequence[str], estimator: str,
    activations: str | None, rule: Rule,
) -> dict[str, tuple[nn.Module, Rounding | None]]:  # fmt: skip
    """The layers to prepare by their names; each layer once, however many names it has."""
    if isinstance(format, Mapping):
        if group is not None:
            raise InvalidInput(f"group is {group} and format a dictionary; write the group into its words, as in 'int4:{group}'")
        if skip_given(skip) is not None:
            raise InvalidInput(f"skip is {skip!r} and format a dictionary; write {{pattern: 'auto'}} into it for what stays")
        words = dict(format)
        kinds: tuple[type[nn.Module], ...] = tuple(PREPARED)
    else:
        kinds = (nn.Linear,)
    layers = {name: layer for name, layer in model.named_modules() if type(layer) in kinds}
    if not layers:
        raise InvalidInput(f"{type(model).__name__} has no layer of the class nn.Linear itself, so there is nothing to prepare")
    if isinstance(format, Mapping):
        check_patterns("format", words, list(layers), list(layers))
    else:
        words = {**dict.fromkeys(skipped(skip, model, list(layers)), "auto"), "*": format}
    chosen: dict[str, tuple[nn.Module, Rounding | None]] = {}
    for name, layer in layers.items():
        word = next((word for pattern, word in words.items() if means(pattern, name)), "auto")
        if word == "auto":
            continue
        if word is None:
            chosen[name] = layer, None
            continue
        kind, its_group = parsed(word)
        if group is not None and its_group is not None:
            raise InvalidInput(f"group is {group!r} and format {word!r}, which has its own; leave group out")
        # an embedding has no activations
        inputs = None if isinstance(layer, nn.Embedding) else activations
        its_rule = rule if weight_format(kind).has_exponents else RULES[0]
        chosen[name] = layer, Rounding(kind, its_group if its_group is not None else group, estimator, inputs, its_rule)
    if not chosen:
        raise InvalidInput(f"format leaves all {len(layers)} layers as they are; give one of them a format")
    has_exponents = any(rounding and weight_format(rounding.format).has_exponents for _, rounding in chosen.values())
    check_rule(rule, has_exponents, "no layer is in such a format")
    return chosen


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


def _check_sparse(name: str, layer: nn.Module, sparsity: Recipe | None) -> None:
    if sparsity is None or not isinstance(layer, nn.Linear):
        return
    rows, columns = layer.weight.shape
    if columns % 4 or (sparsity.transposable and rows % 4):
        due = "both sizes must be multiples of 4" if sparsity.transposable else "K must be a multiple of 4"
        raise InvalidInput(f"{name}.weight ({rows}, {columns}) cannot be 2:4; {due}: skip this layer")
    if not layer.weight.requires_grad:
        raise InvalidInput(f"{name}.weight is frozen, and 2:4 trains all of a weight; unfreeze it, or skip this layer")


def _check_masked_alone(name: str, layer: nn.Module, estimator: str, activations: str | None) -> None:
    """Checks a layer that is not rounded."""
    if isinstance(layer, nn.Embedding):
        raise InvalidInput(f"{name} is an embedding, and its format is None; only linear layers are made 2:4: leave it out")
    if activations is not None:
        raise InvalidInput(
            f"{name} has the format None and its activations {activations}; both must be in one format: give it {activations}, "
            "or leave activations out"
        )
    if estimator == "lsq":
        raise InvalidInput(f"{name} has the format None; lsq learns scales of {', '.join(RANGES)}: take another estimator")


def _check_fits(name: str, layer: nn.Module, rounding: Rounding) -> None:
    assert isinstance(layer, nn.Linear | nn.Embedding)
    rows, columns = layer.weight.shape
    if not layer.weight.numel():
        raise InvalidInput(f"{name}.weight ({rows}, {columns}) has no numbers; skip this layer")
    if rounding.activations not in (None, rounding.format):
        raise InvalidInput(
            f"{name} is {rounding.format} and its activations {rounding.activations}; both must be in one format: give it "
            f"{rounding.activations}, or leave activations out"
        )
    if rounding.estimator == "lsq" and rounding.format not in RANGES:
        raise InvalidInput(f"{name} is {rounding.format}; lsq learns scales of {', '.join(RANGES)}: take another estimator")
    try:
        group_of(weight_format(rounding.format), columns, rounding.group)
    except InvalidInput as error:
        raise InvalidInput(f"{name}.weight ({rows}, {columns}) cannot be {word_of(rounding)}: {error}") from None
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.sparse):
        raise InvalidInput(f"{name} is an embedding with max_norm or sparse gradients; prepare it without, or leave it out")
