"""A tokenizer for tests: every character is a token, and it has no chat template."""

from typing import Any

from rptrain.inference.chat import Chat, Speaker
from rptrain.models.families.registry import build
from rptrain.models.locate import locate, read_config
from rptrain.models.spec import ModelSpec
from rptrain.models.weights import pretrained

END = 90


class Letters:
    name_or_path, chat_template, eos_token_id = "letters", None, END

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % END for letter in text]}

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in tokens if token != END)


def letters_spec(**changes: Any) -> ModelSpec:
    return build(read_config(locate("tiny-tasks")) | {"num_hidden_layers": 1, "hidden_size": 16} | changes)


def letters_chat(free: int = 1 << 40, **changes: Any) -> Chat:
    """A conversation with a small model of random weights."""
    import torch

    spec = letters_spec(**changes)
    params = [unit.views(torch.zeros(unit.numel)) for unit in spec.units]
    pretrained.initialize(spec, lambda unit, name: params[unit][name], seed=0)
    chat = Chat(Letters(), {END}, Speaker(spec, params.__getitem__, lambda: free), longest=400)
    chat.base = Speaker(spec, params.__getitem__, lambda: free)
    return chat
