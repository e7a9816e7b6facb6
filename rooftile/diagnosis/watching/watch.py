"""Watches one step: the operators that it calls, with their counts, modules and lines.

Two watched runs, because of memory: `Watch` holds no tensor, and `Record` keeps copies of the inputs of a few operators, which
experiments run on.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint
from torch.utils._pytree import tree_flatten, tree_map

from rooftile.diagnosis.counts import Counted, count
from rooftile.diagnosis.counts.arithmetic import dtype_name
from rooftile.diagnosis.counts.fusable import Fusing, fusing
from rooftile.diagnosis.counts.traffic import RULES, base_name, by_storage, distinct, is_plain, parts, tensors, touched
from rooftile.diagnosis.records import OperatorRow, Sample, StepCall
from rooftile.diagnosis.watching.compiled import NAMESPACE, GeneratedKernel
from rooftile.diagnosis.watching.dispatched import Dispatched
from rooftile.diagnosis.watching.where import user_line
from rooftile.errors import InvalidInput


class Watch(Dispatched):
    """Watches the step that runs in its block; `operations`, `calls` and `kept` are there afterwards.

    It keeps no tensor alive.
    """

    def __init__(self) -> None:
        super().__init__(self._note)
        self._rows: dict[tuple[Any, ...], _Row] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}
        self.calls: list[StepCall] = []  # their rows are positions in `operations`
        # a weak reference keeps the address of a storage that is gone from being used again, so that each has its own
        self._storages: dict[int, StorageWeakRef] = {}
        self._parameters: set[int] = set()
        self.kept: frozenset[int] = frozenset()  # the tensors, as in `calls`, that outlive the step

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.kept = frozenset(address for address, storage in self._storages.items() if not storage.expired())

    @property
    def operations(self) -> list[OperatorRow]:
        """A row for each operator in each module and phase with the same shapes, in the order of their first calls.

        An operator that writes to parameters is an update, whether an optimiser calls it or the program itself.
        """
        # below autograd a tensor in the middle of a forward looks like a parameter, too, and does not outlive the step
        parameters = self._parameters & self.kept
        rows = self._rows.values()
        return [row.operation(updates=all(self.calls[n].writes.keys() & parameters for n in row.indices)) for row in rows]

    def _note_arguments(self, args: tuple[Any, ...]) -> None:
        for x in tensors(args):
            if x.requires_grad and x.is_leaf:
                self._parameters |= {part.untyped_storage()._cdata for part in parts(x)}

    def _note(
        self, func: OpOverload | GeneratedKernel, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, before: Any
    ) -> None:
        key = (self.module, self.phase, *_signature(func, args, kwargs))
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = _Row(
                key=key, counted=_count(func, args, kwargs, result), where=user_line(sys._getframe()),
                dtype=dtype_name((args, kwargs, result)), device=_device((args, kwargs, result)), indices=[],
            )  # fmt: skip
            self._numbers[key] = len(self._numbers)
        row.indices.append(len(self.calls))
        # what a compiler has fused needs no other fusion
        fused = Fusing() if isinstance(func, GeneratedKernel) else fusing(func, args, kwargs)
        read, written = func.touched(args) if isinstance(func, GeneratedKernel) else touched(func, args, kwargs, result)
        for x in [part for whole in (*read, *written) for part in parts(whole)]:
            storage = x.untyped_storage()
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = StorageWeakRef(storage)
        call = StepCall(
            row=self._numbers[key], reads=_reads(func, read, written, row.counted.bytes), writes=by_storage(written),
            pointwise=fused.joins, ends=fused.ends, passes=fused.passes, draws=fused.draws, anew=fused.anew,
            backward=self.phase == "backward", again=self.phase == "backward" and _in_checkpoint(sys._getframe()),
        )  # fmt: skip
        self.calls.append(call)


class Devices(Dispatched):
    """Finds where the step in its block runs."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self._gpus: set[torch.device] = set()

    @property
    def main(self) -> torch.device:
        """The GPU whose tensors an operator took or made; without one, the CPU. Two GPUs are an InvalidInput."""
        if len(self._gpus) > 1:
            names = ", ".join(sorted(map(str, self._gpus)))
            raise InvalidInput(f"the step uses {len(self._gpus)} GPUs ({names}); diagnose one at a time")
        return next(iter(self._gpus), torch.device("cpu"))

    def _note(
        self, func: OpOverload | GeneratedKernel, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, before: Any
    ) -> None:
        self._gpus |= {x.device for x in tensors((args, kwargs, result)) if x.device.type == "cuda"}


