"""Text generation with a trained model: a run, a checkpoint, or a model directory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from rptrain.data.loader import load_tokenizer
from rptrain.data.tokens import tokenized
from rptrain.inference.answer_text import AnswerText, decoded
from rptrain.inference.evaluate import in_template
from rptrain.inference.model import EXTENDED, Model, find_model
from rptrain.inference.placement import FreeMemory, Sizes, choose
from rptrain.inference.weights import placed
from rptrain.models.decode.generate import Sampling, Weights, generate, stream
from rptrain.models.spec import ModelSpec
from rptrain.utils.errors import UserError
from rptrain.utils.phases import phase

LOWER = "lower --max-new-tokens, give fewer prompts, or "  # what helps if memory is short, besides freeing it


@dataclass(frozen=True)
class Request:
    """Prompts to answer. `raw` continues a prompt itself instead of putting it into the chat template."""

    source: Path  # a run, a checkpoint or the directory of a model
    prompts: Sequence[str]
    max_new_tokens: int
    temperature: float = 0.0  # 0: always the most likely token
    seed: int = 0
    raw: bool = False
    tell: Callable[[str], object] = lambda said: None  # called with sentences: the state of a run, slow copies


def generate_text(request: Request, memory: FreeMemory, wanted: str = "auto") -> list[str]:
    """One answer for each prompt.

    A run answers from its result (`rptrain.checkpoint.result`). `choose` places it.
    Raises UserError for a source that is neither a run, a checkpoint nor a model directory, and if it does not fit.
    """
    spec, weights, encoded, ends, tokenizer = _prepared(request, memory, wanted)
    with phase("generating text", unit=""):
        answers = generate(spec, weights, encoded, request.max_new_tokens, ends, request.temperature, request.seed)
    return decoded(tokenizer, answers, ends)


def stream_text(request: Request, memory: FreeMemory, wanted: str = "auto") -> Iterator[list[str | None]]:
    """The answers of `generate_text` in pieces: the text that each step adds to each answer, and None once it ended."""
    spec, weights, encoded, ends, tokenizer = _prepared(request, memory, wanted)
    answers = [AnswerText(tokenizer, ends) for _ in request.prompts]
    sampling = Sampling(request.temperature, seed=request.seed)
    steps = stream(spec, weights, encoded, request.max_new_tokens, ends, sampling)
    with phase("reading the prompt", unit=""):
        first = [*islice(steps, 1)]
    for tokens in chain(first, steps):
        yield [None if token is None else answer.add(token) for answer, token in zip(answers, tokens, strict=True)]
    yield [answer.end() for answer in answers]  # of those that reached the limit


class _Prepared(NamedTuple):
    spec: ModelSpec
    weights: Weights
    encoded: list[list[int]]  # the prompts
    ends: set[int]  # tokens that end an answer
    tokenizer: Any


def _prepared(request: Request, memory: FreeMemory, wanted: str) -> _Prepared:
    prompts, temperature = request.prompts, request.temperature
    if not isfinite(temperature):
        raise UserError(f"--temperature must be a finite number, not {temperature}")
    for number, prompt in enumerate(prompts, 1):
        if prompt != prompt.encode(errors="replace").decode():
            raise UserError(f"prompt {number} is not UTF-8 text")
    model = find_model(request.source)
    if model.state:
        request.tell(f"{model.source}: {model.state}")
    tokenizer = load_tokenizer(model.tokenizer)
    raw = request.raw or not tokenizer.chat_template
    try:
        texts = prompts if raw else in_template(tokenizer, prompts)
    except UserError as error:
        raise UserError(f"{model.tokenizer}: {error}; --raw continues a prompt without the chat template") from error
    encoded = [tokenized(tokenizer, text, add_special_tokens=raw)["input_ids"] for text in texts]
    _check_lengths(model, encoded)
    longest = max(map(len, encoded), default=0) + request.max_new_tokens
    placement = choose(Sizes.of(model.spec, model.dtype, len(encoded), longest, lower=LOWER), memory, wanted)
    return _Prepared(model.spec, placed(model, placement, request.tell), encoded, model.ends(tokenizer), tokenizer)


def _check_lengths(model: Model, prompts: list[list[int]]) -> None:
    """Raises UserError if a prompt is far longer than any that the model was made for."""
    for number, prompt in enumerate(prompts, 1):
        if model.longest is not None and len(prompt) > model.longest:
            raise UserError(
                f"prompt {number} has {len(prompt):,} tokens, more than {EXTENDED} times the model's "
                f"max_position_embeddings ({model.longest // EXTENDED:,}): shorten it"
            )
