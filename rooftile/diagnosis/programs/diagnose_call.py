"""Diagnoses one step: watches it, times it, experiments on its leading operators, and joins what was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from rooftile.diagnosis.counts.traffic import is_plain
from rooftile.diagnosis.diagnosis import Diagnosis
from rooftile.diagnosis.observer import Observer
from rooftile.diagnosis.programs.arguments import arguments_of
from rooftile.diagnosis.programs.unchanged import state_of, unchanged
from rooftile.diagnosis.remedies.apply import Trial, check, compile_price_noted, tried
from rooftile.diagnosis.remedies.remedy import COMPILE
from rooftile.diagnosis.watching.processes import are_several
from rooftile.diagnosis.watching.steps import Steps
from rooftile.errors import InvalidInput


def diagnose(
    function: Callable[..., Any] | nn.Module, *inputs: Any, backward: bool = False, apply: Sequence[str] = (),
    budget: float = 60.0, ncu: bool = False, **foreign: Any,
) -> Diagnosis:  # fmt: skip
    """Finds what bounds a function or module: memory, compute, overhead, the host; operator by operator and as a whole.

    The function is called some twenty times, and its leading operators some hundred times each on copies of their inputs. Where
    `torch.compile` would save something and the budget allows it, it is called compiled as well. Afterwards parameters,
    gradients, buffers, optimisers and the streams of random numbers are as before.

    Args:
        function: one step of a program: a module, or a function that may train one.
        inputs: its arguments; or one dictionary of them by their names, such as a tokenizer returns.
        backward: also run the backward, of the sum of all outputs that require a gradient.
        apply: remedies to try, so that their savings are measured beside the predictions: "graph", "compile", "attention",
            "dtype", "batch", "pad".
        budget: seconds that the experiments may take, beyond the steps themselves, what `apply` takes, and what is measured once
            on a machine. Nothing begins that is not expected to end in time; the notes say what was left out.
        ncu: also run the leading operators under Nsight Compute, and set the bytes that it counts beside the predicted ones.

    Returns:
        A `Diagnosis`: `print` it for the table, `to_json()` for a file.

    Raises:
        InvalidInput: the function is no callable, the budget is not positive, or `apply` names something else.

    Example:
        >>> model, x = torch.nn.Linear(64, 64), torch.randn(8, 64)
        >>> print(rooftile.diagnose(model, x, backward=True, apply=["compile"]))

    The method is Horace He's (Making Deep Learning Go Brrrr From First Principles): raise the arithmetic, or take away the
    traffic, and watch the time.
    """
    if foreign:
        word = next(iter(foreign))
        raise InvalidInput(
            f"diagnose has no argument {word!r}; for one of the function's own write "
            f"diagnose(function, {{{word!r}: ...}}), or diagnose(functools.partial(function, {word}=...), ...)"
        )
    if not callable(function):
        raise InvalidInput(f"diagnose takes a function or a module; got {type(function).__name__}")
    if not budget > 0:
        raise InvalidInput(f"budget is {budget}; must be a positive number of seconds")
    args, kwargs = arguments_of(function, inputs)
    return diagnose_call(function, args, kwargs, backward=backward, apply=apply, budget=budget, ncu=ncu)


def diagnose_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, backward: bool = False,
    apply: Sequence[str] = (), budget: float = 60.0, ncu: bool = False, compiles: bool = True,
    say: Callable[[str], None] = lambda words: None,
) -> Diagnosis:  # fmt: skip
    """Diagnoses function(*args, **kwargs), as `diagnose` does.

    compiles: also tries compiled code where it has a price and the budget allows it. say: is called with words about what is
    measured once on a machine.
    """
    apply = [apply] if isinstance(apply, str) else list(apply)
    check(apply)
    name = getattr(function, "__qualname__", type(function).__name__)

    def called(function: Callable[..., Any], factor: float = 1.0) -> Callable[[], None] | None:
        """The step with the batch times a factor; None where the inputs have no batch in common."""
        given = (args, kwargs) if factor == 1 else _with_batch((args, kwargs), factor)
        if given is None:
            return None

        def step() -> None:
            result = function(*given[0], **given[1])
            if backward:
                run_backward(result)

        return step

    step = called(function)
    assert step is not None
    found: list[Diagnosis] = []
    # other processes make no more steps than they are asked for
    alone = not are_several()
    compiles = compiles and alone
    resized = (lambda factor: called(function, factor)) if alone else None
    observer = Observer(name, budget, resized, pads="pad" in apply, ncu=ncu, compiles=compiles, say=say)
    steps = Steps(observer.roles, lambda: found.append(observer.conclude()))
    with unchanged(state_of(function, (*args, *kwargs.values()))):
        while steps.seen < steps.needed:
            _in(steps, step)

        def run(trial: Trial) -> None:
            tries = Steps(trial.roles, lambda: None)
            _in(tries, step)
            # a function that calls no module is compiled as a whole, with its result, or a compiler would leave out what makes it
            whole = trial.name == "compile" and not trial.modules
            changed = called(torch.compile(function)) if whole else None
            while tries.seen < tries.needed:
                _in(tries, changed if changed is not None and trial.is_changed(tries.seen) else step)

        whole = tried(found[0], apply, observer.device, run)
        if "compile" in apply or not compiles or all(remedy.name != COMPILE for remedy in whole.remedies):
            return whole
        if observer.deadline.allows(observer.compiling_s):
            return tried(whole, ["compile"], observer.device, run, observer.deadline)
        needed = f"it would be tried in about {observer.compiling_s:,.0f} s, for which --budget has to be larger"
        return compile_price_noted(whole, observer.device, needed)


def _in(steps: Steps, step: Callable[[], None]) -> None:
    """Runs a step in the next of its roles."""
    steps.begin()
    try:
        step()
    except BaseException as error:
        steps.abandon(error)
        raise
    steps.end()


def run_backward(result: Any) -> None:
    """Runs the backward of the sum of all tensors in a result that require a gradient.

    Raises InvalidInput if there is none.
    """
    outputs = [x for x in _tensors(result) if x.requires_grad]
    if not outputs:
        raise InvalidInput("backward=True, and no output requires a gradient; leave backward out")
    torch.autograd.backward([x.float().sum() if x.is_floating_point() else x for x in outputs])


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, dict):
        result = result.values()
    elif hasattr(result, "to_tuple"):
        result = result.to_tuple()
    elif not isinstance(result, list | tuple):
        return []
    return [x for one in result for x in _tensors(one)]


def _with_batch(given: Any, factor: float) -> Any | None:
    """Arguments with the first axis of all tensors times `factor`; None if they share no axis, or nothing to halve."""
    if not all(is_plain(x) for x in tree_leaves(given) if isinstance(x, Tensor)):
        # a sparse tensor or a list of sequences has other axes
        return None
    sizes = {x.shape[0] if x.ndim else 0 for x in tree_leaves(given) if _may_be_a_batch(x)}
    if len(sizes) != 1 or (size := sizes.pop()) == 0 or (factor < 1 and size < 2):
        return None

    def resized(x: Any) -> Any:
        if not _may_be_a_batch(x):
            return x
        return x[: int(size * factor)] if factor < 1 else torch.cat([x] * round(factor))

    return tree_map(resized, given)


def _may_be_a_batch(x: Any) -> bool:
    # a weight that is an argument has no batch
    return isinstance(x, Tensor) and not isinstance(x, nn.Parameter)
