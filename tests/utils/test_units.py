"""Numbers with units as text."""

import pytest

from rptrain.utils import units


@pytest.mark.parametrize(
    ("function", "values", "texts"),
    [
        (
            units.format_bytes,
            (5, 2048, 1.25 * 2**30, 99.96 * 2**20, 300 * 2**30),
            "5 B|2.00 KiB|1.25 GiB|100 MiB|300 GiB",
        ),
        (units.format_bytes, (0, 9.996 * 2**40, -(3 * 2**20)), "0 B|10.0 TiB|-3.00 MiB"),
        (units.format_count, (12, 407_000, 8.03e9), "12|407 k|8.0 B"),
        (units.format_duration, (5, 65, 7500, 2e5, None), "5 s|1 m 05 s|2 h 05 m|2 d 07 h|–"),
        (units.format_seconds, (0.00139, 2.054, 125), "1.39 ms|2.05 s|2 m 05 s"),
        (units.format_percent, (0.021, 0.54, None), "2.1%|54%|–"),
        (units.format_short, (0, 3.14159, 1e-5, 123456, float("nan")), "0|3.14|1e-5|1.2e5|–"),
        (units.format_loss, (0, 1.31554, 11.9343, 1e-5, None), "0.0000|1.3155|11.934|1e-5|–"),
        (units.format_ago, (5, 120, 7200, 9e5), "just now|2 min ago|2 h ago|10 d ago"),
    ],
)
def test_formats(function, values, texts):
    assert "|".join(map(function, values)) == texts
