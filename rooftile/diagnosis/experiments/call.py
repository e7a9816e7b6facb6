"""A call that can be run again and again: on the same inputs each time, also where it writes to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rooftile.diagnosis.records import Sample
from rooftile.diagnosis.watching.compiled import GeneratedKernel

# arguments that are the size of a tensor's dimension, by their place: the tensor and the dimension
SIZES = {"native_group_norm": {3: (0, 0)}, "native_group_norm_backward": {5: (0, 0)}}


class RepeatableCall:
    """A function with its arguments. `tensors` are those among the arguments, in order, also the ones inside of lists.

    Args:
        function: runs without gradients.
        args: may hold tensors inside of lists, tuples and dictionaries.
        kwargs: likewise.
        written: which of the tensors a run changes; None: found by the schema of an operator, else by a run.
    """

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None = None,
        written: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.function = function
        self._leaves, self._structure = pytree.tree_flatten((tuple(args), kwargs or {}))
        self.tensors: list[torch.Tensor] = [_plain(leaf) for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        self.args, self.kwargs = self.filled(self.tensors)
        self._written = written
        self._originals: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    @classmethod
    def of(cls, sample: Sample) -> RepeatableCall:
        """Returns the recorded call."""
        written = None
        if isinstance(sample.function, GeneratedKernel):
            # machine code counts no version of what it writes, but its arguments' names tell
            given = [use for use, x in zip(sample.function.uses, sample.args, strict=False) if isinstance(x, torch.Tensor)]
            written = [n for n, use in enumerate(given) if use == "in_out"]
        return cls(sample.function, sample.args, sample.kwargs, written)

    @property
    def device(self) -> torch.device:
        """The device of its first tensor on one that is not the CPU, else the CPU."""
        return next((x.device for x in self.tensors if x.device.type != "cpu"), torch.device("cpu"))

    @property
    def written(self) -> Sequence[int]:
        """The tensors that a run changes, by their places."""
        if self._written is None:
            self._written = self._changed() if _may_write(self.function) else ()
        return self._written

    def filled(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with other things in place of the tensors."""
        others = iter(tensors)
        leaves = [next(others) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return args, kwargs

    def on(self, tensors: Sequence[torch.Tensor]) -> RepeatableCall:
        """Returns the same call on other tensors."""
        args, kwargs = self.filled(tensors)
        sizes = {place: tensors[which].shape[dim] for place, (which, dim) in SIZES.get(operator_name(self.function), {}).items()}
        args = tuple(sizes.get(place, value) for place, value in enumerate(args))
        return RepeatableCall(self.function, args, kwargs, self._written)

    def with_argument(self, place: int, value: Any) -> RepeatableCall:
        """Returns the call with another value of a positional argument that is no tensor."""
        args = list(self.args)
        args[place] = value
        return RepeatableCall(self.function, args, self.kwargs, self._written)

    def run(self) -> Any:
        """Runs it and returns its result."""
        with torch.no_grad():
            return self.function(*self.args, **self.kwargs)

    def restore(self) -> None:
        """Gives arguments that a run has changed their values back."""
        if self._originals is None:
            self._originals = [(self.tensors[n], self.tensors[n].clone()) for n in self.written]
        for changed, original in self._originals:
            changed.copy_(original)

    def bytes(self, places: Sequence[int] | None = None) -> int:
        """Returns the bytes of the arguments (of all, or of arguments with these indices) and of the results. Runs it once."""
        # lists that were cut have fewer tensors
        read = self.tensors if places is None else [self.tensors[place] for place in places if place < len(self.tensors)]
        self.restore()
        results = [x for x in pytree.tree_leaves(self.run()) if isinstance(x, torch.Tensor)]
        return sum(held_bytes(x) for x in [*read, *results])

    def _changed(self) -> list[int]:
        """Runs it once and sees what changes, by the tensors' versions."""
        copies, versions = [x.clone() for x in self.tensors], [x._version for x in self.tensors]
        try:
            self.run()
        finally:
            found = [n for n, x in enumerate(self.tensors) if x._version != versions[n]]
            for n in found:
                self.tensors[n].copy_(copies[n])
        return found


def operator_name(function: Callable[..., object]) -> str:
    """Returns "addmm" of torch.ops.aten.addmm.default; other functions have their own name."""
    packet = getattr(function, "overloadpacket", function)
    return str(getattr(packet, "__name__", type(packet).__name__))


def held_bytes(x: torch.Tensor) -> int:
    """Returns the bytes of a tensor's distinct elements: an expanded dimension holds one."""
    elements = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * x.element_size()


def _plain(x: torch.Tensor) -> torch.Tensor:
    """A tensor without a gradient whose version counts writes, which an inference tensor's does not."""
    return x.clone() if x.is_inference() else x.detach()


def _may_write(function: Callable[..., Any]) -> bool:
    """A schema says whether an operator writes to an argument; any other function may."""
    schema = getattr(function, "_schema", None)
    return schema is None or schema.is_mutable
