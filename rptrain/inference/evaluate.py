"""Evaluation on the held-out questions of the built-in tasks, by exact match."""

from collections.abc import Collection, Sequence
from typing import Any

from rptrain.data import tasks
from rptrain.data.render import render_prompts
from rptrain.data.template import load_template
from rptrain.data.tokens import tokenized
from rptrain.inference.answer_text import decoded
from rptrain.models.decode.generate import Weights, generate
from rptrain.models.spec import ModelSpec
from rptrain.utils.errors import UserError

MAX_ANSWER = 12  # tokens of the longest answer, with its end
SHOWN = 3  # questions whose answers are returned


def ask_questions(
    spec: ModelSpec, weights: Weights, tokenizer: Any, count: int, ends: Collection[int]
) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Answers `count` test questions greedily. `ends`: the token ids that end an answer.

    Returns the fraction of exact answers, "overall" and per task, and the first SHOWN questions with their answers.
    """
    asked = tasks.questions("test", count)
    prompts = encode_prompts(tokenizer, [question.prompt for question in asked])
    answers = generate(spec, weights, prompts, MAX_ANSWER, ends)
    texts = decoded(tokenizer, answers, ends)
    shown = [(question.prompt, text) for question, text in zip(asked[:SHOWN], texts[:SHOWN], strict=True)]
    return tasks.score(asked, texts), shown


def check_questions(tokenizer: Any) -> None:
    """UserError if the tokenizer has no chat template, or if the template rejects the questions."""
    load_template(tokenizer, None)
    try:
        encode_prompts(tokenizer, [tasks.questions("test", 1)[0].prompt])
    except UserError as error:
        raise UserError(
            f"eval.questions: {error}; set `eval.questions` to 0, or `data.chat_template` to a template that takes a "
            "single message of the user"
        ) from error


def encode_prompts(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of `in_template`."""
    rendered = in_template(tokenizer, texts)
    return [tokenized(tokenizer, text, add_special_tokens=False)["input_ids"] for text in rendered]


def in_template(tokenizer: Any, texts: Sequence[str]) -> list[str]:
    """The user's messages in the chat template, each alone and with the generation prompt.

    Raises UserError if the template rejects one or exceeds a limit.
    """
    return render_prompts(tokenizer, load_template(tokenizer, None), texts)
