"""An operator's call again, from the inputs that a profiler has recorded: on tensors without memory, for its counts.

A profiler writes shapes, strides, dtypes, and numbers as words. It writes no dtype for tensors in lists, and nothing of lists in
which a tensor may be missing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode

from rooftile.diagnosis.counts import Counted, count
from rooftile.diagnosis.counts.arithmetic import dtype_name
from rooftile.diagnosis.recorded.event import TraceEvent, listed, shapes_in

DTYPES = {
    "float": torch.float32, "double": torch.float64, "c10::Half": torch.float16, "c10::BFloat16": torch.bfloat16,
    "long int": torch.int64, "long": torch.int64, "int": torch.int32, "short": torch.int16, "short int": torch.int16,
    "signed char": torch.int8, "unsigned char": torch.uint8, "bool": torch.bool, "c10::complex<float>": torch.complex64,
    "c10::complex<double>": torch.complex128, "c10::Float8_e4m3fn": torch.float8_e4m3fn, "c10::Float8_e5m2": torch.float8_e5m2,
}  # fmt: skip
# the numbers of dtypes among the arguments of an operator
NUMBERED = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
    7: torch.float64, 9: torch.complex64, 10: torch.complex128, 11: torch.bool, 15: torch.bfloat16, 23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
}  # fmt: skip
FLOATING = ("float", "double", "c10::Half", "c10::BFloat16")
SCALARS = ("Scalar", "ScalarList")
NOT_COUNTED = Counted(None, None, None)


class RecordedCall(NamedTuple):
    """One call of an operator as a trace has it."""

    overload: str  # "" where it is unknown
    kinds: tuple[object, ...]  # its arguments', as in `OperatorRow.key`
    counted: Counted
    dtype: str


class Calls:
    """Counts calls from their recorded inputs; equal ones once.

    Args:
        dtype: of tensors in lists; None where it is unknown.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._known: dict[str, RecordedCall] = {}
        self._mode = FakeTensorMode()

    def of(self, event: TraceEvent) -> RecordedCall:
        """Returns the call of an operator's event, with its counts."""
        words = json.dumps([event.name(), *(event.args.get(name) for name in INPUTS)])
        if words not in self._known:
            self._known[words] = self._counted(event)
        return self._known[words]

    def _counted(self, event: TraceEvent) -> RecordedCall:
        types, dims = [str(word) for word in listed(event.args, "Input type")], listed(event.args, "Input Dims")
        strides = listed(event.args, "Input Strides")
        kinds = tuple(_kinds(types, dims, strides))
        given = next((word for word in types if word in FLOATING), None)
        dtype = dtype_name([torch.empty(0, dtype=DTYPES[given])]) if given else ""
        func = overload_of(event.name(), types) if types and len(types) == len(dims) else None
        if func is None:
            return RecordedCall("", kinds, NOT_COUNTED, dtype)
        with self._mode, torch.no_grad(), _unlogged():
            try:
                args, kwargs = self._arguments(func, event.args, types, dims, strides)
                makes = any("Tensor" in str(one.type) for one in func._schema.returns)
                result = func(*args, **kwargs) if makes else None
                counted = count(func, args, kwargs, result)
                dtype = dtype_name((args, tuple(kwargs.values()), result))
            except Exception:
                # whatever it needs beyond shapes, such as values, a trace does not have, and it is not counted
                counted = NOT_COUNTED
        if "TensorList" in types and self._dtype is None:
            counted = counted._replace(bytes=None)
        return RecordedCall(func._overloadname, kinds, counted, dtype)

    def _arguments(
        self, func: OpOverload, recorded: dict[str, Any], types: Sequence[Any], dims: Sequence[Any], strides: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
        words = listed(recorded, "Concrete Inputs") or [""] * len(types)
        if (lists := [dims[n] for n, word in enumerate(types) if word == "TensorList"]) and not any(lists):
            raise LookupError("the shapes of its lists were not recorded")
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for n, argument in enumerate(func._schema.arguments):
            stride = strides[n] if n < len(strides) else []
            if types[n] == "TensorList":
                found: Any = [_tensor(one, of, self._dtype) for one, of in _in_list(dims[n], stride)]
            elif types[n] in DTYPES:
                found = _tensor(dims[n], stride, DTYPES[types[n]])
            elif "List[" in str(argument.type) and "Tensor" in str(argument.type):
                raise LookupError(f"{argument.name} was not recorded")
            else:
                found = _value(str(words[n]), argument.name, str(argument.type), argument.default_value)
            if argument.kwarg_only:
                kwargs[argument.name] = found
            else:
                args.append(found)
        return tuple(args), kwargs


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keeps PyTorch from logging an operator that fails on its recorded inputs: its row says that it has no counts."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


INPUTS = ("Input type", "Input Dims", "Input Strides", "Concrete Inputs")


def packet_of(name: str) -> OpOverloadPacket | None:
    """Returns the operator of a name such as "aten::mm"; None if this process does not have it."""
    namespace, _, word = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), word, None) if word.isidentifier() and namespace.isidentifier() else None
    return packet if isinstance(packet, OpOverloadPacket) else None


