"""The text of an answer while its tokens arrive."""

from typing import Any

INCOMPLETE = "\ufffd"  # how a tokenizer decodes a character of which bytes are missing


class AnswerText:
    """Decodes the tokens of an answer, and gives its text piece by piece."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.tokens: list[int] = []
        self._given = ""

    @property
    def text(self) -> str:
        """The whole text, without special tokens."""
        return self._tokenizer.decode(self.tokens, skip_special_tokens=True)

    def add(self, token: int) -> str:
        """The text that a token adds. Empty while a character is incomplete."""
        self.tokens.append(token)
        text = self.text
        return "" if text.endswith(INCOMPLETE) else self._rest(text)

    def end(self) -> str:
        """The text that is left when no more tokens come."""
        return self._rest(self.text)

    def _rest(self, text: str) -> str:
        if not text.startswith(self._given):  # some tokenizers change the space before punctuation afterwards
            return ""
        rest, self._given = text[len(self._given) :], text
        return rest
