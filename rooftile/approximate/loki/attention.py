"""Loki: decoding with the keys whose scores in a few leading dimensions are largest.

Keys lie close to a space of fewer dimensions than a head has. A PCA turns them so that the first dimensions hold most of their
variance; scores in these choose the keys, and exact attention runs over the chosen ones. Chosen token by token this is the
paper's method. By pages it is another one: a group of heads chooses whole pages of the cache, and the exact kernel for paged
decoding reads a shorter table.

Singhania et al., Loki: Low-rank Keys for Efficient Sparse Attention, arXiv:2406.02542.

Longer than other files, as a rotation and its file belong together.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooftile.approximate.arguments import check_qkv, check_scale
from rooftile.approximate.chosen_arguments import as_given, check_fraction, check_indices, check_range, check_way
from rooftile.approximate.gathered.arrange import padded
from rooftile.approximate.gathered.pairs import take
from rooftile.approximate.loki import definition
from rooftile.errors import InvalidInput
from rooftile.exact import api
from rooftile.kvcache import PagedKV
from rooftile.runtime.arguments import check_choice, check_count, check_flag, shown
from rooftile.runtime.words import answers_foreign_words, answers_words

FORMAT = "rooftile loki 1"
UNITS = ("token", "page")


@answers_words
@dataclass(frozen=True, eq=False, repr=False)
class Loki:
    """The rotation of a layer's keys, and how much is read: made by `Loki.fit` or `Loki.load`.

    Args:
        p: (Hk, D, D) fp32; column c of a head is the direction of the c-th largest variance.
        dims: share of the dimensions that choose.
        keep: share of the keys that are kept.
        rotated: whether the keys had their rotary positions when p was fitted, as keys of a cache have.
        model: a name of the model and layer, which `load` compares.
    """

    p: Tensor
    dims: float = 0.25
    keep: float = 0.25
    rotated: bool = True
    model: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.p, Tensor) or self.p.ndim != 3 or self.p.shape[1] != self.p.shape[2]:
            raise InvalidInput(f"p is {shown(self.p)}; must be a tensor (Hk, D, D)")
        for name in ("dims", "keep"):
            object.__setattr__(self, name, check_fraction(name, getattr(self, name)))
        check_flag("rotated", self.rotated)
        _check_name(self.model)

    @staticmethod
    def fit(keys: Tensor, *, dims: float = 0.25, keep: float = 0.25, model: str = "", rotated: bool = True) -> Loki:
        """Fits the rotation to keys (N, Hk, D), or (B, S, Hk, D): the eigenvectors of their covariance, in fp64.

        The mean is taken off for the covariance and not from cached keys: it adds the same number to all scores of a query.

        Args:
            keys: of calibration texts, at least two tokens.
            dims: share of the dimensions that choose, above 0 and at most 1.
            keep: share of the keys that are kept, above 0 and at most 1.
            model: a name of the model and layer; "" for none.
            rotated: whether the keys have their rotary positions.

        Example:
            >>> loki = Loki.fit(torch.randn(1000, 8, 64), dims=0.25, keep=0.25)
            >>> loki.p.shape
            torch.Size([8, 64, 64])

        Singhania et al., Loki, arXiv:2406.02542.
        """
        if not isinstance(keys, Tensor) or keys.ndim not in (3, 4) or not keys.is_floating_point():
            raise InvalidInput(f"keys is {shown(keys)}; must be a floating-point tensor (N, Hk, D) or (B, S, Hk, D)")
        keys = keys.detach().flatten(0, -3)
        if keys.shape[0] < 2:
            raise InvalidInput(f"keys has {keys.shape[0]} tokens; must have at least 2")
        if not keys.isfinite().all():
            raise InvalidInput("keys has NaN or infinite values; must be finite")
        return Loki(definition.components(keys).float(), dims, keep, rotated, model)

    def __repr__(self) -> str:
        heads, dim, _ = self.p.shape
        name = f", model={self.model!r}" if self.model else ""
        return f"Loki({heads} heads of {dim}, dims={self.dims:g}, keep={self.keep:g}, rotated={self.rotated}{name})"

    @property
    def leading(self) -> int:
        """The number of dimensions that choose."""
        return max(round(self.dims * self.p.shape[-1]), 1)

    def turn(self, x: Tensor) -> Tensor:
        """x P for keys (B, S, Hk, D) or queries (B, T, H, D), in the dtype of x: what a cache holds in place of keys."""
        heads, dim, _ = self.p.shape
        if not isinstance(x, Tensor) or x.ndim != 4 or x.shape[3] != dim or x.shape[2] % heads:
            raise InvalidInput(f"x is {shown(x)}; this Loki has {heads} key heads of {dim}: was it fitted to another model?")
        p = self.p.to(x.device, torch.promote_types(x.dtype, torch.float32)).repeat_interleave(x.shape[2] // heads, dim=0)
        with as_given(x):
            return torch.einsum("bthd,hde->bthe", x.to(p.dtype), p).to(x.dtype)

    @answers_foreign_words
    def choose(
        self, q: Tensor, k: Tensor, *, page: int = 16, scale: float | None = None, turned: bool = False, unit: str = "token"
    ) -> Tensor:
        """The keys that `attend` reads: places (B, H, n) int32 by tokens, or pages (B, Hk, n) by pages, rising.

        Scores are computed in fp32, and ties go to the lower index. The arguments are as in `attend`.
        """
        unit, page = check_choice("unit", unit, UNITS), check_count("page", page)
        scale, S = check_scale(scale, self.p.shape[-1]), k.shape[1]
        with torch.no_grad():
            q, k = self.turn(q), k if turned else self.turn(k)
            count = max(math.ceil(self.keep * S), 1)
            with as_given(q):
                if unit == "token":
                    return definition.choose_tokens(q, k, self.leading, count).int()
                return definition.choose_pages(q, k, self.leading, -(-count // page), page, scale).int()

    @answers_foreign_words
    def attend(
        self,
        q: Tensor,  # (B, 1, H, D)
        k: Tensor,  # (B, S, Hk, D)
        v: Tensor,  # (B, S, Hk, Dv)
        *,
        backend: str | None = None,
        chosen: Tensor | None = None,
        deterministic: bool | None = None,
        page: int = 16,
        scale: float | None = None,
        turned: bool = False,
        unit: str = "token",
    ) -> Tensor:
        """Attention of one query per sequence to the keys with the largest approximate scores.

        Args:
            q: queries (B, 1, H, D), float32, bfloat16 or float16, as the model makes them: not turned.
            k: keys (B, S, Hk, D). Hk divides H.
            v: values (B, S, Hk, Dv).
            backend: "eager" is the definition; another name means the exact kernels; None or "auto" takes the fastest.
            chosen: ready-made, from `choose`.
            deterministic: as in `rooftile.attention`.
            page: tokens per page, a power of two, for unit="page".
            scale: of the scores; 1 / sqrt(D) if None.
            turned: whether k is what `turn` returned, as a cache holds it.
            unit: "token": each query head chooses its own keys, as in the paper. "page": a group of heads chooses whole pages,
                those with the largest share of its approximate weights; this method is not the paper's, and has no gradient.

        Returns:
            o (B, 1, H, Dv), contiguous, in the dtype of q.

        Raises:
            InvalidInput: an argument is wrong; says what came and what is due.
            Unsupported: the named backend does not run this problem.

        With keep=1 this is exact attention whatever the rotation; where all keys lie in `leading` dimensions, the chosen keys are
        those with the largest exact scores. These are known answers of the tests.

        Example:
            >>> k, v = torch.randn(1, 100, 8, 64), torch.randn(1, 100, 8, 64)
            >>> Loki.fit(k).attend(torch.randn(1, 1, 8, 64), k, v).shape
            torch.Size([1, 1, 8, 64])

        Singhania et al., Loki, arXiv:2406.02542.
        """
        q, k, v, _ = check_qkv(q, k, v)
        if q.shape[1] != 1:
            due = "loki decodes one query per sequence; use rooftile.attention for a prompt"
            raise InvalidInput(f"q has length {q.shape[1]}; {due}")
        heads, dim, _ = self.p.shape
        if k.shape[2:] != (heads, dim):
            came = f"k has {k.shape[2]} heads of {k.shape[3]}"
            raise InvalidInput(f"{came}; this Loki has {heads} heads of {dim}: it was fitted to another model")
        scale, turned = check_scale(scale, dim), check_flag("turned", turned)
        options = check_way(backend, deterministic, scale)
        unit, page = check_choice("unit", unit, UNITS), _check_page(page)
        rows, most = (q.shape[2], k.shape[1]) if unit == "token" else (heads, -(-k.shape[1] // page))
        if chosen is None:
            chosen = self.choose(q, k, page=page, scale=scale, turned=turned, unit=unit)
        else:
            chosen = check_indices("chosen", chosen, (q.shape[0], rows, None), f"(B, heads, n) = ({q.shape[0]}, {rows}, n)", q)
            check_range("chosen", chosen, most)
        # k P and q P have the products of k and q
        q = self.turn(q) if turned else q
        with as_given(q):
            if options is None:
                return definition.loki(q, k, v, chosen, page if unit == "page" else 1, scale=scale).contiguous()
            if k.shape[1] == 0:
                return q.new_zeros(*q.shape[:3], v.shape[-1])
            return (_to_tokens if unit == "token" else _to_pages)(q, k, v, chosen, page, options)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes this to a file that `load` reads."""
        held = {"dims": self.dims, "keep": self.keep, "rotated": self.rotated, "model": self.model}
        write_tensors({"format": FORMAT, "p": self.p.cpu(), **held}, path)

    @staticmethod
    def load(path: str | os.PathLike[str], *, model: str | None = None) -> Loki:
        """Reads a file that `save` wrote. A name given as `model` must be the one that `fit` was given."""
        held = read_tensors(path, "Loki.save")
        if not isinstance(held, dict) or held.pop("format", None) != FORMAT:
            raise InvalidInput(f"{path} is no file of Loki.save, or one of another version; must have the format {FORMAT!r}")
        loki = Loki(**held)
        if model is not None and _check_name(model) != loki.model:
            raise InvalidInput(f"{path} was fitted to model {loki.model!r}; must be {model!r}: fit it to the keys of this model")
        return loki


