"""Formats the numbers of the page: a few digits and a familiar unit. Units are decimal: 1 MB is 1e6 bytes."""

from __future__ import annotations

import math

# a number and its unit stay on one line
SPACE = "\N{NO-BREAK SPACE}"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def size(count: float) -> str:
    """Formats bytes.

    >>> size(268435456)
    '268\xa0MB'
    """
    return _scaled(count, ("B", "kB", "MB", "GB", "TB"))


def count(value: float, unit: str = "") -> str:
    """Formats a count or a rate with its thousands.

    >>> count(1.07e9, "FLOP/s")
    '1.07\xa0GFLOP/s'
    """
    return _scaled(value, tuple(f"{prefix}{unit}" for prefix in ("", "k", "M", "G", "T", "P"))).rstrip()


def duration(us: float) -> str:
    """Formats microseconds.

    >>> duration(1530), duration(-2)
    ('1.53\xa0ms', '−2\xa0µs')
    """
    if us < 0:
        return f"−{duration(-us)}"
    if us == 0:
        return "0"
    return _scaled(us, ("µs", "ms", "s")) if us >= 1 else f"{number(us * 1e3)}{SPACE}ns"


def tokens(count: float) -> str:
    """Formats a length on an axis.

    >>> tokens(16384)
    '16k'
    """
    return f"{count / 1024:g}k" if count >= 1024 and count % 1024 == 0 else f"{count:,.0f}"


def power(value: float) -> str:
    """Formats a small number with its power of ten.

    >>> power(3.4e-7)
    '3.4\xa0×\xa010⁻⁷'
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)))
    mantissa = f"{value / 10.0**exponent:.2g}"
    ten = f"10{str(exponent).translate(_SUPERSCRIPT)}"
    return ten if mantissa == "1" else f"{mantissa}{SPACE}×{SPACE}{ten}"


def times(ratio: float) -> str:
    """Formats a ratio. Beyond a thousand the digits say nothing more.

    >>> times(23.4), times(1.62), times(158950.78)
    ('23×', '1.6×', 'over 1,000×')
    """
    if ratio > 1000:
        return "over 1,000×"
    return f"{ratio:,.0f}×" if ratio >= 9.95 else f"{ratio:.1f}×"


def percent(share: float) -> str:
    return f"{100 * share:.0f}{SPACE}%"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    step = 0
    # 999.5 would round to 1000
    while value >= 999.5 and step < len(units) - 1:
        value, step = value / 1000, step + 1
    return f"{number(value)}{SPACE}{units[step]}"


def number(value: float) -> str:
    """Formats three digits, or all digits before the point, without exponent and trailing zeros.

    >>> number(1471.3), number(0.4591)
    ('1,471', '0.459')
    """
    if value >= 100:
        return f"{value:,.0f}"
    text = f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"
    return text.rstrip("0").rstrip(".")
