"""Compare how much matrices in FP8 raise the loss of a real model: all, and all but some of them.

python -m benchmarks.fp8_error MODEL: MODEL is the directory of SmolLM2-135M-Instruct that tests/test_real_model.py
describes. Only the forward pass runs, in transformers on the CPU. Inputs and weights of the blocks' products are
rounded to bfloat16, then to FP8 by rows. The text is the beginning of `pydoc_data.topics`, 16 sequences of 768 tokens.
"""

import sys
from collections.abc import Callable
from pydoc_data.topics import topics
from statistics import mean

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from rptrain.kernels.fp8 import quantize_rows

SEQUENCES, LENGTH, TOPICS = 16, 768, 40


def in_fp8(x: Tensor) -> Tensor:
    """x [..., inputs], rounded by rows."""
    return quantize_rows(x.flatten(0, -2)).dequantize(x.dtype).view(x.shape)


class Linear(nn.Module):
    """A product of a block without bias, whose operands are rounded to bfloat16, and to FP8 if `quantized`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight.bfloat16().float()
        self.weight_in_fp8 = in_fp8(self.weight)
        self.quantized = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.bfloat16().float()
        return in_fp8(x) @ self.weight_in_fp8.T if self.quantized else x @ self.weight.T


def main(path: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokens = torch.tensor([token for name in list(topics)[:TOPICS] for token in tokenizer(topics[name]).input_ids])
    batches = tokens[: SEQUENCES * LENGTH].view(-1, 4, LENGTH)
    products: dict[tuple[int, str], Linear] = {}
    for index, layer in enumerate(model.model.layers):
        for block in (layer.self_attn, layer.mlp):
            for name, old in list(block.named_children()):
                if isinstance(old, nn.Linear):
                    products[index, name] = Linear(old.weight.detach())
                    setattr(block, name, products[index, name])
    first, last = 0, len(model.model.layers) - 1
    choices: dict[str, Callable[[int, str], bool]] = {
        "none": lambda index, name: False,
        "all": lambda index, name: True,
        "all but down_proj of the last block": lambda index, name: (index, name) != (last, "down_proj"),
        "all but the last block": lambda index, name: index != last,
        "all but the first block": lambda index, name: index != first,
        "all but the first and the last block": lambda index, name: index not in (first, last),
        "all but the last two blocks": lambda index, name: index < last - 1,
        "all but down_proj": lambda index, name: name != "down_proj",
    }
    exact = 0.0
    for title, chosen in choices.items():
        for (index, name), product in products.items():
            product.quantized = chosen(index, name)
        with torch.inference_mode():
            loss = mean(float(model(batch, labels=batch).loss) for batch in batches)
        exact = exact or loss
        print(f"{title:40} {loss:.5f}  {loss / exact - 1:.3%}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
