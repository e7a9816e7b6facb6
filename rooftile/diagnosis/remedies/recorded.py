"""How well computed prices of `compile` agreed with what it saved, on the recorded programs of the benchmarks."""

from __future__ import annotations

from typing import NamedTuple


class RecordedPrices(NamedTuple):
    """Programs on one kind of device for which compile had a price and was tried."""

    programs: int
    within: int  # the number of these programs whose price was within the factor of what compile saved


FACTOR = 2
# written by scripts/write_recorded_prices.py from benchmarks/results/*-diagnosis.jsonl
COMPILE = {
    "cpu": RecordedPrices(programs=8, within=2),
    "cuda": RecordedPrices(programs=8, within=5),
}


def words(device: str) -> str:
    """Says how far a computed price of compile is to be believed on a device, "cpu" or "cuda"."""
    seen = COMPILE[device]
    return f"on {seen.within} of {seen.programs} recorded programs such a price was within a factor of {FACTOR} of what it saved"
