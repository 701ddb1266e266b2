"""The model's padding token, whose embedding is not trained where it is an input: checks of `pad_token_id`."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from rptrain.data.tokens import Stream
from rptrain.models.spec import ModelShape
from rptrain.utils.errors import UserError
from rptrain.utils.text import one_line

KEY = "pad_token_id"
LOOKED_AT = 1 << 20  # most tokens of each file


def check(spec: ModelShape, model_dir: Path) -> None:
    """UserError if `pad_token_id` is outside of the vocabulary: transformers cannot load such a model."""
    row = spec.padding_row
    if row is None or 0 <= row < spec.vocab_size:
        return
    given = f"{KEY} {spec.text_config[KEY]}" if KEY in spec.text_config else f"{KEY}, {row} where it is not set,"
    raise UserError(
        f"{model_dir / 'config.json'}: {given} is outside of the vocabulary of {spec.vocab_size} tokens, so "
        f"transformers cannot load the model: set {KEY} to null, or to the id of the padding token"
    )


def trained_without(spec: ModelShape) -> int | None:
    """The row of a trained embedding whose look-ups are not trained; None if there is none."""
    return spec.padding_row if spec.units[0].trainable else None


def warning(row: int | None, eos: Collection[int], streams: Iterable[Stream], tokenizer: Any) -> str:
    """What a plan and the log of a run say if texts have the padding token; empty if they do not.

    `row`: from `trained_without`. `eos`: tokens that end answers. Of each of the `streams`, the first tokens are
    looked at.
    """
    if row is None:
        return ""
    if row in eos:
        what = "is also an EOS token"
    elif any(_occurs(row, stream) for stream in streams):
        what = "occurs in the training data"
    else:
        return ""
    name = "" if tokenizer is None else f" ({one_line(str(tokenizer.convert_ids_to_tokens(row)))})"
    return (
        f"the padding token of the model, {KEY} {row}{name} in config.json, {what}: as in transformers, its embedding "
        f"gets no gradient where it is an input. To train it, set {KEY} to null or to a token that no text has"
    )


def _occurs(row: int, stream: Stream) -> bool:
    """Whether a token is among the first ones of a stream, which holds ~id for a token that the loss counts."""
    tokens = stream.tokens[:LOOKED_AT]
    return bool(((tokens == row) | (tokens == ~row)).any())
