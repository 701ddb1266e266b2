"""The text of an answer, whole or while its tokens arrive."""

from collections.abc import Collection, Iterable
from typing import Any

INCOMPLETE = "\ufffd"  # how a tokenizer decodes a character of which bytes are missing


def decoded(tokenizer: Any, answers: Iterable[Iterable[int]], ends: Collection[int]) -> list[str]:
    """The texts of whole answers, without the tokens that end them."""
    tokens = [[token for token in answer if token not in ends] for answer in answers]
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)


class AnswerText:
    """Decodes the tokens of an answer, and gives its text piece by piece.

    A tokenizer may decode earlier tokens differently once it sees later ones, such as bytes that turn out not to be
    UTF-8. The next piece then has all that follows the unchanged beginning.

    `ends`: the tokens that end an answer. They are not part of its text, whether the tokenizer calls them special or
    not.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int] = ()) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._tokens: list[int] = []
        self.text = ""  # the whole text, without special tokens
        self._given = ""

    def add(self, token: int) -> str:
        """The text that a token adds. Empty while a character is incomplete."""
        if token in self._ends:
            return self.end()
        self._tokens.append(token)
        self.text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return "" if self.text.endswith(INCOMPLETE) else self._rest()

    def end(self) -> str:
        """The text that is left when no more tokens come."""
        return self._rest()

    def _rest(self) -> str:
        same = 0
        for old, new in zip(self._given, self.text, strict=False):
            if old != new:
                break
            same += 1
        self._given = self.text
        return self.text[same:]
