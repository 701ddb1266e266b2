"""Numbers as short text of stable width: sizes, counts, durations, fractions."""

from math import isfinite

from rich.cells import cell_len, set_cell_size

DASH = "–"


def size(nbytes: float) -> str:
    """Bytes, such as "1.2 GiB"."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(nbytes) >= unit:
            value = nbytes / unit
            return f"{value:.0f} {name}" if value >= 100 else f"{value:.1f} {name}"
    return f"{nbytes:.0f} B"


def count(number: float) -> str:
    """A large number, shortened, such as "1.7 B" or "430 k"."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            value = number / unit
            return f"{value:.0f} {name}" if value >= 100 else f"{value:.1f} {name}"
    return f"{number:.0f}"


def duration(seconds: float | None) -> str:
    """A duration such as "42 s", "3 m 05 s", "2 h 07 m" or "3 d 04 h"."""
    if seconds is None or not isfinite(seconds):
        return DASH
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def step_time(seconds: float) -> str:
    if seconds >= 100:
        return duration(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def percent(share: float | None) -> str:
    return DASH if share is None else f"{share:.1%}" if abs(share) < 0.0995 else f"{share:.0%}"


def loss(value: float | None) -> str:
    if value is None:
        return DASH
    if value == 0 or 1e-3 <= abs(value) < 100:
        return f"{value:.4f}" if abs(value) < 10 else f"{value:.3f}"  # as many letters
    return short(value)


def short(value: float) -> str:
    """A number for an axis: at most six characters or so."""
    if not isfinite(value):
        return DASH
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def ago(seconds: float) -> str:
    """A time in the past in one unit."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name} ago"
    return "just now"


def clipped(text: str, width: int) -> str:
    """Text in at most `width` columns of the terminal, with an ellipsis if it was cut."""
    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 1).rstrip()}…"
