from rptrain.inference.answer_text import INCOMPLETE, AnswerText


class Bytes:
    """Every byte of UTF-8 is a token; 300 is special."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        text = bytes(token for token in tokens if token < 256).decode(errors="replace")
        return text.replace(" .", ".")


def pieces(answer: AnswerText, tokens: bytes) -> list[str]:
    return [*(answer.add(token) for token in tokens), answer.end()]


def test_a_character_is_shown_once_it_is_complete() -> None:
    answer = AnswerText(Bytes())
    assert pieces(answer, "aß€".encode()) == ["a", "", "ß", "", "", "€", ""]
    assert answer.add(300) == "" and answer.text == "aß€"


def test_what_stays_incomplete_is_shown_at_the_end() -> None:
    assert pieces(AnswerText(Bytes()), b"a\xc3") == ["a", "", INCOMPLETE]


def test_a_text_that_changes_afterwards_is_given_from_there() -> None:
    assert pieces(AnswerText(Bytes()), b"a .b") == ["a", " ", ".", "b", ""]
