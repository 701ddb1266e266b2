"""The text of any exception."""

import pytest

from rptrain.utils.errors import describe


class Wrong(Exception):
    def __str__(self):
        return 5


@pytest.mark.parametrize(
    ("error", "text", "with_type"),
    [
        (ValueError("bad"), "bad", "ValueError: bad"),
        (MemoryError(), "MemoryError", "MemoryError"),
        (Wrong(), *["Wrong (its message cannot be shown: __str__ raised TypeError)"] * 2),
    ],
)
def test_the_text_of_an_exception(error, text, with_type):
    assert (describe(error), describe(error, with_type=True)) == (text, with_type)
