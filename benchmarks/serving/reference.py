"""Greedy answers of transformers, with PEFT if there is an adapter."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TOKENS = 64
CONVERSATIONS = [
    [{"role": "user", "content": "reverse: apple"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "sort: 5 2 8 1"}],
    [
        {"role": "user", "content": "upper: pear"},
        {"role": "assistant", "content": "PEAR"},
        {"role": "user", "content": "upper: plum"},
    ],
    [{"role": "user", "content": "?"}],
]


@dataclass(frozen=True)
class Answers:
    """The ids of prompts and of answers, of `TOKENS` tokens and up to a stop token, which is their last.

    `gap`: the smallest difference between the largest two logits; below about 1e-4, another order of sums may choose
    another token.
    """

    prompts: list[list[int]]
    ids: list[list[int]]
    stopped: list[list[int]]
    gap: float


def answers(model: Path, adapter: Path | None = None) -> Answers:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    network.set_experts_implementation("eager")
    tokenizer = AutoTokenizer.from_pretrained(model)
    stops = network.generation_config.eos_token_id
    stops = {stops} if isinstance(stops, int) else {*stops}
    if adapter is not None:
        network = PeftModel.from_pretrained(network, adapter)
    network.eval()
    found, gaps = Answers([], [], [], 0.0), list[float]()
    for messages in CONVERSATIONS:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        ids = torch.tensor([prompt])
        with torch.no_grad():
            said = network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        for logits in said.logits:
            first, second = logits[0].topk(2).values.tolist()
            gaps.append(first - second)
        answer = said.sequences[0, len(prompt) :].tolist()
        found.prompts.append(prompt)
        found.ids.append(answer)
        end = next((index + 1 for index, token in enumerate(answer) if token in stops), TOKENS)
        found.stopped.append(answer[:end])
    return Answers(found.prompts, found.ids, found.stopped, min(gaps))
