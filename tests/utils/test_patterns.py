import pytest

from rptrain.utils import patterns
from rptrain.utils.patterns import InvalidPattern, full_matches

NAMES = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(8)]


def test_whole_names():
    assert full_matches(r".*\.[12]\..*", NAMES) == {NAMES[1], NAMES[2]}
    assert full_matches("model", NAMES) == set()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(([a-z0-9_.]+)+)+!", "takes more than 0.2 s to match; "),
        ("(" * 4000, "is not a valid pattern: "),
    ],
    ids=["time", "depth"],
)
def test_patterns_that_cannot_be(pattern, message, monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 0.2)
    with pytest.raises(InvalidPattern, match=message):
        full_matches(pattern, NAMES)
