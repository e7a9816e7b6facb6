"""Formats numbers for a terminal: three digits and a unit."""

from __future__ import annotations


def count(value: float | None, unit: str = "") -> str:
    """Formats a count or a rate with its thousands; an unknown one is a dash.

    >>> count(33_500_000, "B"), count(1.2e12, "F/s"), count(None)
    ('33.5 MB', '1.2 TF/s', '-')
    """
    if value is None:
        return "-"
    for prefix in ("", "k", "M", "G", "T", "P"):
        # 999.5 would round to 1000
        if abs(value) < 999.5 or prefix == "P":
            break
        value /= 1000
    return f"{digits(value)} {prefix}{unit}".rstrip()


def duration(us: float | None) -> str:
    """Formats microseconds.

    >>> duration(53700), duration(39), duration(None)
    ('53.7 ms', '39 us', '-')
    """
    if us is None:
        return "-"
    if us < 999.5:
        return f"{digits(us)} us"
    return f"{digits(us / 1e3)} ms" if us < 999_500 else f"{digits(us / 1e6)} s"


def percent(share: float | None) -> str:
    """Formats a share.

    >>> percent(0.861), percent(None)
    ('86 %', '-')
    """
    return "-" if share is None else f"{100 * share:.0f} %"


def digits(value: float) -> str:
    """Formats three digits, without zeros at the end.

    >>> digits(1471.3), digits(0.4591), digits(12.0)
    ('1,471', '0.459', '12')
    """
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    text = f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}"
    return text.rstrip("0").rstrip(".")