def _to_tokens(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, page: int, options: dict[str, Any]) -> Tensor:
    """Each query head with its own keys (B, H, n): a batch of heads."""
    places = chosen.long()
    keys, values = (take(x, places).flatten(0, 1).unsqueeze(2) for x in (k, v))  # (B H, n, 1, D)
    o = api.attention(q.transpose(1, 2).flatten(0, 1).unsqueeze(2), keys, values, **options)  # (B H, 1, 1, Dv)
    return o.view(q.shape[0], q.shape[2], 1, v.shape[-1]).transpose(1, 2).contiguous()


def _to_pages(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, page: int, options: dict[str, Any]) -> Tensor:
    """Each group of heads with its own pages (B, Hk, n): a sequence of a paged cache per key head."""
    B, S, Hk, _ = k.shape
    pages = -(-S // page)
    k, v = (_as_blocks(padded(x, 0, pages * page - S).contiguous(), page) for x in (k, v))
    b, h = torch.arange(B, device=q.device)[:, None, None], torch.arange(Hk, device=q.device)[:, None]
    table = (b * pages + chosen) * (page * Hk) + h
    # the last page may be short, and is the last of a list that has it
    lengths = chosen.shape[-1] * page - torch.where(chosen[..., -1] == pages - 1, pages * page - S, 0)
    cache = PagedKV(k, v, table.flatten(0, 1).int(), lengths.flatten().int())
    o = api.attention_paged(q.reshape(B * Hk, 1, q.shape[2] // Hk, q.shape[-1]), cache, **options)
    return o.view(B, 1, q.shape[2], o.shape[-1])


def _as_blocks(x: Tensor, page: int) -> Tensor:
    """A view of (B, S, Hk, D) as blocks (n, page, 1, D) that overlap: block p page Hk + h is page p of head h."""
    B, S, Hk, D = x.shape
    return x.as_strided((max(B * S * Hk - (page - 1) * Hk, 0), page, 1, D), (D, Hk * D, D, 1))


def write_tensors(held: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes a dictionary of tensors and numbers."""
    try:
        torch.save(held, Path(path))
    except (OSError, RuntimeError) as error:
        raise InvalidInput(f"{path} cannot be written: {' '.join(str(error).split())[:200]}") from error


def read_tensors(path: str | os.PathLike[str], writer: str) -> Any:
    """Reads what `write_tensors` wrote, for the function or command `writer`; nothing in the file is run."""
    try:
        return torch.load(Path(path), map_location="cpu", weights_only=True)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:
        raise InvalidInput(f"{path} is no file of {writer}") from error


def _check_page(page: Any) -> int:
    """Tokens per page, as a paged cache has them."""
    page = check_count("page", page)
    if page & (page - 1):
        raise InvalidInput(f"page is {page}; must be a power of two")
    return page


def _check_name(model: Any) -> str:
    if not isinstance(model, str):
        raise InvalidInput(f"model is {shown(model)}; must be a name")
    return model
