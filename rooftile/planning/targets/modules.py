"""A module as the target of a plan: its linear layers, seen by hooks while it runs on its inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from rooftile.diagnosis.programs.arguments import arguments_of
from rooftile.diagnosis.programs.diagnose_call import run_backward
from rooftile.diagnosis.programs.unchanged import unchanged
from rooftile.errors import InvalidInput, Unsupported
from rooftile.planning.costs import DeviceCeilings
from rooftile.planning.records import Load, Other, Part
from rooftile.planning.targets.others import others_of
from rooftile.planning.targets.outputs import batches_of, first_tensor, loss_over
from rooftile.planning.targets.recording import Recording, computed_in
from rooftile.planning.targets.target import Item
from rooftile.qat.coverage import coverage_of
from rooftile.qat.foreign import check_not_quantised
from rooftile.qat.patterns import means, skipped
from rooftile.qat.prepared.found import prepared_in
from rooftile.qat.rounding.codes import Rounding
from rooftile.qat.rounding.product import linear as rounded_linear
from rooftile.weights.dispatch import lack_of_fp8
from rooftile.weights.files.formats import weight_in
from rooftile.weights.formats import parsed
from rooftile.weights.linear import linear


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the module that torch.compile has wrapped, or the module itself."""
    return cast("nn.Module", getattr(model, "_orig_mod", model))


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer is a plain product: nn.Linear itself, or the Conv1D of Transformers' GPT-2."""
    of_transformers = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return type(layer) is nn.Linear or type(layer) is of_transformers


def weight_of(layer: nn.Module) -> Tensor:
    """Returns the weight (N, K) of a layer: Conv1D keeps its as (K, N)."""
    weight = cast("Tensor", layer.weight).detach()
    return weight if isinstance(layer, nn.Linear) else weight.T


class ModuleTarget:
    """A module with its inputs.

    Args:
        model: any module.
        inputs: of its forward, in their order; or one dictionary of them by their names.
        skip: patterns of names of layers that stay as they are.
        backward: whether a step has a backward, too.

    Raises:
        InvalidInput: the model has no linear layer, its inputs reach none, `skip` has a pattern that matches none, or it is on
            several devices.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Any], skip: Sequence[str] | str, *, backward: bool) -> None:
        self._model, self._backward = unwrapped(model), backward
        self._args, self._kwargs = arguments_of(self._model, inputs)
        self.name = type(self._model).__name__
        layers = {name: layer for name, layer in self._model.named_modules() if is_linear(layer)}
        check_not_quantised(self._model)
        prepared = next((name for name, _ in prepared_in(self._model)), None)
        if prepared is not None:
            raise InvalidInput(f"{prepared} is prepared for training; restore the model first: rooftile.qat.restore(model)")
        if not layers:
            raise InvalidInput(f"{self.name} has no linear layer of the class nn.Linear itself, so there is nothing to plan")
        skip = skipped(skip, self._model, list(layers))
        self._recording = Recording(layers)
        # losses are measured later, with the buffers as they are now
        with unchanged(self._model.buffers()), self._recording:
            self.run()
        calls = self._recording.calls
        if not calls:
            raise InvalidInput(f"the inputs reach none of the {len(layers)} linear layers of {self.name}; give inputs that do")
        self.items = [self._item(group, layers, skip) for group in self._recording.groups()]

    @property
    def coverage(self) -> str:
        """Says which share of the weights is planned, and what is left out."""
        planned = [self._model.get_submodule(part.name) for item in self.items if not item.fixed for part in item.parts]
        return str(coverage_of(self._model, "planned", planned))

    def run(self) -> None:
        """Runs a step: the model on its inputs, and the backward of the sum of its outputs if there is one."""
        with _without_fast_paths(), torch.set_grad_enabled(self._backward):
            result = self._model(*self._args, **self._kwargs)
            if self._backward:
                run_backward(result)

    def step(self) -> list[tuple[float, Callable[[], Any]]]:
        """Returns the run of the model, with its share of the steps, 1."""
        return [(1.0, self.run)]

    def output(self) -> Tensor:
        """Returns the first tensor that the model returns, with all modules in evaluation mode."""
        return self._evaluated(lambda: first_tensor(self._model(*self._args, **self._kwargs)))

    def others(self, machine: DeviceCeilings) -> list[Other]:
        """Returns the operators outside of linear layers."""
        return others_of(self._recording.watch, self._recording.in_layers, machine, self.name)

    def loss(self, data: Any) -> Callable[[], float]:
        """Returns what computes the mean loss on data, with all modules in evaluation mode."""
        if callable(data):
            return lambda: _number(self._evaluated(lambda: data(self._model)))
        batches = batches_of(data)
        return lambda: self._evaluated(lambda: loss_over(self._model, batches))

    @contextmanager
    def rounded(self, item: Item, word: str) -> Iterator[None]:
        """Within the block the item's layers multiply in a format."""
        with ExitStack() as stack:
            for part in item.parts:
                layer = self._model.get_submodule(part.name)
                compute = _trained(layer, word) if self._backward else _served(layer, part.name, word)
                stack.enter_context(_computing(layer, compute))
            yield

    def _evaluated(self, compute: Callable[[], Any]) -> Any:
        flags = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            with torch.no_grad(), _without_fast_paths():
                return compute()
        finally:
            for module, training in flags:
                module.training = training

    def _item(self, names: Sequence[str], layers: dict[str, nn.Module], skip: Sequence[str]) -> Item:
        members = [layers[name] for name in names]
        first = self._recording.calls[names[0]]
        parent = names[0].rpartition(".")[0]
        name = names[0] + "".join(f", {one.removeprefix(f'{parent}.')}" for one in names[1:])
        return Item(
            name=name,
            parts=tuple(_part(one, layers[one]) for one in names),
            loads=tuple(Load(phase="step", rows=rows, calls=float(calls)) for rows, calls in first.rows.items()),
            dtype=first.dtype,
            weights=lambda: [weight_of(layer) for layer in members],
            biases=[cast("Tensor | None", layer.bias) for layer in members],
            sample=first.sample,
            trains=self._backward,
            needs_dx=first.needs_dx,
            fixed=next((why for one in names if (why := self._why_fixed(one, layers[one], skip))), ""),
        )

    def _why_fixed(self, name: str, layer: nn.Module, skip: Sequence[str]) -> str:
        if not name:
            return "the model itself is the layer, which has no place for another"
        for pattern in skip:
            if means(pattern, name):
                return f"skip has {pattern!r}"
        for other, module in self._model.named_modules():
            if module is not layer and any(weight is layer.weight for weight in module.parameters(recurse=False)):
                return f"it shares its weight with {other or 'the model'}"
        return ""


