"""Benchmarks of single kernels, with the sizes as options: `rooftile bench tiles`, `cusparselt` and `native-sparse`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rooftile.cli.output import DeviceOption
from rooftile.errors import InvalidInput, Unsupported
from rooftile_lab.cli.rows import FileOption, chosen_words, measured, numbers

if TYPE_CHECKING:
    import torch


def tiles(
    formats: Annotated[str, typer.Option("--formats", help="Formats of the weights by commas.")] = "fp8,int4",
    rows: Annotated[str, typer.Option("--rows", help="Rows of the inputs by commas.")] = "1,16,64,256",
    products: Annotated[str, typer.Option("--products", help="Some of qkv, o, up and down by commas.")] = "qkv,o,up,down",
    device: DeviceOption = "auto",
    json: FileOption = None,
) -> None:
    """Tiles and numbers of programs of Hopper's quantised products, each beside the one that a call takes.

    Example: rooftile bench tiles --formats int4 --rows 1,16 --json tiles.jsonl
    """
    counts, target = numbers("--rows", rows), _gpu("tiles", device)
    from rooftile_lab.bench import tiles as bench
    from rooftile_lab.bench.suites.linear import FORMATS

    kinds = chosen_words("--formats", formats, FORMATS)
    names = chosen_words("--products", products, bench.PRODUCTS)
    measured(lambda session, say: bench.measure(session, kinds, counts, names, say), target, json)


def cusparselt(
    dtypes: Annotated[str, typer.Option("--dtypes", help="Some of bf16, fp8 and int8 by commas.")] = "bf16,fp8,int8",
    rows: Annotated[str, typer.Option("--rows", help="Rows of the inputs by commas.")] = "256,1024,8192",
    device: DeviceOption = "auto",
    json: FileOption = None,
) -> None:
    """All algorithms of cuSPARSELt for 2:4 weights beside PyTorch's dense products.

    Example: rooftile bench cusparselt --dtypes fp8 --rows 256 --json algorithms.jsonl
    """
    counts, target = numbers("--rows", rows), _gpu("cusparselt", device)
    from rooftile_lab.bench import cusparselt as bench

    kinds = chosen_words("--dtypes", dtypes, bench.DTYPES)
    measured(lambda session, say: bench.measure(session, kinds, counts, say), target, json)


def native_sparse(
    lengths: Annotated[str, typer.Option("--lengths", help="Tokens of the text by commas.")] = "8192,16384,32768,65536",
    kinds: Annotated[str, typer.Option("--kinds", help="Choices of blocks: random, alike, or both.")] = "random,alike",
    heads: Annotated[str, typer.Option("--heads", help="Query heads and key heads.")] = "64,4",
    dim: Annotated[int, typer.Option("--dim", min=16, help="The head dim.")] = 128,
    count: Annotated[int, typer.Option("--count", min=3, help="Blocks that a query chooses.")] = 16,
    queries: Annotated[str, typer.Option("--queries", help="Queries of a tile by commas.")] = "1,2,4",
    stages: Annotated[str, typer.Option("--stages", help="Stages of a launch by commas.")] = "2,3",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often all take turns.")] = 3,
    device: DeviceOption = "auto",
    json: FileOption = None,
) -> None:
    """The parts of Native Sparse Attention, and its kernels with other tiles than a call takes.

    Example: rooftile bench native-sparse --lengths 65536 --kinds alike --json native-sparse.jsonl
    """
    both = numbers("--heads", heads)
    if len(both) != 2 or both[0] % both[1]:
        raise InvalidInput(f"--heads is {heads!r}; give query heads and key heads that divide them, such as 64,4")
    H, Hk = both
    options: dict[str, Any] = {
        "lengths": numbers("--lengths", lengths), "queries": numbers("--queries", queries),
        "stages": numbers("--stages", stages), "rounds": rounds,
    }  # fmt: skip
    target = _gpu("native-sparse", device)
    from rooftile_lab.bench.native_sparse import run as bench
    from rooftile_lab.bench.native_sparse.variants import KINDS, Sizes

    options["kinds"] = chosen_words("--kinds", kinds, KINDS)
    sizes = Sizes(options["lengths"][0], H, Hk, dim, dim, 64, count)
    measured(lambda session, say: bench.measure(session, sizes, say, **options), target, json, refresh=True)


def _gpu(name: str, device: str) -> torch.device:
    """Returns the device, which has to be a GPU."""
    from rooftile.hardware.device import device_of

    target = device_of(device)
    if target.type != "cuda":
        raise Unsupported(f"bench {name} measures a GPU, and the device is {target.type}; give --device")
    return target
