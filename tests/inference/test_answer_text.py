from rptrain.inference.answer_text import INCOMPLETE, AnswerText, decoded


class Bytes:
    """Every byte of UTF-8 is a token; 300 is special."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        text = bytes(token for token in tokens if token < 256).decode(errors="replace")
        return text.replace(" .", ".")

    def batch_decode(self, answers: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [self.decode(tokens, skip_special_tokens) for tokens in answers]


def pieces(answer: AnswerText, tokens: bytes) -> list[str]:
    return [*(answer.add(token) for token in tokens), answer.end()]


def test_a_character_is_shown_once_it_is_complete() -> None:
    answer = AnswerText(Bytes())
    assert pieces(answer, "aß€".encode()) == ["a", "", "ß", "", "", "€", ""]
    assert answer.add(300) == "" and answer.text == "aß€"


def test_the_token_that_ends_an_answer_adds_only_what_is_left() -> None:
    """Also one that is not special: generation_config.json may list any token."""
    answer = AnswerText(Bytes(), {ord("b")})
    assert [answer.add(token) for token in b"a\xc3b"] == ["a", "", INCOMPLETE] and answer.text == f"a{INCOMPLETE}"
    assert decoded(Bytes(), [b"aab", b"aa", b"b"], {ord("b")}) == ["aa", "aa", ""]


def test_what_stays_incomplete_is_shown_at_the_end() -> None:
    assert pieces(AnswerText(Bytes()), b"a\xc3") == ["a", "", INCOMPLETE]


def test_a_text_that_changes_afterwards_is_given_from_there() -> None:
    assert pieces(AnswerText(Bytes()), b"a .b") == ["a", " ", ".", "b", ""]
