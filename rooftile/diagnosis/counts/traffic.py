"""Bytes of one call of an operator: distinct elements read and written, in their dtype.

Tensors are counted by storage: operands that are the same view are read once, views that overlap at most once per element, an
expanded axis once. What a view costs is nothing. An operator that changes a tensor in place reads and writes it, one that fills
it only writes. Gathers read the rows that they touch, which depends on the values of the indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor


def names(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


# these do not read what they write to
FILLING = frozenset(
    names(
        """copy_ fill_ zero_ normal_ uniform_ bernoulli_ random_ exponential_ geometric_ cauchy_ log_normal_ set_ _foreach_zero_
        _foreach_copy_"""
    )
)


def nbytes(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """The bytes that one call reads and writes.

    Args:
        func: the operator, as a TorchDispatchMode sees it.
        args, kwargs: its arguments.
        result: what it returned.
    """
    name = base_name(func)
    if name in RULES:
        return RULES[name](bound(func, args, kwargs), result)
    read, written = touched(func, args, kwargs, result)
    return distinct(read) + distinct(written)


def touched(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """The tensors that one call reads, and the tensors that it writes."""
    arguments = bound(func, args, kwargs)
    changed = _mutated(func, arguments)
    known = {id(x) for x in changed}
    read = [x for x in tensors(tuple(arguments.values())) if id(x) not in known]
    if base_name(func).rstrip("_") + "_" not in FILLING:
        # a result that is given as `out` is only written
        filled = {id(x) for argument in func._schema.arguments if argument.is_out for x in tensors(arguments[argument.name])}
        read += [x for x in changed if id(x) not in filled]
    return read, [*changed, *(x for x in tensors(result) if id(x) not in known)]


def base_name(func: OpOverload) -> str:
    """ "add" of aten::add.Tensor, "add_" of aten::add_.Tensor."""
    return func._schema.name.split("::")[1]


def bound(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, with the schema's defaults."""
    found = {}
    for n, argument in enumerate(func._schema.arguments):
        given = args[n] if n < len(args) else kwargs.get(argument.name, argument.default_value)
        found[argument.name] = given
    return found


def tensors(given: Any) -> Iterator[Tensor]:
    """All tensors in arguments or results, also tensors in lists."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for one in given:
            yield from tensors(one)


def parts(x: Tensor) -> list[Tensor]:
    """Returns the strided tensors that hold a tensor's memory: itself, the indices and values of a sparse one, nested ones.

    A tensor of a library's own format, such as oneDNN's, and a meta tensor have none that can be seen.
    """
    if x.is_meta:
        return []
    if x.is_nested:
        return list(x.unbind())
    if x.layout == torch.strided:
        return [x]
    if x.layout == torch.sparse_coo:
        return [x._indices(), x._values()]
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [x.crow_indices(), x.col_indices(), x.values()]
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [x.ccol_indices(), x.row_indices(), x.values()]
    return []


def is_plain(x: Tensor) -> bool:
    """Whether strides place each element of a tensor in one storage."""
    return x.layout == torch.strided and not x.is_nested


def distinct(given: Iterable[Tensor]) -> int:
    """Bytes of the distinct elements of tensors, some of which may share memory."""
    return sum(by_storage(given).values())


def by_storage(given: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the distinct elements in each storage; its key is the storage's `_cdata`."""
    found: dict[int, dict[tuple[Any, ...], Tensor]] = {}
    for x in [part for whole in given for part in parts(whole) if part.numel()]:
        views = found.setdefault(x.untyped_storage()._cdata, {})
        views[int(x.storage_offset()), x.shape, x.stride(), x.dtype] = x
    return {storage: _union(list(views.values())) for storage, views in found.items()}


def _union(views: list[Tensor]) -> int:
    total = sum(elements(x) * x.element_size() for x in views)
    if len(views) == 1:
        return total
    # views of one storage: at most what lies between the first and the last of their bytes
    starts = [int(x.storage_offset()) * x.element_size() for x in views]
    ends = [start + _span(x) * x.element_size() for start, x in zip(starts, views, strict=True)]
    return min(total, max(ends) - min(starts))


def elements(x: Tensor) -> int:
    """Distinct elements of a tensor: an axis with a stride of 0 has one, and windows that overlap share theirs."""
    count = 1
    for n, stride in zip(x.shape, x.stride(), strict=True):
        count *= n if stride else 1
    return min(count, _span(x)) if x.numel() else 0


def _span(x: Tensor) -> int:
    return 1 + sum((int(n) - 1) * int(stride) for n, stride in zip(x.shape, x.stride(), strict=True))


