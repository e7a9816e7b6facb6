"""The tour: seven exhibits, each with a prediction first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from rooftile.diagnosis.output.table import wrap
from rooftile.diagnosis.output.units import duration
from rooftile.diagnosis.tour.calls import attentions, loop
from rooftile.diagnosis.tour.elementwise import cosines, repeats, softmaxes
from rooftile.diagnosis.tour.exhibit import Exhibit, Lab, Shown, show
from rooftile.diagnosis.tour.products import decoding, products
from rooftile.hardware import ceilings

EXHIBITS: tuple[Callable[[Lab], Exhibit], ...] = (repeats, cosines, softmaxes, products, loop, attentions, decoding)


def lab_of(device: torch.device) -> Lab:
    """Returns the machine with its ceilings: the higher of those known and those measured now, because load only lowers them."""
    known = ceilings.measure(device)
    return Lab(device, ceilings.higher(known, ceilings.measure(device, refresh=True)))


def tour(device: torch.device | str) -> Iterator[str]:
    """Yields the tour's lines as they are known: of each exhibit its predictions, then its measurements and one sentence.

    It takes under two minutes, of which compilers take the most when they run for the first time.

    Example:
        >>> for lines in tour("cpu"):
        ...     print(lines)
    """
    lab = lab_of(torch.device(device))
    c = lab.ceilings
    products = ", ".join(f"{rate:.3g} in {dtype}" for dtype, rate in c.matmul_tflops.items())
    yield "\n".join(
        wrap(
            f"{c.device} copies {c.copy_gbs:.3g} GB/s, multiplies matrices at {products} TFLOP/s, computes {c.special_gops:.3g} "
            f"G exponentials per second, and needs {duration(c.launch_us)} for a small operator. From this follows every "
            "prediction."
        )
    )
    for number, build in enumerate(EXHIBITS, 1):
        exhibit = build(lab)
        title = f"\n{number} of {len(EXHIBITS)}: {exhibit.title}"
        yield "\n".join([title, *wrap(exhibit.does, "  ", "  "), predicted(exhibit)])
        yield "\n" + measured(show(exhibit, lab.device))
        del exhibit


def predicted(exhibit: Exhibit) -> str:
    """Returns the predictions, one line per case."""
    lines = [f"    {c.name:<26}{duration(c.expected.us):>10}  {c.expected.bound}" for c in exhibit.cases]
    return "\n".join(["", "  predicted", *lines])


def measured(shown: Shown) -> str:
    """Returns the measured times, one line per case, and the sentence."""
    lines = []
    for case in shown.exhibit.cases:
        us = shown.measured_us.get(case.name)
        ratio = "" if us is None else f"  {us / case.expected.us:.2f} of the prediction"
        lines.append(f"    {case.name:<26}{duration(us):>10}{ratio}")
    return "\n".join(["  measured", *lines, "", *wrap(shown.sentence, "  ", "  ")])
