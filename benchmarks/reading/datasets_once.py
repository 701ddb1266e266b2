"""Tokenize a file of chats with `datasets` and two processes, and print the seconds as JSON.

A script for `benchmarks.reading`.
"""

import json
import sys
import time


def main(model: str, data: str, cache: str, template: str) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    with open(template) as file:
        tokenizer.chat_template = file.read()

    def encoded(row: dict) -> dict:
        made = tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=True, truncation=True, max_length=2048
        )
        return {"input_ids": made["input_ids"], "assistant_masks": made["assistant_masks"]}

    began = time.perf_counter()
    rows = Dataset.from_json(data, cache_dir=cache)
    made = rows.map(encoded, num_proc=2, remove_columns=rows.column_names)
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "supervised": sum(made[0]["assistant_masks"])}))


if __name__ == "__main__":
    main(*sys.argv[1:])
