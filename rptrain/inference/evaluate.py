"""Asks a model the held-out questions of the built-in tasks and counts exact answers."""

from typing import Any

from rptrain.data import tasks
from rptrain.models.layers.generate import Weights, generate
from rptrain.models.spec import ModelSpec

MAX_ANSWER = 12  # tokens: the longest answer and its end
SHOWN = 3  # questions whose answers are told


def ask_questions(
    spec: ModelSpec, weights: Weights, tokenizer: Any, count: int
) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Greedy answers to `count` test questions: the share that is exact, "overall" and for each task; and the first
    SHOWN questions with what was answered.
    """
    asked = tasks.questions("test", count)
    prompts = [encode_prompt(tokenizer, question.prompt) for question in asked]
    answers = generate(spec, weights, prompts, MAX_ANSWER, eos_ids=[tokenizer.eos_token_id])
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    shown = [(question.prompt, text) for question, text in zip(asked[:SHOWN], texts[:SHOWN], strict=True)]
    return tasks.score(asked, texts), shown


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """A user's message as the chat template writes it, up to where the answer begins."""
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(rendered, add_special_tokens=False)["input_ids"]
