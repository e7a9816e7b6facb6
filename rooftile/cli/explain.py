"""`rooftile explain`: the backend that would run a case, and its roofline on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rooftile.cli.output import DeviceOption, JsonOption, chosen_cases, print_json, print_table


def explain(
    case: Annotated[str, typer.Option("--case", help="A case's name; `rooftile bench list` prints them.")],
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> None:
    """Shows which backend runs a case, why the others do not, and the case's minimum cost on this machine.

    Example: rooftile explain --case d128-causal-4k
    """
    from rooftile.cost import io, roof
    from rooftile.cost.session import open_session
    from rooftile.exact import dispatch
    from rooftile.exact.cases import CASES
    from rooftile.hardware.device import device_of

    (chosen,) = chosen_cases([case], "", "")
    session = open_session(device_of(device))
    problem = CASES[chosen.name].problem(session.machine.arch)
    costs = {}
    for phase in ("fwd", "bwd"):
        floor = roof(problem, session.ceilings, phase)
        costs[phase] = {
            "flops": floor.flops,
            "compulsory_bytes": floor.bytes_moved,
            "l2_bytes": io.tiles(problem, phase).total,
            "standard_bytes": io.standard(problem, phase).total,
            "flops_per_byte": floor.intensity,
            "least_us": floor.time_us,
            "bound": floor.binds,
        }
    if json:
        verdicts = {name: list(reasons) for name, reasons in dispatch.verdicts(problem.spec).items()}
        print_json({"case": chosen.name, "problem": str(problem.spec), "backends": verdicts, "cost": costs})
        return
    print(dispatch.explain(problem.spec) + "\n")
    lines = [(name, *(_shown(costs[phase][name]) for phase in costs)) for name in costs["fwd"]]
    print_table("Minimum cost, from the measured ceilings", ("", *costs), lines)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
