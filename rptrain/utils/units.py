"""Numbers with units, the same on the command line and in the interface."""

import re
from datetime import datetime
from math import isfinite

DASH = "–"  # in place of an unknown value
PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def format_bytes(nbytes: float) -> str:
    """Bytes such as "1.25 GiB", "12.5 GiB" or "125 GiB"."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(nbytes) >= unit - unit / 2048:  # 1023.5 of the next smaller unit would be rounded to 1024
            return f"{_three_digits(nbytes / unit)} {name}"
    return f"{nbytes:.0f} B"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.2f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:.0f}"


def parse_rate(text: str) -> float | None:
    """Bytes per second from a text such as "10Gb/s" (bits) or "1.2 GB/s" (bytes); None from others."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kKMGT]?)(b|B|bit)/s", text.strip())
    if match is None:
        return None
    return float(match[1]) * PREFIXES[match[2].lower()] / (1 if match[3] == "B" else 8)


def format_bits(rate: float) -> str:
    """Bytes per second as a rate of networks, such as "9.60 Gb/s" or "250 Mb/s"."""
    for unit, name in ((1e12, "Tb/s"), (1e9, "Gb/s"), (1e6, "Mb/s"), (1e3, "kb/s")):
        if 8 * rate >= 0.9995 * unit:
            return f"{_three_digits(8 * rate / unit)} {name}"
    return f"{8 * rate:.0f} b/s"


def format_speed(tokens_per_second: float | None) -> str:
    """Tokens per second as a number such as "3.2" or "1,200"."""
    if tokens_per_second is None:
        return DASH
    return f"{tokens_per_second:,.{1 if tokens_per_second < 9.95 else 0}f}"


def format_rate(tokens_per_second: float) -> str:
    """A speed such as "3.2 tokens/s" or "1,200 tokens/s"."""
    return f"{format_speed(tokens_per_second)} tokens/s"


def format_count(number: float) -> str:
    """A large number such as "1.7 B" or "430 k"."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * unit:
            value = number / unit
            return f"{value:.0f} {name}" if value >= 99.95 else f"{value:.1f} {name}"
    return f"{number:.0f}"


def format_duration(seconds: float | None) -> str:
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


def format_about(seconds: float) -> str:
    """An estimated duration such as "about 42 s" or "less than 1 s"."""
    return "less than 1 s" if seconds < 1 else f"about {format_duration(seconds)}"


def format_seconds(seconds: float) -> str:
    """A measured time such as "2.50 µs", "1.39 ms" or "2.05 s"."""
    if not isfinite(seconds) or seconds >= 99.95:
        return format_duration(seconds)
    for unit, name in ((1, "s"), (1e-3, "ms")):
        if abs(seconds) >= 0.9995 * unit:
            return f"{_three_digits(seconds / unit)} {name}"
    return f"{_three_digits(seconds * 1e6)} µs"


def format_percent(fraction: float | None) -> str:
    """A fraction such as "2.1%" or "54%"."""
    if fraction is None or not isfinite(fraction):
        return DASH
    if abs(fraction) < 0.0005:
        return "0.0%"  # without the sign of a rounding error
    return f"{fraction:.1%}" if abs(fraction) < 0.0995 else f"{fraction:.0%}"


def format_score(score: float | None) -> str:
    """A fraction of answers such as "97.4%"; the least of 500 that counts is 0.2%."""
    return DASH if score is None else f"{score:.1%}"


def format_loss(value: float | None) -> str:
    """A loss such as "1.2610", "12.610" or "3.2e-4"."""
    if value is None:
        return DASH
    if value == 0 or 1e-3 <= abs(value) < 99.9995:
        return f"{value:.4f}" if abs(value) < 9.99995 else f"{value:.3f}"
    return format_short(value)


def format_short(value: float) -> str:
    """A number in about six characters, such as "0.0904" or "2.8e-4"."""
    if not isfinite(value):
        return DASH
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 9999.5:
        return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def format_epochs(epochs: float) -> str:
    """Such as "1 epoch" or "0.25 epochs"."""
    text = f"{epochs:,.3g}"
    return f"{text} {'epoch' if text == '1' else 'epochs'}"


def format_moment(time: float) -> str:
    """A Unix time as local date and time, such as "2026-03-01 14:03:12"."""
    return f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}"


def format_ago(seconds: float) -> str:
    """A time in the past, in one unit, such as "3 h ago"."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds // unit:.0f} {name} ago"
    return "just now"