class Record(Dispatched):
    """Keeps copies of the inputs of the first call of each wanted kind; `samples` are there afterwards, by kind.

    Args:
        wanted: an operation of each kind.
        limit: bytes of copies at most; what does not fit is left out.
    """

    def __init__(self, wanted: Collection[OperatorRow], limit: int) -> None:
        super().__init__(self._note)
        self._wanted = {operation.kind: operation for operation in wanted}
        self._left = limit
        self.samples: dict[tuple[object, ...], Sample] = {}

    def _before(self, func: OpOverload | GeneratedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = _signature(func, args, kwargs)
        operation = self._wanted.get(kind)
        if operation is None or kind in self.samples:
            return None
        given = [part for x in tensors((args, tuple(kwargs.values()))) for part in parts(x)]
        size = sum(x.untyped_storage().nbytes() for x in given)
        if size > self._left:
            return None
        self._left -= size
        copies: dict[int, Tensor] = {}
        # experiments count the versions of tensors that they write, and inference tensors have no version
        with torch.inference_mode(False):
            return operation, tree_map(lambda x: _copied(x, copies), (args, kwargs))

    def _note(
        self, func: OpOverload | GeneratedKernel, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, before: Any
    ) -> None:
        if before is not None:
            operation, (given, named) = before
            self.samples[operation.kind] = Sample(operation, func, given, named)  # type: ignore[arg-type]


@dataclass(slots=True)
class _Row:
    key: tuple[Any, ...]
    counted: Any
    where: str
    dtype: str
    device: str
    indices: list[int]

    def operation(self, *, updates: bool) -> OperatorRow:
        module, phase, name, *_ = self.key
        phase = "optimiser" if updates and phase == "forward" else phase
        return OperatorRow(
            module=module, op=name, phase=phase, calls=len(self.indices), flops=self.counted.flops,
            special=self.counted.special, bytes=self.counted.bytes, where=self.where, dtype=self.dtype, device=self.device,
            key=self.key, indices=tuple(self.indices),
        )  # fmt: skip


def _count(func: OpOverload | GeneratedKernel, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Counted:
    if not isinstance(func, GeneratedKernel):
        return count(func, args, kwargs, result)
    read, written = func.touched(args)
    return Counted(*func.arithmetic(args), distinct(read) + distinct(written))


def _reads(
    func: OpOverload | GeneratedKernel, read: Sequence[Tensor], written: Sequence[Tensor], counted_bytes: int | None
) -> dict[int, int]:  # fmt: skip
    """The bytes that a call reads of each tensor; of the table of a gather only the rows that it touches."""
    found = by_storage(read)
    if not isinstance(func, GeneratedKernel) and base_name(func) in RULES and counted_bytes is not None and found:
        table = max(found, key=lambda tensor: found[tensor])
        untouched = sum(found.values()) + sum(by_storage(written).values()) - counted_bytes
        found[table] = max(0, found[table] - max(0, untouched))
    return found


def name_of(func: OpOverload | GeneratedKernel) -> str:
    """The name of an operator or of a generated kernel, as in `Operation.op`."""
    return f"{NAMESPACE}::{func.name}" if isinstance(func, GeneratedKernel) else func._schema.name


def _signature(func: OpOverload | GeneratedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    flat, _ = tree_flatten((args, kwargs))
    overload = "" if isinstance(func, GeneratedKernel) else func._overloadname
    return name_of(func), overload, *[_kind(x) for x in flat]


def _in_checkpoint(frame: FrameType | None) -> bool:
    """Whether a checkpoint runs a part of the forward again."""
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def _kind(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_nested:
        return tuple(map(tuple, x._nested_tensor_size().tolist())), "nested", str(x.dtype)
    if isinstance(x, Tensor) and x.layout != torch.strided:
        # the number of its values decides its time, and differs from step to step
        return tuple(x.shape), str(x.layout), str(x.dtype)
    if isinstance(x, Tensor):
        return tuple(x.shape), tuple(x.stride()), str(x.dtype)
    return x if isinstance(x, int | bool | str | None) else type(x).__name__


def _device(given: Any) -> str:
    kinds = {x.device.type for x in tensors(given)}
    return "cuda" if "cuda" in kinds else next(iter(kinds), "cpu")


def _copied(x: Any, copies: dict[int, Tensor]) -> Any:
    """A tensor with the same values, strides and offset in a storage of its own; views of one storage share the copy."""
    if not isinstance(x, Tensor) or x.is_meta:
        return x
    if not is_plain(x):
        return x.detach().clone()
    storage = x.untyped_storage()
    whole = copies.get(storage._cdata)
    if whole is None:
        whole = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage.clone())  # type: ignore[call-overload]
        copies[storage._cdata] = whole
    same = torch.empty(0, dtype=x.dtype, device=x.device)
    return same.set_(whole.untyped_storage(), x.storage_offset(), x.shape, x.stride())
