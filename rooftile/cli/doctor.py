"""`rooftile doctor`: the hardware, its measured ceilings, and the backends that run on it."""

from __future__ import annotations

from typing import Annotated

import typer

from rooftile.cli.output import DeviceOption, JsonOption, print_json, progress


def doctor(
    device: DeviceOption = "auto",
    refresh: Annotated[bool, typer.Option(help="Measure the ceilings again, even if they are cached.")] = False,
    json: JsonOption = False,
) -> None:
    """Shows this machine's hardware, its measured ceilings, which backends run, and why the others do not.

    The first run measures, some ten seconds, and says so on stderr; later ones read what it stored.

    Example: rooftile doctor --device cuda
    """
    with progress(lines=True) as say:
        from rooftile.diagnosis import examination

        found = examination.doctor(device, refresh=refresh, say=say)
    if json:
        print_json(found.json())
    else:
        print(found)
