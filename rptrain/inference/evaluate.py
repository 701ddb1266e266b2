"""Evaluation on the held-out questions of the built-in tasks, by exact match."""

from typing import Any

from rptrain.data import tasks
from rptrain.models.layers.generate import Weights, generate
from rptrain.models.spec import ModelSpec

MAX_ANSWER = 12  # tokens of the longest answer, with its end
SHOWN = 3  # questions whose answers are returned


def ask_questions(
    spec: ModelSpec, weights: Weights, tokenizer: Any, count: int
) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Answers `count` test questions greedily.

    Returns the fraction of exact answers, "overall" and per task, and the first SHOWN questions with their answers.
    """
    asked = tasks.questions("test", count)
    prompts = [encode_prompt(tokenizer, question.prompt) for question in asked]
    answers = generate(spec, weights, prompts, MAX_ANSWER, eos_ids=[tokenizer.eos_token_id])
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    shown = [(question.prompt, text) for question, text in zip(asked[:SHOWN], texts[:SHOWN], strict=True)]
    return tasks.score(asked, texts), shown


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """A user's message in the chat template, with the generation prompt."""
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]