def overload_of(name: str, types: Sequence[Any]) -> OpOverload | None:
    """Returns the overload of an operator that takes arguments of some types, in the words of a profiler."""
    packet = packet_of(name)
    overloads = [] if packet is None else [getattr(packet, word) for word in packet.overloads()]
    fitting = (one for undefined in (False, True) for one in overloads if _takes(one, types, undefined=undefined))
    return next(fitting, None)


def _takes(func: OpOverload, types: Sequence[Any], *, undefined: bool) -> bool:
    """Whether an overload takes arguments of some types. undefined: a tensor may have none, as a backward's bias of attention."""
    arguments = func._schema.arguments
    return len(arguments) == len(types) and all(
        _fits(str(one.type), word) or (undefined and word == "" and str(one.type) == "Tensor")
        for one, word in zip(arguments, types, strict=True)
    )  # fmt: skip


def _fits(due: str, word: Any) -> bool:
    """Whether an argument of a type may be what a profiler calls by a word."""
    is_list, is_tensor = "List[" in due, "Tensor" in due
    if word == "TensorList":
        return is_list and is_tensor
    if word in DTYPES:
        return is_tensor and not is_list
    if word == "ScalarList":
        return is_list and not is_tensor
    if word == "Scalar":
        return not is_list and not is_tensor
    # None, words, and lists that a profiler does not write
    return due.startswith("Optional[") or is_list or due in ("str", "Device", "Generator")


def _tensor(dims: Sequence[int], strides: Any, dtype: torch.dtype | None) -> Tensor:
    if isinstance(strides, list) and len(strides) == len(dims):
        return torch.empty_strided(dims, strides, dtype=dtype or torch.float32)
    return torch.empty(dims, dtype=dtype or torch.float32)


def _in_list(dims: Sequence[Any], strides: Any) -> list[tuple[Any, Any]]:
    have = isinstance(strides, list) and len(strides) == len(dims)
    return list(zip(dims, strides if have else [None] * len(dims), strict=True))


def _value(word: str, name: str, due: str, default: Any) -> Any:
    """Returns the value that a profiler wrote as a word; the default where it wrote none."""
    if word == "" or name in ("layout", "device", "memory_format"):
        # these change no count
        return default
    if due in ("str", "Optional[str]"):
        return word
    if name.endswith("dtype"):
        return NUMBERED[int(word)]
    if "List[" in due or word in ("True", "False"):
        return json.loads(word.replace("True", "true").replace("False", "false"))
    is_whole = word.lstrip("-").isdecimal()
    return int(word) if is_whole and due != "float" else float(word)


def _kinds(types: Sequence[Any], dims: Sequence[Any], strides: Sequence[Any]) -> list[object]:
    """Returns the kinds of arguments: of a tensor its shape, strides and dtype, of others their type."""
    found: list[object] = []
    for n, size in enumerate(dims):
        word = types[n] if n < len(types) else ""
        stride = strides[n] if n < len(strides) else []
        if word in DTYPES and size in ([], *map(list, shapes_in(size))):
            found.append((tuple(size), tuple(stride) if isinstance(stride, list) else (), str(DTYPES[word])))
        elif shapes := list(shapes_in(size)):
            found += [(shape, (), "unknown") for shape in shapes]
        else:
            found.append(str(word))
    return found


def one_floating_dtype(events: Sequence[TraceEvent]) -> torch.dtype | None:
    """Returns the dtype of all floating-point tensors of a step; None if there are several, or none."""
    inputs = ((listed(event.args, "Input type"), listed(event.args, "Input Dims")) for event in events)
    found = {word for words, sizes in inputs for word, size in zip(words, sizes, strict=False) if size and word in FLOATING}
    return DTYPES[found.pop()] if len(found) == 1 else None
