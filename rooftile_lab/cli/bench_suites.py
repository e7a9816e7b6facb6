"""The commands of `rooftile_lab.bench.suites`: `rooftile bench SUITE`, some with options of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer

from rooftile.cli.output import DeviceOption
from rooftile.errors import InvalidInput
from rooftile_lab.bench.suites import SUITES, Suite
from rooftile_lab.cli.rows import FileOption, measured

CasesOption = Annotated[
    list[str] | None, typer.Option("--case", help="A case, or a pattern such as 'decode-*'; may be given several times.")
]
QuickOption = Annotated[bool, typer.Option("--quick", help="A few cases that say most, on a GPU.")]


def suite_command(suite: Suite) -> Callable[..., None]:
    """Returns the command of a suite without options of its own."""

    def command(
        case: CasesOption = None, quick: QuickOption = False, device: DeviceOption = "auto", json: FileOption = None
    ) -> None:
        run_suite(suite.name, case, device, json, quick=quick)

    command.__doc__ = f"{suite.help}\n\nExample: rooftile bench {suite.name} --json results.jsonl"
    return command


def run_suite(name: str, case: list[str] | None, device: str, json: Path | None, *, quick: bool = False, **options: Any) -> None:
    """Runs the cases of a suite; `options` are the further arguments of its `measure`."""
    from rooftile.hardware.device import device_of

    suite, target = SUITES[name], device_of(device)
    names = suite.chosen(target.type, case or (), quick=quick)
    measured(lambda session, say: suite.load().measure(session, names, say, **options), target, json, refresh=suite.refresh)


JobsOption = Annotated[int, typer.Option("--jobs", min=1, help="Processes that train at once; then steps are not timed.")]


def recall(
    case: CasesOption = None, quick: QuickOption = False, jobs: JobsOption = 1, device: DeviceOption = "auto",
    json: FileOption = None,
) -> None:  # fmt: skip
    """Trains a small decoder with each approximate method, each recurrence and a hybrid: recall, loss on English, and a needle.

    Example: rooftile bench recall --jobs 12 --json results.jsonl
    """
    run_suite("recall", case, device, json, quick=quick, jobs=jobs)


def expert_training(
    case: CasesOption = None, quick: QuickOption = False, jobs: JobsOption = 1, device: DeviceOption = "auto",
    json: FileOption = None,
) -> None:  # fmt: skip
    """Trains small decoders with experts beside a dense one of equal active width: loss, and the load of each expert.

    Example: rooftile bench expert-training --jobs 3 --json results.jsonl
    """
    run_suite("expert-training", case, device, json, quick=quick, jobs=jobs)


def context_parallel(
    case: CasesOption = None, quick: QuickOption = False, device: DeviceOption = "auto", json: FileOption = None
) -> None:  # fmt: skip
    """Compares attention over a sequence on several GPUs with one GPU's, and with PyTorch's context parallelism.

    torchrun starts a process for each GPU: torchrun --nproc-per-node 2 -m rooftile_lab bench context-parallel.

    Example: rooftile bench context-parallel --device cpu --json results.jsonl
    """
    from rooftile.hardware.device import device_of
    from rooftile_lab.bench.ranks import joined

    with joined(device_of(device).type) as (target, rank):
        # the first rank writes and prints
        say_nothing = redirect_stderr(StringIO()) if rank else nullcontext()
        with say_nothing:
            run_suite("context-parallel", case, str(target), json, quick=quick)


def diagnosis(
    case: CasesOption = None,
    quick: QuickOption = False,
    runs: Annotated[int, typer.Option("--runs", min=1, help="How often each program is diagnosed.")] = 3,
    budget: Annotated[float, typer.Option("--budget", min=0.0, help="Seconds for the experiments of a run.")] = 60.0,
    size: Annotated[str, typer.Option("--size", help="Of the programs after public ones: toy or real.")] = "toy",
    apply: Annotated[
        list[str] | None, typer.Option("--apply", help="A remedy to try on these programs, several times: compile, dtype.")
    ] = None,
    ncu: Annotated[bool, typer.Option("--ncu", help="Compare their verdicts with Nsight Compute's counters.")] = False,
    device: DeviceOption = "auto",
    json: FileOption = None,
) -> None:
    """Compares predictions of a diagnosis with measurements: savings of remedies in programs, and bytes of operators.

    Cases such as nanogpt and graph, which run only when they are named, are programs after public ones, diagnosed as a user's
    scripts: their verdicts stand beside the truth by other experiments.

    Example: rooftile bench diagnosis --case loop --runs 1 --budget 5
    """
    if size not in ("toy", "real"):
        raise InvalidInput(f"--size is {size!r}; give toy or real")
    run_suite("diagnosis", case, device, json, quick=quick, runs=runs, budget=budget, size=size, apply=apply or (), ncu=ncu)


def server(
    case: CasesOption = None,
    quick: QuickOption = False,
    model: Annotated[str, typer.Option(help="tiny, 1b or 8b, with random weights.")] = "",
    folder: Annotated[Path | None, typer.Option(help="Keep the checkpoint in this folder, or take it from there.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Blocks of the cache: 20,000 by default, 4,000 of overload.")] = None,
    max_model_len: Annotated[int, typer.Option(help="The longest sequence of all cases but overload.")] = 4096,
    scale: Annotated[float, typer.Option(help="The share of W1's requests and of their lengths.")] = 1.0,
    runs: Annotated[int, typer.Option("--runs", min=1, help="How often each case is repeated.")] = 3,
    window: Annotated[float, typer.Option(help="Seconds of each window of the case lag.")] = 10.0,
    every: Annotated[float, typer.Option(help="Seconds from one costly request of a kind to the next, of the case lag.")] = 2.0,
    seconds: Annotated[float, typer.Option(help="How long the case overload lasts.")] = 600.0,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer of the case overload.")] = 24,
    device: DeviceOption = "auto",
    json: FileOption = None,
) -> None:
    """Compares a server with its engine alone; with --case overload, sends it twice as many requests as it can answer.

    Example: rooftile bench server --device cpu --scale 0.1 --json server.jsonl
    """
    from rooftile.hardware.device import device_of
    from rooftile_lab.bench.server.run import ServerOptions

    options = ServerOptions(
        model=model or ("1b" if device_of(device).type == "cuda" else "tiny"), num_blocks=num_blocks,
        max_model_len=max_model_len, scale=scale, runs=runs, window_s=window, every_s=every, overload_s=seconds, tokens=tokens,
    )  # fmt: skip
    run_suite("server", case, device, json, quick=quick, options=options, folder=folder)
