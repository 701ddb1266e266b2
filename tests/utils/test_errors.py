"""The text of any exception."""

import pytest

from rptrain.utils.errors import TrainingError, UserError, describe, explained


class Wrong(Exception):
    def __str__(self):
        return 5


@pytest.mark.parametrize(
    ("error", "text", "with_type"),
    [
        (ValueError("bad"), "bad", "ValueError: bad"),
        (ValueError("\x1b"), "␛", "ValueError: ␛"),
        (MemoryError(), "MemoryError", "MemoryError"),
        (OSError(5, "Input/output error", "a"), *["a: Input/output error", "OSError: a: Input/output error"]),
        (
            OSError(18, "Invalid cross-device link", "a", None, "b"),
            *["a and b: Invalid cross-device link", "OSError: a and b: Invalid cross-device link"],
        ),
        (OSError("full"), "full", "OSError: full"),
        (Wrong(), *["Wrong (its message cannot be shown: __str__ raised TypeError)"] * 2),
    ],
)
def test_the_text_of_an_exception(error, text, with_type):
    assert (describe(error), describe(error, with_type=True)) == (text, with_type)


@pytest.mark.parametrize("kind", [UserError, TrainingError])
def test_errors_of_the_program_are_messages(kind):
    assert str(kind("a\x1b" + "\nb" * 30)) == "a␛" + "\nb" * 19 + "\n… and 11 more lines"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            FileNotFoundError(2, "No such file or directory", "a"),
            UserError,
            "a: No such .*: create it",
        ),
        (OSError(36, "File name too long", "a"), UserError, "a: File name too long: use a shorter name"),
        (OSError(28, "No space left on device", "a"), TrainingError, "a: No space left on device: free disk space"),
        (OSError(5, "Input/output error"), TrainingError, "Input/output error$"),
    ],
)
def test_errors_of_the_system_say_what_to_do(error, kind, message):
    with pytest.raises(kind, match=f"^{message}"):
        raise explained(error)
