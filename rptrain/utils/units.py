"""Formatting of numbers with units."""


def format_bytes(nbytes: int) -> str:
    """Bytes with two decimals, such as "1.25 GiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
