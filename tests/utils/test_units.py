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
        (units.format_bytes, (0, 9.99 * 2**40, -(3 * 2**20)), "0 B|9.99 TiB|-3.00 MiB"),
        (units.format_bytes, (1023, 1023.9 * 2**20, 1023.4 * 2**20), "1023 B|1.00 GiB|1023 MiB"),
        (units.format_bytes, (9.996 * 2**30, 99.94 * 2**30, 99.96 * 2**30), "10.0 GiB|99.9 GiB|100 GiB"),
        (units.format_count, (12, 407_000, 8.03e9, 99_960, 999_600), "12|407 k|8.0 B|100 k|1.0 M"),
        (units.format_about, (0.4, 0.99, 1.2, 65), "less than 1 s|less than 1 s|about 1 s|about 1 m 05 s"),
        (units.format_duration, (5, 65, 7500, 2e5, None), "5 s|1 m 05 s|2 h 05 m|2 d 07 h|–"),
        (units.format_seconds, (0.00139, 0.9996, 2.054, 99.96, 125), "1.39 ms|1.00 s|2.05 s|1 m 40 s|2 m 05 s"),
        (units.format_seconds, (2.5e-6, 9.994e-4, 9.996e-4), "2.50 µs|999 µs|1.00 ms"),
        (units.format_speed, (1.62, 9.94, 9.96, 1234.5, None), "1.6|9.9|10|1,234|–"),
        (units.format_score, (0.974, 1.0, 0.002, None), "97.4%|100.0%|0.2%|–"),
        (units.format_percent, (0.021, 0.54, -2e-16, None, float("inf")), "2.1%|54%|0.0%|–|–"),
        (units.format_short, (0, 3.14159, 1234, 1e-5, 123456, float("nan")), "0|3.14|1234|1e-5|1.2e5|–"),
        (
            units.format_loss,
            (0, 1.31554, 9.99996, 11.9343, 99.9996, 1e-5, None),
            "0.0000|1.3155|10.000|11.934|100|1e-5|–",
        ),
        (
            units.format_bits,
            (125, 1.25e9, 1.2e6, 12.5e9 / 8, 1e12),
            "1.00 kb/s|10.0 Gb/s|9.60 Mb/s|12.5 Gb/s|8.00 Tb/s",
        ),
        (units.format_ago, (5, 120, 3599, 7200, 9e5), "just now|2 min ago|59 min ago|2 h ago|10 d ago"),
    ],
)
def test_formats(function, values, texts):
    assert "|".join(map(function, values)) == texts


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("10Gb/s", 1.25e9),
        (" 1.2 GB/s ", 1.2e9),
        ("100 Mbit/s", 12.5e6),
        ("8kb/s", 1000),
        ("80b/s", 10),
        ("10GiB/s", None),
        ("10Gb", None),
        ("-1Gb/s", None),
        ("Gb/s", None),
        ("1e9b/s", None),
    ],
)
def test_rates_in_bits_and_in_bytes(text, rate):
    assert units.parse_rate(text) == rate
