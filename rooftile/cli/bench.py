"""`rooftile bench`: speed, memory and error of attention beside its peers; and of serving language models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rooftile.bench import compare as comparison
from rooftile.bench import peers, results
from rooftile.bench.results import Row
from rooftile.bench.run import measure
from rooftile.bench.session import open_session
from rooftile.cases import CASES
from rooftile.cli.output import (
    CaseOption,
    DeviceOption,
    JsonOption,
    TagOption,
    chosen_cases,
    print_json,
    print_table,
    progress,
)
from rooftile.errors import InvalidInput
from rooftile.hardware.arch import arch
from rooftile.hardware.device import device_of

if TYPE_CHECKING:
    from rooftile.bench import serving

app = typer.Typer(
    help="Speed, memory and error of attention beside its peers, and of serving language models.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

# the compiled FlexAttention waits for a minute a shape, so it is asked for by name
DEFAULT_PEERS = {"cpu": "standard,torch-flash", "cuda": "torch-flash,torch-cudnn"}
FileOption = Annotated[
    Path | None,
    typer.Option("--json", help="Append JSON lines to this file; - prints them on stdout instead of the table."),
]


@app.command("attention")
def attention(
    case: CaseOption = None,
    tag: TagOption = "",
    backend: Annotated[
        str, typer.Option(help="Rooftile's: rooftile (automatic choice), triton, ... by commas.")
    ] = "rooftile",
    peer: Annotated[
        str | None,
        typer.Option("--peers", help="standard, torch-flash, torch-cudnn, flex, fa4, ... by commas; '' for none."),
    ] = None,
    phase: Annotated[str, typer.Option(help="fwd, bwd or both by a comma.")] = "fwd,bwd",
    rounds: Annotated[int, typer.Option(help="How often all take turns.")] = 5,
    device: DeviceOption = "auto",
    commit: Annotated[str, typer.Option(help="The commit that is measured, where git cannot say.")] = "",
    json: FileOption = None,
) -> None:
    """Times cases on Rooftile and its peers in turns, each checked against the fp64 definition first.

    Example: rooftile bench attention --tag gpu-bench --device cuda --peers torch-flash,fa4 --json results.jsonl
    """
    target = device_of(device)
    chosen = chosen_cases(case, tag, f"{'gpu' if target.type == 'cuda' else 'cpu'}-bench")
    asked = peer if peer is not None else DEFAULT_PEERS[target.type]
    names = list(dict.fromkeys(_words(backend) + _words(asked)))
    phases = _words(phase)
    if not names or not phases:
        raise InvalidInput("bench got nothing to time; give --backend or --peers a name, and --phase fwd or bwd")
    for name in names:
        peers.provider_named(name)
    found: list[Row] = []
    with progress() as say:
        say("measuring the ceilings")
        session = open_session(target, refresh=True, commit=commit)
        for number, one in enumerate(chosen, 1):

            def announce(words: str, number: int = number) -> None:
                say(f"case {number} of {len(chosen)}, {words}")

            rows = measure(one, names, phases, target, rounds, on_progress=announce, session=session)
            found += rows
            # after each case: a run that is cut short keeps what it has
            if json is not None and str(json) != "-":
                results.append(json, (row.json() for row in rows))
    if str(json) == "-":
        for row in found:
            print(row.json())
    else:
        _show(found, session.ceilings.copy_gbs, session.ceilings.matmul_tflops)


@app.command("serving")
def serve(
    workload: Annotated[
        list[str] | None, typer.Option(help="W1, W2, ... W11; W4, W5 are several. May be given several times.")
    ] = None,
    model: Annotated[str, typer.Option(help="tiny, 0.6b, 1b, 8b with random weights, or a checkpoint's folder.")] = "",
    scale: Annotated[float, typer.Option(help="The share of the workload's requests and of their lengths.")] = 1.0,
    rate: Annotated[float | None, typer.Option(help="Requests a second, arriving at random; else all at once.")] = None,
    allocator: Annotated[str, typer.Option(help="paged or contiguous, for every workload.")] = "",
    num_blocks: Annotated[int | None, typer.Option(help="Blocks of the cache.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a block.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Answers that run at once.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Of the cache: fp8; left out, the model's.")] = None,
    runs: Annotated[int, typer.Option(help="How often each is run; the median is shown.")] = 3,
    device: DeviceOption = "auto",
    commit: Annotated[str, typer.Option(help="The commit that is measured, where git cannot say.")] = "",
    json: FileOption = None,
) -> None:
    """Serves workloads: tokens a second, latencies, waste of the cache, what sharing saves.

    Example: rooftile bench serving --workload W1 --workload W8 --model 1b --json serving.jsonl
    """
    target = device_of(device)
    from rooftile.bench import serving, workloads

    chosen = workloads.named(workload or ["W1"], factor=scale, rate=rate)
    asked = {"num_blocks": num_blocks, "block_size": block_size, "max_num_seqs": max_num_seqs, "kv_dtype": kv_dtype}
    found: list[serving.Row] = []
    with progress() as say:
        say("the ceilings")
        session = open_session(target, commit=commit)
        for row in serving.measure(
            chosen, session, model=model or ("1b" if target.type == "cuda" else "tiny"), allocator=allocator or None,
            scale=scale, runs=runs, settings={name: value for name, value in asked.items() if value is not None}, say=say,
        ):  # fmt: skip
            found.append(row)
            if json is not None and str(json) != "-":
                results.append(json, [row.json()])
    if str(json) == "-":
        for row in found:
            print(row.json())
    else:
        _show_serving(found)


@app.command("list")
def list_cases(
    tag: TagOption = "",
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> None:
    """The cases, their tags and sizes, and every backend and peer with whether it can run here.

    Example: rooftile bench list --tag cpu-bench
    """
    target = device_of(device)
    chosen = chosen_cases(None, tag, "") if tag else list(CASES.values())
    rows = [(one.name, ",".join(sorted(one.tags)), _sizes(one.name, arch(target))) for one in chosen]
    plain = CASES["d128-causal-4k" if target.type == "cuda" else "cpu-causal-1024"]
    reasons = {name: peers.provider_named(name).reason(plain, target, True) for name in peers.names()}
    if json:
        cases = [{"case": name, "tags": tags.split(","), "problem": words} for name, tags, words in rows]
        print_json({"cases": cases, "providers": {name: reason or "runs" for name, reason in reasons.items()}})
        return
    print_table("Cases", ("case", "tags", "problem"), rows, left=3)
    print(f"\nBackends and peers, for {plain.name}")
    for name, reason in reasons.items():
        print(f"  {name:16} {'runs' if reason is None else 'no: ' + reason}")


@app.command("compare")
def compare(
    file: Annotated[Path, typer.Argument(help="JSON lines of `rooftile bench attention --json`.")],
    after: Annotated[Path | None, typer.Argument(help="A later file: how much faster it is.")] = None,
    backend: Annotated[str, typer.Option(help="Whose times are judged.")] = "rooftile",
    peer: Annotated[str, typer.Option(help="Against whom, in one file.")] = "torch-flash",
    json: JsonOption = False,
) -> None:
    """The geometric mean and the worst ratio to a peer in one file, or of one file to a later one.

    Example: rooftile bench compare benchmarks/results/h200.jsonl --backend triton --peer torch-flash
    """
    rows = results.read(file)
    if after is not None:
        found = comparison.before_after(rows, results.read(after))
    else:
        found = comparison.against_peer(rows, backend, peer)
    if json:
        print_json([one.json() for one in found])
        return
    for one in found:
        print(one)


def _words(listed: str) -> list[str]:
    return [word.strip() for word in listed.split(",") if word.strip()]


def _sizes(name: str, where: str) -> str:
    problem = CASES[name].problem(where)
    sizes = problem.sizes
    return f"B {sizes.B} T {sizes.T} S {sizes.S} H {sizes.H}/{sizes.Hk}, {problem.spec}"


COLUMNS = ("case", "phase", "backend", "us", "quartiles", "TFLOP/s", "GB/s", "% roof", "x time", "peak MiB", "error")


def _show(rows: list[Row], copy_gbs: float, matmul_tflops: dict[str, float]) -> None:
    """The rows as a table, "x time" against the first backend of each case; what was not timed below it, by reason."""
    first = {(row.case, row.phase): row for row in reversed(rows)}
    print_table(
        "", COLUMNS, [_cells(row, first[row.case, row.phase]) for row in rows if row.median_us is not None], left=3
    )
    rates = ", ".join(f"{dtype} {rate:,.4g}" for dtype, rate in matmul_tflops.items())
    print(f"\nCeilings of this run: copy {copy_gbs:,.4g} GB/s; matmul TFLOP/s {rates}")
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.reason:
            reasons.setdefault((row.backend, row.reason), []).append(f"{row.case} {row.phase}")
    for (name, reason), where in reasons.items():
        print(f"{name}: {reason}  [{', '.join(where[:4])}{', ...' if len(where) > 4 else ''}]")


def _cells(row: Row, first: Row) -> tuple[str, ...]:
    assert row.median_us is not None
    return (
        row.case,
        row.phase,
        row.backend if row.ran in ("", row.backend) else f"{row.backend} ({row.ran})",
        f"{row.median_us:,.1f}",
        f"{row.low_us:,.0f}-{row.high_us:,.0f}",
        f"{row.tflops:.4g}",
        f"{row.gbs:,.4g}",
        f"{row.roofline_percent:.1f}",
        f"{row.median_us / first.median_us:.2f}" if first.median_us else "-",
        f"{(row.peak_bytes or 0) / 2**20:,.1f}",
        f"{row.error:.1e}" if row.error is not None else "-",
    )


def _show_serving(rows: list[serving.Row]) -> None:
    """Two tables, throughput and memory in one, latencies in the other, and the ratios of what was compared."""
    print_table(
        f"{rows[0].model} on {rows[0].device}, median of {rows[0].runs}",
        ("workload", "cache", "answered", "out tok/s", "least-most", "tok/s", "req/s", "good/s", "waste %", "saved %", "running",
         "preempted", "steps", "host us", "% floor", "peak GiB", "start s"),
        [_throughput(row) for row in rows], left=2,
    )  # fmt: skip
    print()
    kinds = ("ttft", "itl", "tpot", "e2e")
    latencies = [
        (row.workload, row.allocator, *(_latency(row.median, kind) for kind in kinds), _ms(row.median.normalised_ms))
        for row in rows
    ]
    columns = ("ms, p50/p90/p99", "cache", "TTFT", "ITL", "TPOT", "E2E", "E2E a token")
    print_table("", columns, latencies, left=2)
    for row in rows:
        if row.over_contiguous is not None:
            words = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in row.over_contiguous.items())
            print(f"\n{row.workload}, paged over contiguous: {words}")


def _throughput(row: serving.Row) -> tuple[str, ...]:
    found = row.median
    lost = "".join(f", {n:g} {word}" for n, word in ((found.refused, "refused"), (found.gone, "gone")) if n)
    return (
        row.workload,
        row.allocator,
        f"{found.requests:g}{lost}",
        f"{found.output_tok_s:,.0f}",
        f"{row.low.output_tok_s:,.0f}-{row.high.output_tok_s:,.0f}",
        f"{found.total_tok_s:,.0f}",
        f"{found.requests_s:.4g}",
        f"{found.goodput_s:.4g}",
        f"{found.waste_percent:.1f}",
        f"{found.saved_percent:.1f}",
        f"{found.running:.1f}",
        f"{found.preemptions:g}",
        f"{found.steps:,g}",
        f"{found.host_us_step:,.0f}",
        "-" if found.floor_percent is None else f"{found.floor_percent:.1f}",
        f"{found.peak_bytes / 2**30:.1f}",
        f"{row.start_s:.1f}",
    )


def _latency(found: serving.Measures, kind: str) -> str:
    return " / ".join(_ms(getattr(found, f"{kind}_ms_p{rank}")) for rank in (50, 90, 99))


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
