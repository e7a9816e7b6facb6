"""`rooftile.doctor`: the hardware, its measured ceilings with the load meanwhile, and the backends that run on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from rooftile.cost.session import open_session
from rooftile.drawing import notebook as shown
from rooftile.exact import dispatch
from rooftile.exact.masks import CAUSAL
from rooftile.exact.spec import DTYPES, Spec
from rooftile.hardware import load
from rooftile.hardware.ceilings import Ceilings, cache_directory
from rooftile.hardware.chips import Chip, chip_named
from rooftile.hardware.device import device_of
from rooftile.runtime.words import answers_foreign_words

# measured, and in no datasheet
OTHERS = {
    "cache_gbs": "copy in the L2 cache, GB/s",
    "fma_tflops": "fp32 multiply-adds, TFLOP/s",
    "special_gops": "exponentials, 1e9/s",
    "launch_us": "launch of a small operation, us",
    "operator_us": "call of a small operation, us",
    "node_us": "small kernel of a CUDA graph, us",
}
HEAD = ("", "measured", "datasheet", "of datasheet", "busy elsewhere")


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Holds the findings of `doctor`; `print` it for a table, and a notebook shows it as one.

    The fields are the fields of the command's JSON.
    """

    machine: dict[str, Any]
    datasheet: dict[str, Any] | None
    measured: dict[str, Any]
    backends: dict[str, dict[str, Any]]
    software: dict[str, str]
    caches: dict[str, str]

    def json(self) -> dict[str, Any]:
        """Returns the fields as plain values."""
        return asdict(self)

    def __repr__(self) -> str:
        able = [name for name, verdict in self.backends.items() if verdict["runs"]]
        rates = f"{self.measured['memory_gbs']:,.4g} GB/s, fp32 {self.measured['fp32_tflops']:,.4g} TFLOP/s"
        return f"Examination({self.machine['name']}: {rates}; {', '.join(able)} run)"

    def __str__(self) -> str:
        rows = [HEAD, *self.ceilings()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [*self.about(), "", f"Ceilings, {self.when()}"]
        for first, *rest in rows:
            cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
            lines.append(f"{first:{widths[0]}}  {'  '.join(cells)}".rstrip())
        lines += ["", f"Backends, for {self.problem}", *(f"  {name:8} {words}" for name, words in self.verdicts())]
        lines += ["", "Software", *(f"  {name:52} {state}" for name, state in self.software.items())]
        lines += ["", f"Ceilings are stored in {self.caches['ceilings']}, Triton's kernels in {self.caches['kernels']}"]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return shown.card(
            *map(shown.sentence, self.about()), shown.sentence(f"Ceilings, {self.when()}"), shown.table(HEAD, self.ceilings()),
            shown.sentence(f"Backends, for {self.problem}"), shown.facts(self.verdicts()), shown.facts(self.software.items()),
        )  # fmt: skip

    @property
    def problem(self) -> str:
        """The problem of the backends' verdicts."""
        return str(next(iter(self.backends.values()))["problem"])

    def about(self) -> list[str]:
        """Returns two lines about the hardware and the software."""
        of = self.machine
        return [
            f"{of['name']} ({of['arch']}): {of['cores']} cores, {of['memory_bytes'] / 2**30:.0f} GiB, driver {of['driver']}",
            f"torch {of['torch']}, triton {of['triton'] or 'absent'}, python {of['python']}",
        ]

    def when(self) -> str:
        """Says when the ceilings were measured, how busy the machine was, and what to do if it was."""
        busy, of = self.measured["busy_cores"], self.machine["cores"] if self.machine["type"] == "cpu" else load.cores()
        most = max(busy.values(), default=None)
        again = "; on a quiet machine, measure again: rooftile doctor --refresh" if most and most >= load.QUIET * of else ""
        sheet = f"; datasheet of {self.datasheet['name']} ({self.datasheet['kind'].split(', ')[-1]})" if self.datasheet else ""
        return f"measured {self.measured['date'][:16].replace('T', ' ')}; {load.words(most, of)}{again}{sheet}"

    def ceilings(self) -> list[tuple[str, ...]]:
        """Returns the cells of `HEAD` for each ceiling."""
        return list(self._ceilings())

    def _ceilings(self) -> Iterator[tuple[str, ...]]:
        sheet, busy = self.datasheet or {}, self.measured["busy_cores"]
        for name, value in self.measured.items():
            if value is None or name in ("date", "busy_cores"):
                continue
            dtype = name.removesuffix("_tflops")
            words = OTHERS.get(name) or ("copy, GB/s" if name == "memory_gbs" else f"{dtype} matmul, TFLOP/s")
            due = sheet.get(name)
            others = busy.get({"memory_gbs": "copy_gbs"}.get(name, name if name in OTHERS else f"{dtype} product"))
            yield (
                words, f"{value:,.4g}", f"{due:,.4g}" if due else "-", f"{100 * value / due:.0f} %" if due else "-",
                "-" if others is None else f"{others:.1f} cores",
            )  # fmt: skip

    def verdicts(self) -> list[tuple[str, str]]:
        """Returns each backend with "runs" or its reasons."""
        reasons = {name: "; ".join(verdict["reasons"]) for name, verdict in self.backends.items()}
        return [(name, f"no: {why}" if why else "runs") for name, why in reasons.items()]


@answers_foreign_words
def doctor(
    device: str | torch.device = "auto", *, refresh: bool = False, say: Callable[[str], None] | None = None
) -> Examination:
    """Shows this machine's hardware, its measured ceilings, which backends run, and why the others do not.

    The ceilings are measured once, which takes some ten seconds, and kept in the user's cache folder.

    Args:
        device: "cpu", "cuda" or "cuda:N"; "auto" uses CUDA if there is a GPU.
        refresh: measure the ceilings again.
        say: is called with words about each step, if something is measured; None says nothing.

    Raises:
        InvalidInput: the device is absent.

    Example:
        >>> print(rooftile.doctor())
    """
    target = device_of(str(device))
    session = open_session(target, refresh=refresh, say=say)
    machine, chip, measured = session.machine, chip_named(session.machine.name), session.ceilings
    others = {name: getattr(measured, name) for name in (*OTHERS, "date", "busy_cores")}
    return Examination(
        machine=machine.json(),
        datasheet={"name": chip.name, "kind": chip.kind} | _rates(chip) if chip else None,
        measured=_rates(measured) | others,
        backends=_backends(machine.arch, "bf16" if target.type == "cuda" else "fp32"),
        software=_software(),
        caches={"ceilings": str(cache_directory()), "kernels": str(_kernel_cache())},
    )


def _backends(arch: str, dtype: str) -> dict[str, dict[str, Any]]:
    """Returns for each backend whether it runs a plain causal training step here, and why not."""
    spec = Spec(dtype=DTYPES[dtype], dim=128, dim_v=128, mask=CAUSAL, scale=128**-0.5, needs_grad=True, device=arch)
    verdicts = dispatch.verdicts(spec)
    return {name: {"problem": str(spec), "runs": not reasons, "reasons": list(reasons)} for name, reasons in verdicts.items()}


def _rates(of: Ceilings | Chip) -> dict[str, float | None]:
    """Returns bandwidth in GB/s and matrix rates in TFLOP/s, with the same names for both sources."""
    if isinstance(of, Ceilings):
        return {"memory_gbs": of.copy_gbs, **{f"{dtype}_tflops": rate for dtype, rate in of.matmul_tflops.items()}}
    rates = {f"{dtype}_tflops": getattr(of, f"{dtype}_tflops") for dtype in ("fp32", "bf16", "fp16", "fp8")}
    return {"memory_gbs": of.bandwidth_gbs, **rates}


def _software() -> dict[str, str]:
    """Returns the versions of optional packages that Rooftile or its benchmarks use; "absent" if not installed."""
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
