"""Answers to a few prompts (`log.sample_prompts`), which a run generates whenever it is validated."""

from collections.abc import Collection, Sequence
from typing import Any

from rptrain.data.tokens import tokenized
from rptrain.inference.answer_text import decoded
from rptrain.inference.evaluate import encode_prompts
from rptrain.models.decode.generate import Weights, generate
from rptrain.models.spec import ModelSpec
from rptrain.utils.errors import UserError
from rptrain.utils.text import counted

MAX_NEW_TOKENS = 64
LONGEST = 256  # tokens of a prompt: keys and values of all prompts are few beside a step's activations


def answer_prompts(
    spec: ModelSpec, weights: Weights, tokenizer: Any, prompts: Sequence[str], ends: Collection[int]
) -> list[str]:
    """One greedy answer for each prompt, of at most MAX_NEW_TOKENS. `ends`: the token ids that end an answer."""
    return decoded(tokenizer, generate(spec, weights, _encoded(tokenizer, prompts), MAX_NEW_TOKENS, ends), ends)


def check_prompts(tokenizer: Any, prompts: Sequence[str], vocab_size: int) -> None:
    """UserError if the chat template rejects a prompt, or if its tokens are too many, none, or not the model's."""
    for number, prompt in enumerate(prompts, 1):
        named = f"log.sample_prompts: prompt {number}"
        try:
            (tokens,) = _encoded(tokenizer, [prompt])
        except UserError as error:
            raise UserError(f"{named}: {error}") from error
        if not 0 < len(tokens) <= LONGEST:
            raise UserError(
                f"{named} has {counted(len(tokens), 'token')}, with the chat template: it needs 1 to {LONGEST}"
            )
        if max(tokens) >= vocab_size:
            raise UserError(
                f"{named} has token {max(tokens)}, and the model's vocabulary has {vocab_size}: use the tokenizer that "
                "belongs to the model"
            )


def _encoded(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Their tokens: in the chat template if the tokenizer has one, else of the text that is continued."""
    if tokenizer.chat_template:
        return encode_prompts(tokenizer, prompts)
    return [tokenized(tokenizer, text, add_special_tokens=True)["input_ids"] for text in prompts]
