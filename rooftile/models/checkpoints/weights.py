"""Loads the tensors of a checkpoint into the parameters of a decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.models.checkpoints import gpt_oss
from rooftile.models.checkpoints.experts import by_expert
from rooftile.models.checkpoints.names import Names, names_of
from rooftile.models.checkpoints.nemotron import by_layer
from rooftile.models.checkpoints.stored import JoinedTensor, Share, StoredTensor, cut_tensors
from rooftile.models.config import ModelConfig
from rooftile.weights.files.folder import listed
from rooftile.weights.files.settings import check_readable

Places = Iterable[tuple[str, Tensor]]

PLAIN = ("BF16", "F16", "F32", "F64")
# tensors in older checkpoints that are not weights: tables of frequencies, and GPT-2's causal mask
_IGNORED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")

# called with the share of the weights that has been read
_listener: ContextVar[Callable[[float], None] | None] = ContextVar("listener", default=None)


@contextmanager
def reporting_progress(report: Callable[[float], None]) -> Iterator[None]:
    """Calls `report` with the share of the weights that has been read, at each tensor or layer that this thread loads.

    Inside of another such block, that one's `report` is called, too.
    """
    outer = _listener.get()

    def report_both(share: float) -> None:
        report(share)
        if outer is not None:
            outer(share)

    token = _listener.set(report_both)
    try:
        yield
    finally:
        _listener.reset(token)


def report_progress(share: float) -> None:
    """Reports which share has been read to the caller of `reporting_progress`."""
    if (report := _listener.get()) is not None:
        report(share)


def check(config: ModelConfig, places: Places, files: Iterable[Path]) -> None:
    """Compares the names, shapes and dtypes of a decoder's parameters with the tensors in files; the decoder may be on "meta".

    Raises:
        InvalidInput: tensors are missing, unexpected or of other shapes.
    """
    with ExitStack() as stack:
        matched(config, dict(places), stored_in(config, files, stack))


def load(config: ModelConfig, places: Places, files: Iterable[Path], shares: Mapping[str, Share] | None = None) -> None:
    """Fills a decoder from files, one tensor at a time, so that memory holds the decoder and one tensor.

    `shares` says which part of which tensor a rank holds (`rooftile.models.checkpoints.shares`); no other part is read.

    Raises:
        InvalidInput: tensors are missing, unexpected or of other shapes; then nothing was loaded.
    """
    with ExitStack() as stack:
        pairs = matched(config, dict(places), cut_tensors(stored_in(config, files, stack), shares or {}))
        whole, done = max(1, sum(place.nbytes for _, place in pairs)), 0
        for stored, place in pairs:
            place.copy_(stored.get_tensor())
            done += place.nbytes
            report_progress(done / whole)


def stored_in(config: ModelConfig, files: Iterable[Path], stack: ExitStack) -> dict[str, StoredTensor]:
    """Opens files, and returns their tensors by their names without prefix."""
    found = _tensors([stack.enter_context(opened(path)) for path in files], names_of(config))
    if config.family == "nemotron_h":
        return by_layer(found, config.mixers, config.feed_forwards)
    return gpt_oss.rearranged(found) if config.family == "gpt_oss" else by_expert(found, config)


def matched(config: ModelConfig, places: dict[str, Tensor], found: dict[str, StoredTensor]) -> list[tuple[StoredTensor, Tensor]]:
    """Returns each stored tensor with the parameter that it fills.

    Raises:
        InvalidInput: tensors are missing, unexpected or of other shapes.
    """
    if config.tie:
        _check_tie(found, next(iter(places)))
    _check_mixers(config, found)
    _check(found, places)
    return [(found[name], place) for name, place in places.items()]


def opened(path: Path) -> Any:
    """Opens a safetensors file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise InvalidInput(
            "reading a checkpoint needs the package safetensors, which is not installed; pip install safetensors"
        ) from None
    check_readable(path)
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise InvalidInput(f"{path} is not a complete safetensors file ({error}); download it again") from None


def _tensors(files: list[Any], names: Names) -> dict[str, StoredTensor]:
    stored = [StoredTensor(file, name) for file in files for name in _names(file)]
    found: dict[str, StoredTensor] = {}
    for one in stored:
        name = names.without_prefix(one.name)
        if name.endswith(_IGNORED) or name.startswith(names.skipped):
            continue
        for theirs, ours in names.renamed:
            name = f"{name}.".replace(f".{theirs}.", f".{ours}.")[:-1]
        if name in found:
            raise InvalidInput(f"the checkpoint has both {found[name].name} and {one.name}, for one weight; remove one of them")
        found[name] = one
    for whole, pieces in names.joined:
        for name in [name for name in found if name.endswith(f".{pieces[0]}")]:
            part = name.removesuffix(pieces[0])
            if all(part + piece in found for piece in pieces):
                found[part + whole] = JoinedTensor([found.pop(part + piece) for piece in pieces], part + whole)
    return found


def _names(file: Any) -> list[str]:
    """Returns the names of an open file's tensors; the file has keys() but cannot be iterated."""
    names: list[str] = file.keys()
    return names


def _check_tie(found: dict[str, StoredTensor], embedding: str) -> None:
    """Removes a tied head that was saved all the same, after checking that it equals the embedding."""
    head = found.pop("lm_head.weight", None)
    if head is None:
        return
    if embedding not in found:
        found[embedding] = head
    elif head.shape() != found[embedding].shape() or not torch.equal(head.get_tensor(), found[embedding].get_tensor()):
        raise InvalidInput(
            f"lm_head.weight differs from {found[embedding].name}, to which config.json ties it; if the head has weights of its "
            "own, set tie_word_embeddings to false there"
        )


def _check_mixers(config: ModelConfig, found: Mapping[str, StoredTensor]) -> None:
    """Refuses a layer whose tensors are another mixer's than config.json says."""
    names = names_of(config)
    for n, mixer in enumerate(config.mixers):
        other = names.attention if names.mixer_of(mixer) == names.recurrence else names.recurrence
        strange = next((one.name for name, one in found.items() if name.startswith(f"{names.layers}.{n}.{other}.")), None)
        if strange is not None:
            raise InvalidInput(
                f"config.json says that layer {n} is {mixer}, and the checkpoint has {strange}; correct config.json, or download "
                "both again"
            )


def _check(found: Mapping[str, StoredTensor], places: Mapping[str, Tensor]) -> None:
    missing = [name for name in places if name not in found]
    if missing:
        raise InvalidInput(f"the checkpoint lacks {listed(missing)}; its config.json asks for them")
    unexpected = [stored.name for name, stored in found.items() if name not in places]
    if unexpected:
        raise InvalidInput(f"the checkpoint has {listed(unexpected)}, which its config.json has no place for")
    wrong = [
        f"{found[name].name} {found[name].shape()}, due {tuple(place.shape)}"
        for name, place in places.items()
        if found[name].shape() != tuple(place.shape)
    ]
    if wrong:
        raise InvalidInput(f"the checkpoint's shapes differ from its config.json: {listed(wrong)}")
    packed = [f"{stored.name} {stored.dtype()}" for stored in found.values() if stored.dtype() not in PLAIN]
    if packed:
        raise InvalidInput(f"the checkpoint has {listed(packed)}; must be bfloat16, float16 or float32, not quantised")
