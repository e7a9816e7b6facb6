"""A ladder: the same operator with 0, 1, 2, 4, ... multiply-adds more per element, in the same pass over its data.

Inductor compiles each rung. It keeps compiled kernels on disk, so that only the first diagnosis of an operator and dtype on a
machine waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from rooftile.diagnosis.experiments import deadline as budget
from rooftile.diagnosis.experiments.call import RepeatableCall, operator_name
from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.experiments.intensity.multiply_adds import operator
from rooftile.diagnosis.experiments.smaller.rules import GATHERS
from rooftile.diagnosis.watching.compiled import GeneratedKernel
from rooftile.errors import Unsupported

_COMPILED: dict[tuple[Any, ...], Callable[..., Any]] = {}
# the seconds that each took
_TAKEN_S: list[float] = []
# ... and may take at first, when the compiler itself is loaded
FIRST_S = 6.0


class Ladder:
    """The rungs of a call.

    Args:
        call: the operator.
        deadline: nothing is compiled that is not expected to be ready by then; None: there is none.

    Raises Unsupported in one sentence where there are none: no compiler, no floating-point numbers, not one pass, no time.
    """

    def __init__(self, call: RepeatableCall, deadline: Deadline | None = None) -> None:
        self._deadline = deadline or Deadline()
        if isinstance(call.function, GeneratedKernel):
            raise Unsupported("it is a generated kernel, in whose pass nothing can be put")
        self._function = _functional(call)
        self._call = call
        results = _results(call)
        read = max((x for x in call.tensors if x.is_floating_point()), key=torch.Tensor.numel, default=None)
        made = max((x for x in results if x.is_floating_point()), key=torch.Tensor.numel, default=None)
        if made is None or not all(x.device == call.device for x in [*call.tensors, *results]):
            raise Unsupported("its result has no floating-point numbers on one device, so there is nothing to multiply")
        # the pass goes over the larger side: what a reduction reads, what an expansion writes
        gathers = operator_name(self._function) in GATHERS
        self._on_read = read is not None and not gathers and made.numel() < read.numel() // 2
        self.elements = read.numel() if self._on_read and read is not None else made.numel()
        self.dtype = made.dtype
        self._key = (
            operator_name(self._function), repr(call.filled(["tensor"] * len(call.tensors))), self._on_read,
            *((x.dtype, x.dim(), tuple(size == 1 for size in x.shape), _order(x)) for x in call.tensors),
        )  # fmt: skip

    def rung(self, count: int) -> RepeatableCall:
        """Returns the call with `count` multiply-adds more per element; compiled, and run once."""
        key = (*self._key, count, str(self._call.device))
        if count and (*self._key, 0, key[-1]) not in _COMPILED:
            # without added arithmetic, a kernel can only be the operator's own
            self.rung(0)
        if key not in _COMPILED:
            if not self.has_time_for(count):
                raise Unsupported("the budget ended before its kernels were compiled")
            start = budget.clock()
            _COMPILED[key] = self._compiled(count)
            _TAKEN_S.append(budget.clock() - start)
        return RepeatableCall(_COMPILED[key], tuple(self._call.tensors), written=self._call.written)

    def has_time_for(self, count: int) -> bool:
        """Returns whether a rung is compiled already, or is expected to be in time."""
        expected_s = 1.5 * median(_TAKEN_S[1:]) if len(_TAKEN_S) > 1 else FIRST_S
        return (*self._key, count, str(self._call.device)) in _COMPILED or self._deadline.allows(expected_s)

    def _compiled(self, count: int) -> Callable[..., Any]:
        from torch._inductor import metrics

        # no guard on the number of threads: arithmetic alone is timed on one
        options: dict[str, Any] = {"guard_filter_fn": _keep_guards}
        if self._call.device.type == "cpu":
            options["cpp.dynamic_threads"] = True
        graph = self._graph(count)
        before = metrics.generated_kernel_count
        try:
            made = torch.compile(graph, dynamic=True, fullgraph=True, options=options)
            with torch.no_grad():
                made(*[x.clone() if self._call.written else x for x in self._call.tensors])
        except Exception as error:
            # the compiler's errors have no common class; each is the reason why there is no ladder
            raise Unsupported(f"it cannot be compiled here: {_first_line(error)}") from error
        if metrics.generated_kernel_count == before:
            raise Unsupported("Inductor calls a library for it, so nothing can be added to its pass")
        return made

    def _graph(self, count: int) -> fx.GraphModule:
        """A module of its own for each rung: Dynamo compiles no function more than eight times."""
        graph = fx.Graph()
        nodes: list[Any] = [graph.placeholder(f"x{n}") for n in range(len(self._call.tensors))]
        placed = list(nodes)
        if count and self._on_read:
            at = max((n for n, x in enumerate(self._call.tensors) if x.is_floating_point()), key=self._numel)
            placed[at] = graph.call_function(operator(), (nodes[at], count))
        args, kwargs = self._call.filled(placed)
        result = graph.call_function(self._function, args, kwargs)
        graph.output(self._outputs(graph, nodes, result, count))
        return fx.GraphModule(torch.nn.Module(), graph)

    def _outputs(self, graph: fx.Graph, nodes: list[Any], result: Any, count: int) -> Any:
        shapes = pytree.tree_leaves(_results(self._call, functional=self._function))
        single = len(shapes) == 1
        outputs = [result] if single else [graph.call_function(getitem, (result, n)) for n in range(len(shapes))]
        at = max((n for n, x in enumerate(shapes) if x.is_floating_point()), key=lambda n: shapes[n].numel())
        if count and not self._on_read:
            outputs[at] = graph.call_function(operator(), (outputs[at], count))
        if self._call.written:
            return (graph.call_function(torch.ops.aten.copy_.default, (nodes[0], outputs[at])),)
        return tuple(outputs)

    def _numel(self, at: int) -> int:
        return self._call.tensors[at].numel()


def getitem(values: Sequence[Any], n: int) -> Any:
    """Returns one of several results."""
    return values[n]


def _results(call: RepeatableCall, functional: Callable[..., Any] | None = None) -> list[torch.Tensor]:
    call.restore()
    with torch.no_grad():
        found = call.run() if functional is None else functional(*call.args, **call.kwargs)
    call.restore()
    return [x for x in pytree.tree_leaves(found) if isinstance(x, torch.Tensor)]


def _functional(call: RepeatableCall) -> Callable[..., Any]:
    """The operator that returns what this one writes into its first argument."""
    name = operator_name(call.function)
    if not call.written:
        return call.function
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    overload = getattr(packet, getattr(call.function, "_overloadname", "default"), None)
    if overload is None or not name.endswith("_") or overload is call.function:
        raise Unsupported("it writes to its arguments, and has no form that returns the result instead")
    return overload


def _order(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(sorted(range(x.dim()), key=x.stride, reverse=True))


def _keep_guards(guards: Sequence[Any]) -> list[bool]:
    return [guard.guard_type != "GLOBAL_STATE" for guard in guards]


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
