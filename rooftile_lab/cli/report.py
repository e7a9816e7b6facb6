"""`rooftile report`: measures this machine and writes the report page. `make demo` runs it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from rooftile.cli.output import DeviceOption, JsonOption, print_json
from rooftile.errors import InvalidInput


def report(
    out: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("report/index.html"),
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: a smoke test of under a minute.")] = False,
) -> None:
    """Writes an HTML page about attention on this machine: time, memory, error, masks, a small Llama trained, served and
    diagnosed.

    Some five minutes on two idle CPU cores, and twelve on a GPU, whose kernels are compiled; a probe says at the start how
    long it takes here. Prints the page's path; exits with 1 if an experiment failed.

    Example: rooftile report --out page.html
    """
    from rooftile.drawing.page import check_ready
    from rooftile.hardware.device import device_of
    from rooftile_lab.report import experiments, page
    from rooftile_lab.report.plan import plan_for
    from rooftile_lab.report.progress import Progress

    target = device_of(device)
    if out.is_dir():
        raise InvalidInput(f"--out is {out}, which is a folder; give the name of a file, such as {out / 'index.html'}")
    # checked before the experiments, which take minutes
    barrier = next((above for above in out.parents if above.exists() and not above.is_dir()), None)
    if barrier is not None:
        raise InvalidInput(f"--out is {out}, and {barrier} is a file; give a file in a folder")
    check_ready()
    _check_writable(out)
    plan = plan_for(target.type, quick=quick)
    found = experiments.run(plan, str(target), _command(out, device, quick), Progress(plan.seconds))
    out.write_text(page.render(found), encoding="utf-8")
    for name, sentence in found.failures.items():
        print(f"rooftile: the experiment {name!r} failed: {sentence}", file=sys.stderr)
    if json:
        print_json({"page": str(out.resolve()), **found.json()})
    else:
        print(out.resolve())
    if found.failures:
        raise typer.Exit(1)


def _check_writable(out: Path) -> None:
    """Raises InvalidInput if the page could not be written, before minutes of measuring; makes its folder."""
    existed = out.exists()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a").close()
    except OSError as error:
        raise InvalidInput(f"--out is {out}, which cannot be written ({error.strerror}); name another file") from error
    if not existed:
        out.unlink()


def _command(out: Path, device: str, quick: bool) -> str:
    """Returns the command that makes this page again."""
    words = ["rooftile", "report", "--out", str(out), "--device", device]
    return shlex.join(words + ["--quick"] * quick)
