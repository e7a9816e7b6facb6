"""`rooftile bench serving` and `rooftile bench engine`: workloads of requests, and one engine beside its peers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rooftile.cli.output import DeviceOption, print_table
from rooftile.errors import InvalidInput
from rooftile_lab.cli.rows import FileOption, measured

if TYPE_CHECKING:
    import torch

    from rooftile.cost.session import Session
    from rooftile_lab.bench.results import Row
    from rooftile_lab.bench.run import Progress
    from rooftile_lab.bench.workloads import Workload

# the names of the models in `rooftile_lab.bench.models`, which needs torch
MODELS = ("tiny", "0.6b", "1b", "8b", "attention-2.7b", "hybrid-2.7b", "mamba2-2.7b", "moe-16b", "granite-h-small")


def serving(
    workload: Annotated[
        list[str] | None, typer.Option(help="W1, W2, ... W11; W4 and W5 are several. May be given several times.")
    ] = None,
    model: Annotated[str, typer.Option(help=f"{', '.join(MODELS)} with random weights, or a checkpoint's folder.")] = "",
    scale: Annotated[float, typer.Option(help="The share of the workload's requests and of their lengths.")] = 1.0,
    rate: Annotated[float | None, typer.Option(help="Requests per second, arriving at random; else all at once.")] = None,
    allocator: Annotated[str, typer.Option(help="paged or contiguous, for every workload.")] = "",
    num_blocks: Annotated[int | None, typer.Option(help="Blocks of the cache.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per block.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Answers that run at once.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="The cache's dtype: fp8; left out, the model's.")] = None,
    weights: Annotated[str, typer.Option(help="Format of the projections: fp8, int4:64, 2:4; auto takes the model's.")] = "auto",
    tp: Annotated[int, typer.Option("--tp", help="GPUs that share the model.", min=1)] = 1,
    cp: Annotated[int, typer.Option("--cp", help="GPUs that deal out the tokens of each sequence.", min=1)] = 1,
    runs: Annotated[int, typer.Option(help="How often each workload is run; the median is shown.")] = 3,
    url: Annotated[str, typer.Option(help="Measure a running server instead, such as http://127.0.0.1:8000.")] = "",
    api_key: Annotated[str, typer.Option(help="The key of that server.", envvar="ROOFTILE_API_KEY")] = "",
    vocabulary: Annotated[int, typer.Option(help="Token ids sent to that server are below this.")] = 10_000,
    device: DeviceOption = "auto",
    json: FileOption = None,
) -> None:
    """Serves workloads: tokens per second, latencies, waste of the cache, and what sharing saves.

    Example: rooftile bench serving --workload W1 --workload W8 --model 1b --json serving.jsonl
    """
    if model and model not in MODELS and not url and not Path(model).is_dir():
        raise InvalidInput(f"--model is {model!r}, which is no folder; has {', '.join(MODELS)}, or give a checkpoint's folder")
    from rooftile.hardware.device import device_of
    from rooftile_lab.bench import workloads
    from rooftile_lab.bench.serving import measure

    target = device_of(device)
    chosen = workloads.named(workload or ["W1"], factor=scale, rate=rate)
    if url:
        _over_http(chosen, target, url, api_key, model, vocabulary, runs, scale, json)
        return
    asked = {"num_blocks": num_blocks, "block_size": block_size, "max_num_seqs": max_num_seqs, "kv_dtype": kv_dtype}
    settings = {name: value for name, value in asked.items() if value is not None} | {"weights": weights}
    if tp > 1 or cp > 1:
        settings |= {"tensor_parallel_size": tp, "context_parallel_size": cp, "device": target.type}
    model = model or ("1b" if target.type == "cuda" else "tiny")

    def rows(session: Session, say: Progress) -> Iterator[Row]:
        return measure(
            chosen, session, model=model, allocator=allocator or None, scale=scale, runs=runs, settings=settings, say=say
        )

    measured(rows, target, json, shown=show_serving)


def _over_http(
    chosen: list[Workload], target: torch.device, url: str, key: str, model: str, vocabulary: int, runs: int, scale: float,
    json: Path | None,
) -> None:  # fmt: skip
    """Measures a running server."""
    from rooftile_lab.bench.over_http import measure, table

    def rows(session: Session, say: Progress) -> Iterator[Row]:
        return measure(chosen, session, url, key=key, model=model, vocabulary=vocabulary, runs=runs, scale=scale, say=say)

    measured(rows, target, json, shown=lambda found: print_table(url, *table(found)))


def engine(
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="start, W1, W10, W11, decode-step, idle, W8, context, speculative, speculative-draft, adapters, "
            "peers; all by default. Repeatable."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help=f"With random weights: {', '.join(MODELS)}.")] = "",
    scale: Annotated[float, typer.Option(help="The share of the requests and of their lengths.")] = 1.0,
    batch: Annotated[
        int | None, typer.Option(help="How many requests decode in decode-step and context; left out, 256 and 8.", min=1)
    ] = None,
    weights: Annotated[str, typer.Option(help="Format of the projections: fp8, int4:64, 2:4; auto takes the model's.")] = "auto",
    peer_requests: Annotated[int, typer.Option(help="How many of W1's requests the peers get.")] = 64,
    peer_limit: Annotated[float, typer.Option(help="Seconds after which a peer is stopped.")] = 90.0,
    w8_requests: Annotated[int, typer.Option(help="How many of W8's requests each allocator gets.")] = 200,
    runs: Annotated[int, typer.Option(help="How often each part is measured, after a first run.", min=1)] = 2,
    device: DeviceOption = "auto",
    json: FileOption = None,
) -> None:
    """Measures one engine part by part, as peers publish theirs, and Transformers' continuous batching beside it.

    Example: rooftile bench engine --model 1b --case W1 --case decode-step --json engine.jsonl
    """
    from rooftile.hardware.device import device_of
    from rooftile_lab.bench.suites.engine import PARTS, EngineOptions, measure

    target = device_of(device)
    asked = EngineOptions(
        model=model or ("1b" if target.type == "cuda" else "tiny"), parts=case or PARTS, scale=scale, batch=batch,
        weights=weights, peer_requests=peer_requests, peer_limit_s=peer_limit, w8_requests=w8_requests, runs=runs,
    )  # fmt: skip
    asked.check()
    measured(partial(measure, asked), target, json)


def show_serving(rows: list[Row]) -> None:
    """Two tables, throughput and memory in one and latencies in the other, and the ratios of what was compared."""
    print_table(
        f"{rows[0].settings['model']} on {rows[0].device}, median of {rows[0].samples}",
        ("workload", "cache", "answered", "out tok/s", "least-most", "tok/s", "req/s", "good/s", "waste %", "saved %", "running",
         "preempted", "steps", "host us", "% floor", "peak GiB", "start s"),
        [_throughput(row) for row in rows], left=2,
    )  # fmt: skip
    print()
    kinds = ("ttft", "itl", "tpot", "e2e")
    latencies = [
        (row.case, _cache(row), *(_latency(row, kind) for kind in kinds), _ms(row.measures.get("normalised_ms"))) for row in rows
    ]
    columns = ("ms, p50/p90/p99", "cache", "TTFT", "ITL", "TPOT", "E2E", "E2E per token")
    print_table("", columns, latencies, left=2)
    for row in rows:
        ratios = {name: ratio for name, ratio in row.measures.items() if name.endswith("_over_reserved")}
        if ratios:
            words = ", ".join(f"{name.removesuffix('_over_reserved')} {ratio:.2f}x" for name, ratio in ratios.items())
            print(f"\n{row.case}, paged over contiguous: {words}")


def _throughput(row: Row) -> tuple[str, ...]:
    found: dict[str, Any] = row.measures
    lost = "".join(f", {found[word]:g} {word}" for word in ("refused", "gone") if found[word])
    return (
        row.case,
        _cache(row),
        f"{found['requests']:g}{lost}",
        f"{found['output_tok_s']:,.0f}",
        f"{row.low['output_tok_s']:,.0f}-{row.high['output_tok_s']:,.0f}",
        f"{found['total_tok_s']:,.0f}",
        f"{found['requests_s']:.4g}",
        f"{found['goodput_s']:.4g}",
        f"{found['waste_percent']:.1f}",
        f"{found['saved_percent']:.1f}",
        f"{found['running']:.1f}",
        f"{found['preemptions']:g}",
        f"{found['steps']:,g}",
        f"{found['host_us_step']:,.0f}",
        "-" if row.roofline_percent is None else f"{row.roofline_percent:.1f}",
        f"{(row.peak_bytes or 0) / 2**30:.1f}",
        f"{found['start_s']:.1f}",
    )


def _cache(row: Row) -> str:
    return str(row.settings["allocator"])


def _latency(row: Row, kind: str) -> str:
    return " / ".join(_ms(row.measures.get(f"{kind}_ms_p{rank}")) for rank in (50, 90, 99))


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
