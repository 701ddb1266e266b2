"""What the loaders of LLaMA-Factory, TRL and axolotl make of the rows in wild.py, into references/NAME.json.

Run by hand where the project is installed: `python -m tests.data.make_references trl`. A token that is learned is
written as its complement, ~id.
"""

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from . import wild
from .tokenizer import make

FOLDER = Path(__file__).parent / "references"
IGNORED = -100

Marked = list[list[int]]


def marked(ids: list[int], labels: list[int]) -> list[int]:
    assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))
    return [token if label == IGNORED else ~token for token, label in zip(ids, labels, strict=True)]


def llamafactory(kind: str, rows: list[dict[str, Any]], tokenizer: Any) -> Marked:
    from llamafactory.data.converter import get_dataset_converter
    from llamafactory.data.parser import DatasetAttr
    from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
    from llamafactory.data.template import TEMPLATES, StringFormatter, register_template

    if "harmony" not in TEMPLATES:
        prompt = "<|start|>user<|message|>{{content}}<|end|><|start|>assistant<|message|>"
        register_template(
            "harmony",
            format_user=StringFormatter([prompt]),
            format_assistant=StringFormatter(["{{content}}<|end|>"]),
            format_system=StringFormatter(["<|start|>system<|message|>{{content}}<|end|>"]),
        )
    attributes = DatasetAttr("file", kind, formatting="alpaca" if kind == "alpaca" else "sharegpt", system="system")
    attributes.history = "history"
    if kind == "openai":  # as its own example names the columns
        attributes.messages, attributes.role_tag, attributes.content_tag = "messages", "role", "content"
        attributes.user_tag, attributes.assistant_tag = "user", "assistant"
    options = SimpleNamespace(cutoff_len=1000, mask_history=False, train_on_prompt=False, media_dir=".")
    convert = get_dataset_converter(attributes.formatting, attributes, options)
    processor = SupervisedDatasetProcessor(TEMPLATES["harmony"], tokenizer, None, options)
    found = []
    for row in rows:
        made = convert({"system": "", "history": None, **row})
        parts = (made["_prompt"], made["_response"], made["_system"], made["_tools"])
        found.append(marked(*processor._encode_data_example(*parts, [], [], [])))
    return found


def trl(kind: str, rows: list[dict[str, Any]], tokenizer: Any) -> Marked:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    with TemporaryDirectory() as folder:
        options = SFTConfig(folder, assistant_only_loss=kind == "messages", max_length=1000, use_cpu=True, bf16=False)
        trainer = SFTTrainer(model, options, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
        found = []
        for row in trainer.train_dataset:
            batch = trainer.data_collator([row])
            found.append(marked(batch["input_ids"][0].tolist(), batch["labels"][0].tolist()))
    return found


def axolotl(kind: str, rows: list[dict[str, Any]], tokenizer: Any) -> Marked:
    from axolotl.prompt_strategies.chat_template import ChatTemplatePrompter, ChatTemplateStrategy

    keys = {"role": "from", "content": "value"} if kind == "sharegpt" else {"role": "role", "content": "content"}
    prompter = ChatTemplatePrompter(
        tokenizer,
        chat_template=wild.CHATML,
        message_property_mappings=keys,
        message_field_training="train" if kind == "flags" else None,
        field_messages="conversations" if kind == "sharegpt" else "messages",
    )
    strategy = ChatTemplateStrategy(prompter, tokenizer, False, 1000, roles_to_train=["assistant"], train_on_eos="turn")
    made = [strategy.tokenize_prompt(row) for row in rows]
    return [marked(one["input_ids"], one["labels"]) for one in made]


LOADERS: dict[str, Callable[[str, list[dict[str, Any]], Any], Marked]] = {
    "llamafactory": llamafactory,
    "trl": trl,
    "axolotl": axolotl,
}


def main(project: str) -> None:
    found = {}
    for kind, rows in wild.ROWS[project].items():
        tokenizer = make(wild.TEMPLATES[project])
        if project == "axolotl":
            tokenizer.eos_token = "<|im_end|>"  # it learns the end of a turn where that is the end-of-text token
        found[kind] = LOADERS[project](kind, rows, tokenizer)
    FOLDER.mkdir(exist_ok=True)
    lines = [f' "{kind}": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]" for kind, rows in found.items()]
    text = ",\n".join([f'{{"version": "{version(project)}"', *lines]) + "\n}\n"
    (FOLDER / f"{project}.json").write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