def _part(name: str, layer: nn.Module) -> Part:
    N, K = weight_of(layer).shape
    return Part(name=name, N=N, K=K)


def _served(layer: nn.Module, name: str, word: str) -> Callable[[Tensor], Tensor]:
    """The layer in a format, as it is served."""
    weight, bias = weight_in(weight_of(layer), word, name), cast("Tensor | None", layer.bias)
    return lambda x: linear(x, weight, bias)


def _trained(layer: nn.Module, word: str) -> Callable[[Tensor], Tensor]:
    """The layer as `rooftile.qat.prepare` makes it, with gradients for its parameters."""
    rounding = Rounding(*parsed(word), "straight")
    if reason := lack_of_fp8(rounding.format, cast("Tensor", layer.weight).device):
        # it would be trained by the definition, which no plan for speed wants
        raise Unsupported(reason)

    def compute(x: Tensor) -> Tensor:
        weight, bias = cast("Tensor", layer.weight), cast("Tensor | None", layer.bias)
        x = x.to(computed_in(x))
        with torch.autocast(x.device.type, enabled=False):
            return rounded_linear(x, weight if isinstance(layer, nn.Linear) else weight.T, bias, rounding)

    return compute


@contextmanager
def _computing(layer: nn.Module, compute: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within the block a layer computes something else. Its parameters and its class stay."""
    before = vars(layer).get("forward")
    layer.forward = compute  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del layer.forward
        else:
            layer.forward = before  # type: ignore[method-assign]


@contextmanager
def _without_fast_paths() -> Iterator[None]:
    """Within the block PyTorch calls the layers inside its encoder layers, also in evaluation."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _number(found: Any) -> float:
    """Makes a number of what a function of the model returned."""
    try:
        return float(found)
    # PyTorch and Python raise different errors for what is no number
    except (TypeError, ValueError, RuntimeError):
        what = f"a tensor {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise InvalidInput(f"data returns {what}; must return the model's loss, one number") from None
