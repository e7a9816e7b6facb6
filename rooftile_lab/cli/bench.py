"""`rooftile bench`: attention beside its peers, the suites of `rooftile_lab.bench.suites`, and what was measured before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rooftile.cli.output import (
    CaseOption,
    DeviceOption,
    JsonOption,
    TagOption,
    add_command,
    chosen_cases,
    print_json,
    print_table,
)
from rooftile.errors import InvalidInput
from rooftile_lab.bench.suites import SUITES
from rooftile_lab.cli.bench_approximate import approximate
from rooftile_lab.cli.bench_kernels import cusparselt, native_sparse, tiles
from rooftile_lab.cli.bench_serving import engine, serving
from rooftile_lab.cli.bench_suites import context_parallel, diagnosis, expert_training, recall, server, suite_command
from rooftile_lab.cli.rows import FileOption, measured, words

if TYPE_CHECKING:
    from rooftile.cost.session import Session
    from rooftile_lab.bench.results import Row
    from rooftile_lab.bench.run import Progress

app = typer.Typer(
    help="Speed, memory and error of attention beside its peers, training steps, and serving of language models.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

# the compiled FlexAttention waits for a minute a shape, so it is asked for by name
DEFAULT_PEERS = {"cpu": "standard,torch-flash", "cuda": "torch-flash,torch-cudnn"}


def attention(
    case: CaseOption = None,
    tag: TagOption = "",
    backend: Annotated[str, typer.Option(help="Rooftile's: rooftile (automatic choice), triton, ... by commas.")] = "rooftile",
    peer: Annotated[
        str | None,
        typer.Option("--peers", help="standard, torch-flash, torch-cudnn, flex, fa4, fa3, ... by commas; '' for none."),
    ] = None,
    phase: Annotated[str, typer.Option(help="fwd, bwd or both by a comma.")] = "fwd,bwd",
    rounds: Annotated[int, typer.Option(help="How often all take turns.")] = 5,
    device: DeviceOption = "auto",
    json: FileOption = None,
) -> None:
    """Times cases on Rooftile and its peers in turns, each checked against the fp64 definition first.

    Example: rooftile bench attention --tag gpu-bench --device cuda --peers torch-flash,fa4 --json results.jsonl
    """
    from rooftile.hardware.device import device_of
    from rooftile_lab.bench import peers
    from rooftile_lab.bench.run import measure

    target = device_of(device)
    chosen = chosen_cases(case, tag, f"{'gpu' if target.type == 'cuda' else 'cpu'}-bench")
    asked = peer if peer is not None else DEFAULT_PEERS[target.type]
    names = list(dict.fromkeys(words(backend) + words(asked)))
    phases = words(phase)
    if not names or not phases:
        raise InvalidInput("bench got nothing to time; give --backend or --peers a name, and --phase fwd or bwd")
    for name in names:
        peers.provider_named(name)

    def rows(session: Session, say: Progress) -> Iterator[Row]:
        for number, one in enumerate(chosen, 1):
            said = partial(_say, say, f"case {number} of {len(chosen)}, ")
            yield from measure(one, names, phases, target, rounds, on_progress=said, session=session)

    known = measured(rows, target, json, refresh=True).known
    if str(json) != "-":
        rates = ", ".join(f"{dtype} {rate:,.4g}" for dtype, rate in known.matmul_tflops.items())
        print(f"\nCeilings of this run: copy {known.copy_gbs:,.4g} GB/s; matmul TFLOP/s {rates}")


def _say(say: Progress, before: str, words: str) -> None:
    say(before + words)


def list_cases(
    tag: TagOption = "",
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> None:
    """The cases, their tags and sizes, and every backend and peer with whether it can run here.

    Example: rooftile bench list --tag cpu-bench
    """
    from rooftile.exact.cases import CASES
    from rooftile.hardware.device import device_of
    from rooftile.runtime.devices import arch
    from rooftile_lab.bench import peers

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
    for each in (file, after):
        if each is not None and not each.is_file():
            raise InvalidInput(f"{each} does not exist; `rooftile bench attention --json {each}` writes such a file")
    from rooftile_lab.bench import compare as comparison
    from rooftile_lab.bench import results

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


COMMANDS: dict[str, Callable[..., None]] = {
    "attention": attention, "serving": serving, "engine": engine,
    **{suite.name: suite_command(suite) for suite in SUITES.values()},
    # suites with options of their own
    "approximate": approximate, "context-parallel": context_parallel, "diagnosis": diagnosis, "expert-training": expert_training,
    "recall": recall, "server": server,
    "tiles": tiles, "cusparselt": cusparselt, "native-sparse": native_sparse,
    "list": list_cases, "compare": compare,
}  # fmt: skip
for _name, _command in COMMANDS.items():
    add_command(app, _name, _command)


def _sizes(name: str, where: str) -> str:
    from rooftile.exact.cases import CASES

    problem = CASES[name].problem(where)
    sizes = problem.sizes
    return f"B {sizes.B} T {sizes.T} S {sizes.S} H {sizes.H}/{sizes.Hk}, {problem.spec}"
