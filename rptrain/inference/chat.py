"""A conversation with a model: several turns, whose common beginning is computed once, and the base model beside it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from rptrain.data.chat import Message
from rptrain.data.render import render_conversations
from rptrain.data.template import load_template
from rptrain.data.tokens import tokenized
from rptrain.inference.answer_text import AnswerText
from rptrain.inference.model import EXTENDED
from rptrain.inference.placement import FREE
from rptrain.inference.settings import AnswerSettings
from rptrain.models.decode.cache import cache_bytes
from rptrain.models.decode.generate import Sampling, Weights, new_cache, stream
from rptrain.models.spec import ModelSpec
from rptrain.utils.errors import UserError
from rptrain.utils.units import format_bytes


@dataclass(frozen=True)
class Speed:
    """The measured speed of an answer."""

    prompt: int  # tokens that were computed before the first new one
    prompt_seconds: float  # until the first new token
    tokens: int  # new ones
    seconds: float  # from the first new token to the last one

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens per second; None with fewer than two."""
        return (self.tokens - 1) / self.seconds if self.tokens > 1 and self.seconds > 0 else None


class Speaker:
    """A loaded model with the keys and values of its conversation."""

    def __init__(self, spec: ModelSpec, weights: Weights, free: Callable[[], int]) -> None:
        """`free`: returns the free bytes where keys and values are kept."""
        self._spec, self._weights, self._free = spec, weights, free
        self._cache = new_cache(spec, weights)
        self.speed: Speed | None = None  # of the last answer

    @property
    def cache_nbytes(self) -> int:
        return self._cache.nbytes

    def stream(self, prompt: Sequence[int], settings: AnswerSettings, ends: set[int], seed: int) -> Iterator[int]:
        """New tokens after a prompt. Raises UserError if their keys and values do not fit into free memory."""
        table = self._weights(0)["embed"]
        longest = len(prompt) + settings.max_new_tokens
        more = cache_bytes(self._spec, 1, longest, table.dtype) - self._cache.nbytes
        if more > FREE * self._free():
            raise UserError(
                f"keys and values of up to {longest:,} tokens take {format_bytes(more)} more, and "
                f"{format_bytes(self._free())} is free: lower the number of new tokens, or reset the conversation"
            )
        self._cache.limit = longest  # no more than was checked
        sampling = Sampling(settings.temperature, settings.top_p, seed)
        new = len(prompt) - self._cache.keep(0, prompt)
        began, first, count = perf_counter(), 0.0, 0
        for (token,) in stream(
            self._spec, self._weights, [prompt], settings.max_new_tokens, ends, sampling, self._cache
        ):
            assert token is not None
            now, count = perf_counter(), count + 1
            first = first or now
            self.speed = Speed(new, first - began, count, now - first)
            yield token


@dataclass
class Turn:
    """What the user said, and the answers to it. None: not given."""

    said: str
    number: int  # of the question, so that another try draws other tokens
    answer: str | None = None
    base_answer: str | None = None


@dataclass
class Chat:
    """A conversation. The tokenizer's chat template writes it; without one, the model continues plain text."""

    tokenizer: Any
    ends: set[int]  # tokens that end an answer
    tuned: Speaker
    longest: int | None = None  # tokens of a prompt
    base: Speaker | None = None
    system: str = ""
    settings: AnswerSettings = field(default_factory=AnswerSettings)
    turns: list[Turn] = field(default_factory=list)
    _asked: int = 0

    @property
    def templated(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def ask(self, said: str) -> Iterator[str]:
        """Says something, and yields the answer in pieces. An iterator that is closed leaves the answer as it is.

        Raises UserError if the template refuses the conversation or if it is too long; then nothing was said.
        """
        if said != said.encode(errors="replace").decode():
            raise UserError("the message is not UTF-8 text")
        self.turns.append(Turn(said, self._asked))
        self._asked += 1
        return self._first(self.turns[-1])

    def retry(self) -> Iterator[str]:
        """Another answer to the last message, which replaces the earlier one once it has begun.

        Raises UserError as `ask` does, and if nothing was said yet; the earlier answer then stays.
        """
        self._check_said()
        turn = Turn(self.turns[-1].said, self._asked)
        self._asked += 1
        replaced, self.turns[-1] = self.turns[-1], turn
        return self._first(turn, replaced)

    def take_back(self) -> str:
        """Removes the last turn, and returns what was said. Raises UserError if there is none."""
        self._check_said()
        return self.turns.pop().said

    def reset(self) -> None:
        """Forgets all turns."""
        self.turns.clear()

    def ask_base(self) -> Iterator[str]:
        """The base model's answer to the last message, in the conversation with its own answers."""
        assert self.base is not None and self.turns
        turn = self.turns[-1]
        for text, piece in self._pieces(self.base, base=True):
            turn.base_answer = text
            yield piece

    def _check_said(self) -> None:
        if not self.turns:
            raise UserError("nothing was said yet")

    def _first(self, turn: Turn, replaced: Turn | None = None) -> Iterator[str]:
        try:
            for text, piece in self._pieces(self.tuned, base=False):
                turn.answer = text
                yield piece
        finally:
            if turn.answer is None and self.turns[-1:] == [turn]:
                self.turns[-1:] = [] if replaced is None else [replaced]

    def _pieces(self, speaker: Speaker, *, base: bool) -> Iterator[tuple[str, str]]:
        """The whole text so far, and what was added, for each new token."""
        self.settings.check()
        prompt = self._prompt(base=base)
        answer = AnswerText(self.tokenizer, self.ends)
        for token in speaker.stream(prompt, self.settings, self.ends, self.settings.seed + self.turns[-1].number):
            piece = answer.add(token)
            yield answer.text, piece
        yield answer.text, answer.end()

    def _prompt(self, *, base: bool) -> list[int]:
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.said})
            answer = turn.base_answer if base and turn.base_answer is not None else turn.answer
            if turn is not self.turns[-1] and answer is not None:
                messages.append({"role": "assistant", "content": answer})
        if self.templated:
            (text,) = render_conversations(self.tokenizer, load_template(self.tokenizer, None), [messages])
        else:
            text = "\n".join(message["content"] for message in messages)
        tokens = tokenized(self.tokenizer, text, add_special_tokens=not self.templated)["input_ids"]
        if self.longest is not None and len(tokens) > self.longest:
            raise UserError(
                f"the conversation has {len(tokens):,} tokens, more than {EXTENDED} times the model's "
                f"max_position_embeddings ({self.longest // EXTENDED:,}): reset it"
            )
        return tokens