def _mutated(func: OpOverload, arguments: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for argument in func._schema.arguments:
        # fused optimisers may scale gradients in place, and do so only with a scale
        scales = argument.name == "grads" and arguments.get("grad_scale") is None
        if argument.alias_info is not None and argument.alias_info.is_write and not scales:
            found += tensors(arguments[argument.name])
    return found


def _rows(weight: Tensor, indices: Tensor, dim: int = 0) -> int:
    """Bytes of the distinct slices of `weight` along `dim` that indices touch: at most, where their values are unknown."""
    has_values = not isinstance(indices, FakeTensor)
    touched = int(indices.unique().numel()) if has_values else min(indices.numel(), weight.shape[dim])
    return touched * (elements(weight) // max(weight.shape[dim], 1)) * weight.element_size()


def _embedding(given: dict[str, Any], result: Tensor) -> int:
    return _rows(given["weight"], given["indices"]) + distinct([given["indices"]]) + distinct([result])


def _index_select(given: dict[str, Any], result: Tensor) -> int:
    read = _rows(given["self"], given["index"], given["dim"])
    return read + distinct([given["index"]]) + distinct([result])


def _gather(given: dict[str, Any], result: Tensor) -> int:
    x, index = given["self"], given["index"]
    size = x.element_size()
    return min(elements(index) * size, distinct([x])) + distinct([index]) + distinct([result])


def _index(given: dict[str, Any], result: Tensor) -> int:
    indices = [x for x in given["indices"] if x is not None]
    return _touched(given["self"], given["indices"], result) + distinct(indices) + distinct([result])


def _touched(x: Tensor, indices: list[Tensor | None], picked: Tensor) -> int:
    """Bytes of x that an index touches: with one index tensor its distinct rows, with several at most one per result."""
    given = [(n, i) for n, i in enumerate(indices) if i is not None]
    if len(given) == 1 and given[0][1].dtype != torch.bool:
        n, index = given[0]
        return _rows(x, index % x.shape[n], n)
    return min(picked.numel() * x.element_size(), distinct([x]))


def _index_put(given: dict[str, Any], result: Tensor) -> int:
    x, values = given["self"], given["values"]
    indices = [i for i in given["indices"] if i is not None]
    picked = torch.broadcast_shapes(*[i.shape for i in indices if i.dtype != torch.bool]) if indices else ()
    rest = 1
    for n, size in enumerate(x.shape):
        if n >= len(given["indices"]) or given["indices"][n] is None:
            rest *= size
    count = rest
    for n in picked:
        count *= n
    moved = min(count * x.element_size(), distinct([x]))
    return moved * (2 if given.get("accumulate") else 1) + distinct(indices) + distinct([values])


def _index_put_copy(given: dict[str, Any], result: Tensor) -> int:
    return _index_put(given, result) + distinct([given["self"]]) + distinct([result])


def _scatter(given: dict[str, Any], result: Tensor) -> int:
    """In place: the elements that the index touches, read too where values are added."""
    index, source = given["index"], given.get("src", given.get("value"))
    moved = elements(index) * given["self"].element_size()
    source = [source] if isinstance(source, Tensor) else []
    return moved + distinct([index, *source])


def _scatter_add(given: dict[str, Any], result: Tensor) -> int:
    return _scatter(given, result) + elements(given["index"]) * given["self"].element_size()


def _scatter_copy(given: dict[str, Any], result: Tensor) -> int:
    return _scatter(given, result) + distinct([given["self"]]) + distinct([result])


def _embedding_backward(given: dict[str, Any], result: Tensor) -> int:
    return distinct([given["grad_output"], given["indices"]]) + distinct([result])


def _nll_loss(given: dict[str, Any], result: Any) -> int:
    """It reads the number of each row's target, and no other."""
    x = given["self"]
    picked = min(given["target"].numel() * x.element_size(), distinct([x]))
    return picked + distinct([given["target"], *tensors(given["weight"])]) + distinct(tensors(result))


def _nll_loss_backward(given: dict[str, Any], result: Tensor) -> int:
    """The log-probabilities give it a shape only."""
    small = [given[name] for name in ("grad_output", "target", "total_weight")]
    return distinct([*small, *tensors(given["weight"])]) + distinct([result])


def _pool_backward(given: dict[str, Any], result: Tensor) -> int:
    """The images give it a shape only."""
    return distinct([given["grad_output"], given["indices"], result])


def _shape_of_input_only(given: dict[str, Any], result: Tensor) -> int:
    """The input of the forward gives the gradient a shape only."""
    return distinct([given["grad_output"], result])


def _index_add(given: dict[str, Any], result: Tensor) -> int:
    rows = _rows(given["self"], given["index"], given["dim"])
    return 2 * rows + distinct([given["index"], given["source"]])


RULES: dict[str, Callable[[dict[str, Any], Any], int]] = {
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "index_select": _index_select,
    "gather": _gather,
    "index": _index,
    "_unsafe_index": _index,
    "index_put_": _index_put,
    "_index_put_impl_": _index_put,
    "index_put": _index_put_copy,
    "index_add_": _index_add,
    "nll_loss_forward": _nll_loss,
    "nll_loss2d_forward": _nll_loss,
    "nll_loss_backward": _nll_loss_backward,
    "nll_loss2d_backward": _nll_loss_backward,
    "max_pool2d_with_indices_backward": _pool_backward,
    "avg_pool2d_backward": _shape_of_input_only,
    "_adaptive_avg_pool2d_backward": _shape_of_input_only,
    "scatter_": _scatter,
    "scatter_add_": _scatter_add,
    "scatter": _scatter_copy,
    "scatter_add": _scatter_copy,
}
