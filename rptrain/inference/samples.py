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


def encode_samples(tokenizer: Any, prompts: Sequence[str], vocab_size: int) -> list[list[int]]:
    """The tokens of the prompts: in the chat template if the tokenizer has one, else of the text that is continued.

    UserError if the template rejects a prompt, or if its tokens are too many, none, or not the model's.
    """
    if not prompts:
        return []
    try:
        if tokenizer.chat_template:
            encoded = encode_prompts(tokenizer, prompts)
        else:
            encoded = [tokenized(tokenizer, text, add_special_tokens=True)["input_ids"] for text in prompts]
    except UserError as error:
        raise UserError(f"log.sample_prompts: {error}") from error
    for number, tokens in enumerate(encoded, 1):
        if not 0 < len(tokens) <= LONGEST:
            template = ", with the chat template" if tokenizer.chat_template else ""
            raise UserError(
                f"log.sample_prompts: prompt {number} has {counted(len(tokens), 'token')}{template}: it needs 1 to "
                f"{LONGEST}"
            )
        if max(tokens) >= vocab_size:
            raise UserError(
                f"log.sample_prompts: prompt {number} has token {max(tokens)}, and the model's vocabulary has "
                f"{vocab_size}: use the tokenizer that belongs to the model"
            )
    return encoded


def answer_samples(
    spec: ModelSpec, weights: Weights, tokenizer: Any, encoded: Sequence[Sequence[int]], ends: Collection[int]
) -> list[str]:
    """One greedy answer for each prompt, of at most MAX_NEW_TOKENS. `ends`: the token ids that end an answer."""
    return decoded(tokenizer, generate(spec, weights, encoded, MAX_NEW_TOKENS, ends), ends)
