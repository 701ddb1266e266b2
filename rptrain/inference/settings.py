"""How the answers of a conversation are drawn. Imports no torch."""

from dataclasses import dataclass
from math import isfinite

from rptrain.utils.errors import UserError

MAX_NEW_TOKENS = 1024


@dataclass(frozen=True)
class AnswerSettings:
    """How answers are drawn. `max_new_tokens`: of one answer."""

    temperature: float = 0.7
    top_p: float = 0.95
    max_new_tokens: int = MAX_NEW_TOKENS
    seed: int = 0

    def check(self) -> None:
        """Raises UserError for values that cannot be."""
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"the temperature must be a finite number of at least 0, not {self.temperature:g}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p must be above 0 and at most 1, not {self.top_p:g}")
        if self.max_new_tokens < 1:
            raise UserError(f"an answer needs at least 1 new token, not {self.max_new_tokens}")
