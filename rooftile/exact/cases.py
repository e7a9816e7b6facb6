"""Named attention problems: the one list of shapes for tests, benchmarks and tuning.

A case fixes everything except the device. `CASES` maps names to cases; `tagged("gpu-bench")` picks by tag.

    conformance   small, run against the definition on every backend
    gpu-bench     the shapes of the published GPU numbers
    cpu-bench     shapes that are feasible on two CPU cores
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.exact.masks import CAUSAL, FULL, Chunk, Mask, Prefix, Window
from rooftile.exact.spec import DTYPES, Problem, Sizes, Spec


class Inputs(NamedTuple):
    """The tensors of a case, ready for `rooftile.attention(*inputs.tensors, inputs.mask, **inputs.options)`."""

    tensors: tuple[Tensor, ...]  # q, k, v, and cu_q, cu_k if packed
    mask: Mask
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A named problem. With lengths per sequence it is packed."""

    name: str
    tags: frozenset[str]
    B: int = 2
    T: int = 128
    S: int = 128
    H: int = 2
    Hk: int = 2
    dim: int = 64
    dim_v: int | None = None  # dim if None
    dtype: str = "fp32"
    mask: Mask = FULL
    lengths: tuple[tuple[int, int], ...] = ()
    scale: float | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    bias: str = ""  # its own axes, such as "BHTS" or "HTS"; the others are broadcast
    alibi: bool = False
    sinks: bool = False
    strides: str = "contiguous"  # or "transposed" (a view of (B, H, T, D)), "expanded" (one batch row for all), "sliced"
    scatter: str = "normal"  # or "outliers", "hot" (fp16 near its largest numbers), "cold" (lse < -88)
    # added to all scores of every second row: by the bias, or, without one, by a feature of q and k
    offset: float = 0.0

    def problem(self, device: str = "cpu", *, needs_grad: bool = True, needs_lse: bool = False) -> Problem:
        """Returns the problem on a device, named as in a Spec ("cpu", "sm90")."""
        spec = Spec(
            dtype=DTYPES[self.dtype],
            dim=self.dim,
            dim_v=self.dim_v or self.dim,
            group=self.H // self.Hk,
            mask=self.mask,
            layout="packed" if self.lengths else "dense",
            scale=self.dim**-0.5 if self.scale is None else self.scale,
            softcap=self.softcap,
            dropout=self.dropout,
            has_bias=bool(self.bias),
            has_alibi=self.alibi,
            has_sinks=self.sinks,
            needs_grad=needs_grad,
            bias_grad=needs_grad and bool(self.bias),
            needs_lse=needs_lse,
            device=device,
        )
        T, S = (sum(n) for n in zip(*self.lengths, strict=True)) if self.lengths else (self.T, self.S)
        B = len(self.lengths) or self.B
        return Problem(spec=spec, sizes=Sizes(B=B, T=T, S=S, H=self.H, Hk=self.Hk, lengths=self.lengths))

    def inputs(self, device: torch.device | str = "cpu", *, seed: int = 0, requires_grad: bool = False) -> Inputs:
        """Draws random tensors for this case: the same on every device for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        sizes = self.problem().sizes
        Dv = self.dim_v or self.dim
        shapes = [(sizes.T, self.H, self.dim), (sizes.S, self.Hk, self.dim), (sizes.S, self.Hk, Dv)]
        if not self.lengths:
            shapes = [(self.B, *shape) for shape in shapes]
        q, k, v = (self._draw(shape, n, generator, device) for n, shape in enumerate(shapes))
        if self.offset and not self.bias:
            # every second row of queries: an outlier feature that all keys share
            size = (abs(self.offset) * self.dim**0.5 if self.scale is None else abs(self.offset / self.scale)) ** 0.5
            k[..., 0] = size
            q[..., 0] = 0.0
            q[..., 1::2, :, 0] = size if self.offset > 0 else -size
        options: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap or None}
        if self.bias:
            full = {"B": sizes.B, "H": self.H, "T": sizes.T, "S": max(s for _, s in sizes.sequences)}
            axes = "HTS" if self.lengths else "BHTS"
            shape = [full[axis] if axis in self.bias else 1 for axis in axes]
            options["bias"] = self._with_offset(torch.randn(shape, generator=generator)).to(device, q.dtype)
        if self.alibi:
            options["alibi"] = torch.rand(self.H, generator=generator).to(device)
        if self.sinks:
            options["sinks"] = torch.randn(self.H, generator=generator).to(device)
        if self.dropout:
            options |= {"dropout": self.dropout, "seed": 0x1234_5678_9ABC + seed}
        for x in (q, k, v, options.get("bias"), options.get("sinks")):
            if x is not None and requires_grad:
                x.requires_grad_()
        offsets = ()
        if self.lengths:
            offsets = tuple(
                torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
                for n in zip(*self.lengths, strict=True)
            )
        return Inputs((q, k, v, *offsets), self.mask, options)

    def _with_offset(self, bias: Tensor) -> Tensor:
        """Adds the offset to every second row of a bias, as far as the dtype reaches."""
        if self.offset:
            widest = torch.finfo(DTYPES[self.dtype]).max
            bias[..., 1::2, :] = (bias[..., 1::2, :] + self.offset).clamp(-widest, widest)
        return bias

    def _draw(self, shape: tuple[int, ...], which: int, generator: torch.Generator, device: torch.device | str) -> Tensor:
        x = torch.randn(shape, generator=generator)
        if self.scatter == "outliers":
            x = x + 10 * torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 1e-3)
        elif self.scatter == "hot":
            # one of the two factors is small, so that scores stay finite
            x = (x * 2e4).clamp(-6e4, 6e4) if which != 1 else x * 1e-4
        elif self.scatter == "cold":
            # puts every score of a row far below exp's underflow
            x = x.abs() + 4.0 if which == 0 else -(x.abs() + 4.0) if which == 1 else x
        x = x.to(device, DTYPES[self.dtype])
        if self.strides == "transposed" and x.ndim == 4:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        elif self.strides == "expanded" and x.ndim == 4:
            x = x[:1].expand(x.shape)
        elif self.strides == "sliced":
            x = torch.cat([x, x], dim=-1)[..., : x.shape[-1]]
        return x.detach()


def tagged(tag: str) -> list[Case]:
    """Returns the cases with a tag, in the order of the list."""
    return [case for case in CASES.values() if tag in case.tags]


def _conformance(name: str, **what: Any) -> Case:
    return Case(name=name, tags=frozenset({"conformance"}), **what)


def _gpu_bench(dim: int, causal: bool, length: int, dim_v: int | None = None) -> Case:
    # always 16,384 tokens and 2,048 / D heads, so that the FLOPs per length are comparable
    size = f"{length // 1024}k" if length >= 1024 else f"{length}"
    tag = f"d{dim}" if dim_v is None else f"d{dim}-{dim_v}"
    name = f"{tag}-{'causal' if causal else 'full'}-{size}"
    sizes = {"B": 16384 // length, "T": length, "S": length, "H": 2048 // dim, "Hk": 2048 // dim}
    tags = frozenset({"gpu-bench", tag})
    return Case(name=name, tags=tags, **sizes, dim=dim, dim_v=dim_v, dtype="bf16", mask=CAUSAL if causal else FULL)


def _cpu_bench(causal: bool, length: int) -> Case:
    name = f"cpu-{'causal' if causal else 'full'}-{length}"
    tags = frozenset({"cpu-bench"})
    mask = CAUSAL if causal else FULL
    return Case(name=name, tags=tags, B=1, T=length, S=length, H=8, Hk=8, dim=64, mask=mask)


# offsets of scores: a mask of padding adds the smallest number of the dtype to each score of a row that sees nothing else
LOWEST = -math.inf


def _offsets() -> Iterator[Case]:
    """Yields problems whose rows share a large offset: a backward that recomputes weights from one rounded lse fails them."""
    for offset in (1e3, 1e6, 1e8, -1e6, LOWEST):
        name = "offset-lowest" if offset == LOWEST else f"offset-{offset:.0e}".replace("e+0", "e")
        shared = {"offset": offset, "dim": 32}
        yield _conformance(name, bias="BHTS", T=70, S=90, **shared)
        yield _conformance(f"{name}-rows", bias="HT", T=65, S=70, H=4, Hk=2, dropout=0.2, **shared)
        yield _conformance(f"{name}-bf16", bias="HTS", dtype="bf16", T=70, S=150, mask=CAUSAL, H=4, Hk=2, **shared)
        yield _conformance(f"{name}-packed", bias="HTS", lengths=((60, 60), (33, 90), (0, 5)), mask=CAUSAL, **shared)
        if offset != LOWEST:
            feature = {"offset": offset, "dim": 64, "H": 4, "Hk": 2}
            yield _conformance(f"{name}-feature", T=70, S=90, mask=CAUSAL, **feature)
            yield _conformance(f"{name}-feature-full", T=129, S=90, scale=1.0, **feature)
            yield _conformance(f"{name}-feature-bf16", dtype="bf16", T=90, S=150, **feature)
            yield _conformance(f"{name}-feature-packed", lengths=((60, 60), (33, 90)), mask=CAUSAL, dtype="bf16", **feature)
    yield _conformance("offset-lowest-fp16", bias="BHTS", dtype="fp16", T=70, S=90, offset=LOWEST)
    yield _conformance("offset-lowest-d128", bias="BTS", dtype="bf16", T=140, S=300, dim=128, H=4, Hk=2, offset=LOWEST)
    yield _conformance(
        "offset-1e6-everything", T=100, S=120, H=4, Hk=2, mask=CAUSAL & Window(50), softcap=4.0, bias="HTS", alibi=True,
        sinks=True, dropout=0.1, offset=1e6,
    )  # fmt: skip
    yield _conformance("offset-1e3-sinks", bias="BHTS", T=70, S=90, sinks=True, mask=CAUSAL & Window(20), offset=-1e3)


_LIST = (
    _conformance("mha"),
    _conformance("causal", mask=CAUSAL),
    _conformance("one-query", T=1, S=77, mask=CAUSAL),
    _conformance("one-key", T=65, S=1),
    _conformance("one-by-one", T=1, S=1),
    _conformance("no-query", T=0, S=65),
    _conformance("no-key", T=65, S=0),
    _conformance("causal-more-queries", T=127, S=64, mask=CAUSAL),
    _conformance("causal-more-keys", T=63, S=191, mask=CAUSAL),
    _conformance("t63", T=63, S=63, mask=CAUSAL),
    _conformance("t65", T=65, S=65),
    _conformance("t129", T=129, S=129, mask=CAUSAL),
    _conformance("t191", T=191, S=191),
    # more keys, and more queries, than a tile of any backend
    _conformance("long", B=1, T=600, S=600, H=2, Hk=1, dim=16, mask=CAUSAL),
    _conformance("long-keys", B=1, T=70, S=1100, dim=16),
    _conformance("long-window", B=1, T=40, S=1300, dim=16, mask=CAUSAL & Window(700), sinks=True),
    _conformance("window", T=200, S=200, mask=Window(17)),
    _conformance("window-both", T=150, S=190, mask=Window(30, 5)),
    _conformance("window-zero", T=70, S=70, mask=Window(0, 0)),
    _conformance("causal-window", T=257, S=257, mask=CAUSAL & Window(64)),
    _conformance("prefix", T=140, S=140, mask=Prefix(50)),
    _conformance("prefix-window", T=140, S=160, mask=Prefix(50) & Window(70, 100)),
    _conformance("prefix-more-queries", T=90, S=60, mask=Prefix(20)),
    _conformance("chunk", T=200, S=200, mask=Chunk(48)),
    _conformance("chunk-causal", T=129, S=200, mask=Chunk(64) & CAUSAL),
    _conformance("chunk-more-queries", T=100, S=60, mask=Chunk(32)),
    _conformance("two-chunks", T=70, S=70, mask=Chunk(6) & Chunk(4)),
    _conformance("gqa2", H=4, Hk=2, mask=CAUSAL),
    _conformance("gqa5", H=5, Hk=1, T=33, S=95, mask=CAUSAL),
    _conformance("gqa8", H=8, Hk=1, T=40),
    _conformance("gqa16", H=32, Hk=2, T=20, S=30, dim=32),
    _conformance("d16", dim=16, mask=CAUSAL),
    _conformance("d24", dim=24, T=70, S=70),
    _conformance("d32", dim=32, T=70, S=70),
    _conformance("d80", dim=80, T=70, S=70, mask=CAUSAL),
    _conformance("d96", dim=96, T=70, S=70, mask=CAUSAL),
    _conformance("d128", dim=128, T=100, S=100, mask=CAUSAL),
    _conformance("d192", dim=192, T=70, S=70),
    _conformance("d192-128", dim=192, dim_v=128, T=70, S=90, mask=CAUSAL),
    _conformance("d256", dim=256, T=70, S=70, mask=CAUSAL),
    _conformance("d96-bf16", dim=96, dtype="bf16", T=150, S=190, H=4, Hk=2, mask=CAUSAL),
    _conformance("d192-128-bf16", dim=192, dim_v=128, dtype="bf16", T=190, S=150, H=4, Hk=2, mask=CAUSAL),
    _conformance("d32-64", dim=32, dim_v=64, T=70, S=70),
    _conformance("d320", dim=320, T=40, S=40),
    _conformance("bf16", dtype="bf16", T=150, S=150, mask=CAUSAL),
    _conformance("bf16-full", dtype="bf16", T=128, S=256, H=4, Hk=2),
    _conformance("fp16", dtype="fp16", T=150, S=150, mask=CAUSAL),
    _conformance("fp16-hot", dtype="fp16", scatter="hot", T=65, S=65),
    _conformance("bf16-outliers", dtype="bf16", scatter="outliers", T=128, S=128),
    _conformance("cold", scatter="cold", T=65, S=65, dim=128, scale=1.0),
    _conformance("scale", scale=0.3, T=65, S=65),
    _conformance("negative-scale", scale=-0.2, T=65, S=65, mask=CAUSAL),
    _conformance("softcap", softcap=5.0, T=100, S=100, mask=CAUSAL),
    _conformance("softcap-window", softcap=2.0, T=100, S=130, mask=CAUSAL & Window(40), H=4, Hk=2),
    _conformance("bias", bias="BHTS", T=70, S=90),
    _conformance("bias-heads", bias="HTS", T=70, S=70, mask=CAUSAL),
    _conformance("bias-batch", bias="BTS", T=65, S=70, H=4, Hk=2),
    _conformance("bias-keys", bias="BS", T=65, S=70),
    _conformance("bias-one", bias="S", T=65, S=130),
    _conformance("bias-rows", bias="HT", T=65, S=70),
    _conformance("bias-bf16", bias="HTS", dtype="bf16", T=70, S=70, mask=CAUSAL),
    _conformance("alibi", alibi=True, T=100, S=140, mask=CAUSAL),
    _conformance("alibi-full", alibi=True, T=70, S=70, H=4, Hk=2),
    _conformance("sinks", sinks=True, T=100, S=100, mask=CAUSAL & Window(20)),
    _conformance("sinks-more-queries", sinks=True, T=80, S=50, mask=CAUSAL),
    _conformance("sinks-bf16", sinks=True, dtype="bf16", T=100, S=100, mask=CAUSAL, H=8, Hk=2),
    _conformance("dropout", dropout=0.2, T=100, S=130),
    _conformance("dropout-causal", dropout=0.5, T=70, S=70, mask=CAUSAL, H=4, Hk=2),
    _conformance(
        "everything", T=100, S=120, H=4, Hk=2, mask=CAUSAL & Window(50), softcap=4.0, bias="HTS", alibi=True, sinks=True,
        dropout=0.1,
    ),
    _conformance("transposed", strides="transposed", mask=CAUSAL),
    _conformance("expanded", strides="expanded"),
    _conformance("sliced", strides="sliced", T=65, S=70),
    _conformance("packed", lengths=((5, 5), (70, 70), (1, 1), (129, 129)), mask=CAUSAL),
    _conformance("packed-full", lengths=((64, 64), (65, 63))),
    _conformance("packed-empty", lengths=((0, 0), (30, 30), (0, 10), (17, 0), (40, 40)), mask=CAUSAL),
    _conformance("packed-uneven", lengths=((10, 70), (90, 40), (128, 128)), mask=CAUSAL, H=4, Hk=2),
    _conformance("packed-window", lengths=((100, 100), (40, 90)), mask=CAUSAL & Window(16)),
    _conformance("packed-chunk", lengths=((100, 100), (40, 90)), mask=Chunk(32)),
    _conformance("packed-bf16", lengths=((100, 100), (33, 33), (200, 200)), mask=CAUSAL, dtype="bf16", H=4, Hk=1),
    _conformance(
        "packed-everything", lengths=((60, 60), (33, 90)), H=4, Hk=2, mask=CAUSAL & Window(50), softcap=4.0, bias="HTS",
        alibi=True, sinks=True, dropout=0.1,
    ),
    _conformance("packed-long", lengths=((20, 700), (540, 530)), dim=16, mask=CAUSAL, dtype="bf16"),
    _conformance("packed-192-128", lengths=((60, 60), (33, 90)), dim=192, dim_v=128, mask=CAUSAL),
    _conformance("packed-192-128-bf16", lengths=((60, 60), (133, 90)), dim=192, dim_v=128, dtype="bf16", mask=CAUSAL),
    _conformance("packed-96-bf16", lengths=((60, 60), (133, 90)), dim=96, dtype="bf16", mask=CAUSAL),
    *_offsets(),
    *(
        _gpu_bench(dim, causal, length)
        for dim in (64, 128, 256, 80, 96)
        for causal in (False, True)
        for length in (512, 1024, 2048, 4096, 8192, 16384)
        if length >= 1024 or dim in (64, 128, 256)
    ),
    *(_gpu_bench(192, causal, length, 128) for causal in (False, True) for length in (1024, 2048, 4096, 8192, 16384)),
    *(_cpu_bench(causal, length) for causal in (False, True) for length in (256, 512, 1024, 2048, 4096, 8192)),
)  # fmt: skip

CASES: dict[str, Case] = {case.name: case for case in _LIST}
