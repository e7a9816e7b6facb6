"""`rooftile doctor`: the hardware, its measured ceilings, and the backends that run on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rooftile.cli.output import DeviceOption, JsonOption, print_json, print_table, progress

if TYPE_CHECKING:
    from rooftile.hardware.ceilings import Ceilings
    from rooftile.hardware.chips import Chip


def doctor(
    device: DeviceOption = "auto",
    refresh: Annotated[bool, typer.Option(help="Measure the ceilings again, even if they are cached.")] = False,
    json: JsonOption = False,
) -> None:
    """Shows this machine's hardware, its measured ceilings, which backends run, and why the others do not.

    Example: rooftile doctor --device cuda
    """
    from rooftile.bench.session import open_session
    from rooftile.hardware.ceilings import cache_directory
    from rooftile.hardware.chips import chip_named
    from rooftile.hardware.device import device_of

    target = device_of(device)
    with progress() as say:
        say("measuring the ceilings")
        session = open_session(target, refresh=refresh)
    machine, chip = session.machine, chip_named(session.machine.name)
    backends = _backends(machine.arch, "bf16" if target.type == "cuda" else "fp32")
    found: dict[str, Any] = {
        "machine": machine.json(),
        "datasheet": {"name": chip.name, "kind": chip.kind} | _rates(chip) if chip else None,
        "measured": _rates(session.ceilings) | {name: getattr(session.ceilings, name) for name in (*OTHERS, "date")},
        "backends": backends,
        "software": _software(),
        "caches": {"ceilings": str(cache_directory()), "kernels": str(_kernel_cache())},
    }
    if json:
        print_json(found)
    else:
        _show(found)


# measured, and in no datasheet
OTHERS = {
    "cache_gbs": "copy in the L2 cache, GB/s",
    "fma_tflops": "fp32 multiply-adds, TFLOP/s",
    "special_gops": "exponentials, 1e9/s",
    "launch_us": "launch of a small operation, us",
    "operator_us": "call of a small operation, us",
    "node_us": "small kernel of a CUDA graph, us",
}


def _backends(arch: str, dtype: str) -> dict[str, dict[str, Any]]:
    """Returns for each backend whether it runs a plain causal training step here, and why not."""
    from rooftile import dispatch
    from rooftile.masks import CAUSAL
    from rooftile.spec import DTYPES, Spec

    spec = Spec(dtype=DTYPES[dtype], dim=128, dim_v=128, mask=CAUSAL, scale=128**-0.5, needs_grad=True, device=arch)
    verdicts = dispatch.verdicts(spec)
    return {
        name: {"problem": str(spec), "runs": not reasons, "reasons": list(reasons)}
        for name, reasons in verdicts.items()
    }


def _rates(of: Ceilings | Chip) -> dict[str, float | None]:
    """Returns bandwidth in GB/s and matrix rates in TFLOP/s, with the same names for both sources."""
    from rooftile.hardware.ceilings import Ceilings

    if isinstance(of, Ceilings):
        return {"memory_gbs": of.copy_gbs, **{f"{dtype}_tflops": rate for dtype, rate in of.matmul_tflops.items()}}
    rates = {f"{dtype}_tflops": getattr(of, f"{dtype}_tflops") for dtype in ("fp32", "bf16", "fp16", "fp8")}
    return {"memory_gbs": of.bandwidth_gbs, **rates}


def _software() -> dict[str, str]:
    """Returns the versions of optional packages that Rooftile or its benchmarks use; "absent" if not installed."""
    from importlib.metadata import PackageNotFoundError, version

    from torch.nn import attention

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "absent"

    found = {name: installed(name) for name in ("transformers", "matplotlib", "flash-attn", "flash-attn-4")}
    hook = hasattr(attention, "register_flash_attention_impl")
    found["torch.nn.attention.register_flash_attention_impl"] = "present" if hook else "absent"
    return found


def _kernel_cache() -> Path:
    """Returns the folder of Triton's compiled kernels."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def _show(found: dict[str, Any]) -> None:
    machine, chip, measured = found["machine"], found["datasheet"], found["measured"]
    memory = machine["memory_bytes"] / 2**30
    print(
        f"{machine['name']} ({machine['arch']}): {machine['cores']} cores, {memory:.0f} GiB, driver {machine['driver']}"
    )
    print(f"torch {machine['torch']}, triton {machine['triton'] or 'absent'}, python {machine['python']}\n")
    shown = [name for name in measured if name.endswith(("_gbs", "_tflops")) and name not in OTHERS]
    lines = [
        (
            "copy, GB/s" if name == "memory_gbs" else f"{name.removesuffix('_tflops')} matmul, TFLOP/s",
            f"{measured[name]:,.4g}",
            f"{chip[name]:,.4g}" if chip and chip.get(name) else "-",
            f"{100 * measured[name] / chip[name]:.0f} %" if chip and chip.get(name) else "-",
        )
        for name in shown
    ]
    lines += [
        (words, f"{measured[name]:,.4g}", "-", "-") for name, words in OTHERS.items() if measured[name] is not None
    ]
    source = (
        f"datasheet of {chip['name']} ({chip['kind'].split(', ')[-1]})" if chip else "datasheet (none for this chip)"
    )
    print_table("Ceilings", ("", "measured", source, "of datasheet"), lines)
    print(f"\nBackends, for {next(iter(found['backends'].values()))['problem']}")
    for name, verdict in found["backends"].items():
        print(f"  {name:8} {'runs' if verdict['runs'] else 'no: ' + '; '.join(verdict['reasons'])}")
    print("\nSoftware")
    for name, state in found["software"].items():
        print(f"  {name:52} {state}")
    print(f"\nCeilings are stored in {found['caches']['ceilings']}, Triton's kernels in {found['caches']['kernels']}")
