"""`rooftile diagnose`: what bounds a script's step, operator by operator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from rooftile.errors import InvalidInput
from rooftile.weights.files.folder import check_folder

if TYPE_CHECKING:
    from rooftile.diagnosis.diagnosis import Diagnosis


class Files(NamedTuple):
    """The files to write beside the printed table; None is not written."""

    json: Path | None = None
    html: Path | None = None
    trace: Path | None = None

    def check(self) -> None:
        """Raises InvalidInput if one cannot be written, before minutes of measuring."""
        from rooftile.drawing.page import check_ready

        for name, path in self._asdict().items():
            if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
                raise InvalidInput(f"--{name} {path} cannot be written; name a file in a folder that exists")
        if self.html is not None:
            check_ready()

    def of_part(self, words: str) -> Files:
        """Returns the files of a part: with "-prompt", step.json becomes step-prompt.json."""
        return Files(*(path and path.with_stem(path.stem + words) for path in self))

    def write_pictures(self, found: Diagnosis) -> None:
        """Writes all but the JSON, which the ranks of a program share."""
        if self.html is not None:
            self.html.write_text(found.to_html(), encoding="utf-8")
        if self.trace is not None:
            self.trace.write_text(found.to_trace())


def diagnose(
    script: Annotated[str, typer.Argument(help="A Python script that trains or runs a model.")] = "",
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments, after --.")] = None,
    step: Annotated[
        str,
        typer.Option("--step", help="The function that is one step, such as Trainer.step; with --from a ProfilerStep's number."),
    ] = "",
    recorded: Annotated[
        Path | None, typer.Option("--from", help="In place of a script: a trace that torch.profiler wrote, .json or .json.gz.")
    ] = None,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="In place of a script: a model's folder, for a decode step and a prompt of LLM.")
    ] = "",
    batch: Annotated[int, typer.Option("--batch", help="Answers that decode at once, with --checkpoint.", min=1)] = 1,
    context: Annotated[int, typer.Option("--context", help="Tokens of each answer and of the prompt.", min=1)] = 1024,
    device: Annotated[
        str,
        typer.Option("--device", help="cpu, cuda or cuda:N; auto uses CUDA if there is a GPU. With --from a GPU such as H200."),
    ] = "auto",
    apply: Annotated[
        list[str] | None,
        typer.Option("--apply", help="A remedy to try, several times: graph, compile, attention, dtype, batch, pad."),
    ] = None,
    ops: Annotated[int, typer.Option("--ops", help="How many operators to print.", min=1)] = 20,
    budget: Annotated[
        float | None,
        typer.Option("--budget", help="Seconds that the experiments may take, beside the steps themselves; 60 if left out."),
    ] = None,
    ncu: Annotated[bool, typer.Option("--ncu", help="Check predicted bytes by Nsight Compute's counters, on a GPU.")] = False,
    tour: Annotated[bool, typer.Option("--tour", help="In place of a script: what bounds programs, in seven examples.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the diagnosis as JSON to this file.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with its pictures to this file.")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Also write a Chrome trace of the step, with verdicts, to this file.")
    ] = None,
) -> None:
    """Finds what bounds a script's step: memory, compute, overhead or the host, operator by operator.

    The step is the function that --step names; else what runs inside `with rooftile.diagnosis.step():`; else from one step of the
    optimiser to the next; else the call of a module. It is run some twenty times, and whatever it writes is written as often.

    With --checkpoint it is the engine of `rooftile.LLM`: a step that decodes, and the reading of a prompt. The files have the
    first; others, with -prompt in their names, have the second.

    With --tour it shows what bounds programs on this machine, in under two minutes: seven examples, each with a prediction from
    the machine's ceilings, the measured times and one sentence.

    With --from it is a recorded step: one ProfilerStep of a trace, or the whole of it. A trace allows no experiment, so bounds
    are by model: with this machine's ceilings if it is the trace's, else with a datasheet: of its GPU, or of --device.

    Example: rooftile diagnose train.py --step train_step -- --batch 8
    """
    if bool(script) + bool(checkpoint) + tour + (recorded is not None) != 1:
        raise InvalidInput("diagnose takes a script, --checkpoint FOLDER, --from TRACE or --tour; give one of them")
    files = Files(json, html, trace)
    files.check()
    if recorded is not None:
        options = {"--apply": bool(apply), "--budget": budget is not None, "--ncu": ncu, "--trace": trace is not None}
        _from(recorded, step, device, [name for name, given in options.items() if given], ops, files)
        return
    budget = 60.0 if budget is None else budget
    if script and not Path(script).is_file():
        raise InvalidInput(f"{script} is not a file; give the path of a Python script")
    if checkpoint:
        check_folder(checkpoint)
    # all that can be refused without torch is refused by now, before its import
    from rooftile.diagnosis.programs import ranks
    from rooftile.hardware.device import device_of

    on = str(device_of(device))
    if json is not None:
        ranks.forget(json)
    if tour:
        from rooftile.diagnosis.tour.guide import tour as lines_of

        for lines in lines_of(on):
            print(lines, flush=True)
        return
    if checkpoint:
        from rooftile.diagnosis.programs.diagnose_checkpoint import diagnose_checkpoint

        print(f"reading {checkpoint}; its steps are run some twenty times", file=sys.stderr, flush=True)
        both = diagnose_checkpoint(checkpoint, batch=batch, context=context, device=on, apply=apply or (), budget=budget, ncu=ncu)
        for found, part in zip(both, ("", "-prompt"), strict=True):
            _show(found, ops, files.of_part(part))
        return
    from rooftile.diagnosis.programs.diagnose_script import diagnose_script

    print(f"running {script}; its step is run some twenty times, and writes as often what it writes", file=sys.stderr, flush=True)
    found = diagnose_script(
        script, arguments or [], function=step or None, device=None if device == "auto" else on, apply=apply or (), budget=budget,
        ncu=ncu, say=lambda words: print(words, file=sys.stderr, flush=True),
    )  # fmt: skip
    _show(found, ops, files)


# why an option has no use without a program
WITHOUT_PROGRAM = {
    "--apply": "a trace has no program that a remedy could be tried on",
    "--budget": "a trace allows no experiment",
    "--ncu": "a trace has no program to count in",
    "--trace": "the trace is there already",
}


def _from(recorded: Path, step: str, device: str, others: list[str], ops: int, files: Files) -> None:
    """Diagnoses a trace. others: options that were given and need a program."""
    for name in others:
        raise InvalidInput(f"{name} has no use with --from: {WITHOUT_PROGRAM[name]}; leave it out")
    if step and not step.isdecimal():
        raise InvalidInput(
            f"--step {step} names a function, and a trace calls no function; give the number of a ProfilerStep, as in --step 3"
        )
    from rooftile.diagnosis.recorded.diagnose_trace import from_trace

    number = int(step) if step else None
    _show(from_trace(recorded, step=number, device_name=None if device == "auto" else device), ops, files)


def _show(found: Diagnosis, ops: int, files: Files) -> None:
    from rooftile.diagnosis.programs import ranks

    rank = ranks.Rank.here()
    if rank.number == 0:
        print(found.text(ops), flush=True)
        files.write_pictures(found)
    if rank.world == 1:
        if files.json is not None:
            files.json.write_text(found.to_json() + "\n")
        return
    if files.json is not None:
        print(ranks.write(found, rank, files.json), end="\n" if rank.number == 0 else "")
    elif rank.number:
        print(f"rank {rank.number}: {found.sentence}", flush=True)
