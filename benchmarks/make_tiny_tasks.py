"""Makes the preset `tiny-tasks`: `python -m benchmarks.make_tiny_tasks [DIRECTORY]`.

A Qwen3 small enough to train in a minute on a laptop's CPU, and a word-level tokenizer in which the phrases
of the generated tasks, every printable ASCII character and the newline are one token each.
"""

import json
import re
import string
import sys
from pathlib import Path
from typing import Any

from rptrain.data.tasks import TASKS
from rptrain.models.locate import PRESETS

PAD, UNKNOWN, END = "<|pad|>", "<|unknown|>", "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL = (PAD, UNKNOWN, END, *(f"<|{role}|>" for role in ROLES))
PHRASES = tuple(task.phrase for task in TASKS.values())
CHARACTERS = ("\n", " ", *string.digits, *string.ascii_letters, *string.punctuation)
MAX_LENGTH = 512

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("the roles are system, user and assistant, not " ~ message.role) }}
    {%- endif %}
    {{- "<|" ~ message.role ~ "|>" ~ message.content ~ "<|end|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|assistant|>" }}
{%- endif %}
"""


def make_tokenizer() -> dict[str, Any]:
    """The contents of tokenizer.json."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *PHRASES, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    pattern = "|".join(map(re.escape, PHRASES)) + r"|[\s\S]"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return json.loads(tokenizer.to_str())


def make(directory: Path) -> None:
    """Writes the preset's files; the same bytes every time."""
    tokenizer = make_tokenizer()
    ids = {token: index for token, index in tokenizer["model"]["vocab"].items() if token in SPECIAL}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(tokenizer["model"]["vocab"]),
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": ids[END],
        "pad_token_id": ids[PAD],
        "dtype": "float32",
        "use_cache": True,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
    }
    generation = {"do_sample": False, "eos_token_id": ids[END], "pad_token_id": ids[PAD]}
    contents = {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8", newline="\n")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else PRESETS / "tiny-tasks")
