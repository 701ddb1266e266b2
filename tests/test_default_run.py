"""The run that `rptrain.toml` describes: from random weights to right answers."""

import re
from itertools import groupby
from pathlib import Path

import pytest

from rptrain.config.resolve import resolve
from rptrain.data import tasks
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.train.job import prepare_job
from rptrain.train.run import train

from . import run_tools as tools

CONFIG = Path(__file__).resolve().parent.parent / "rptrain.toml"


@pytest.mark.parametrize(
    ("overrides", "score", "least", "loss"),
    [
        pytest.param(["train.max_steps=300", "eval.questions=100"], 0.3, 0.0, 0.2, marks=pytest.mark.long, id="short"),
        pytest.param([], 0.90, 0.80, 0.1, marks=pytest.mark.slow, id="whole"),
    ],
)
def test_the_default_run_learns_its_tasks(overrides, score, least, loss, tmp_path):
    """In a fifth of its steps it learns a part; all of them, as it is shipped, are for a machine that has time.

    `score` and `least`: the share of right answers, in all tasks and in each. `loss`: the last one, of the first.
    """
    resolved = resolve(CONFIG, [f"save.output_dir={tmp_path}", *overrides])
    questions = tasks.questions("test", resolved.config.eval.questions)
    assert len(questions) == (100 if overrides else 500)
    check_held_out(prepare_job(resolved.config), questions)

    run = train(resolved, quiet=True)
    before, after = tools.events(run, events.Evaluation)
    assert (before.step, after.step) == (0, resolved.config.train.max_steps)
    assert before.score <= 0.05
    assert after.score >= score
    assert after.tasks.keys() == tasks.TASKS.keys() and min(after.tasks.values()) >= least
    losses = [loss for loss, _, _ in tools.steps(run).values()]
    assert losses[-1] < loss * losses[0]

    theirs = answers_of_transformers(run, [question.prompt for question in questions])
    assert theirs == tools.generated(run.path, [question.prompt for question in questions], 12, 0.0, 0, False)
    scores = tasks.score(questions, theirs)
    assert scores.pop("overall") == after.score and scores == after.tasks


def check_held_out(job, questions) -> None:
    """No question that is asked, and no payload of one, is in what the model sees."""
    text = "".join(job.tokenizer.batch_decode(job.sequences.take(range(len(job.sequences)))[0]))
    seen = set(re.findall(r"<\|user\|>(.*?)<\|end\|>", text))
    assert len(seen) > 5000 and all(prompt.startswith(tuple(phrases())) for prompt in seen)
    asked = {question.prompt for question in questions}
    assert len(asked) > 0.9 * len(questions) and not seen & asked
    assert not {payload(prompt) for prompt in seen} & {payload(prompt) for prompt in asked}


def phrases() -> list[str]:
    return [task.phrase for task in tasks.TASKS.values()]


def payload(prompt: str) -> str:
    return prompt.rpartition(" ")[2]


def answers_of_transformers(run: RunDir, prompts: list[str]) -> list[str]:
    """Greedy answers by the stock library from what is in the run's `model`, prompts of a length together."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(run.model_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(run.model_path)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
    answers: dict[int, str] = {}
    by_length = sorted(range(len(prompts)), key=lambda index: len(encoded[index]))
    for length, group in groupby(by_length, key=lambda index: len(encoded[index])):
        indices = list(group)
        batch = tokenizer.pad({"input_ids": [encoded[index] for index in indices]}, return_tensors="pt")
        output = model.generate(**batch, max_new_tokens=12, do_sample=False)
        texts = tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)
        answers |= dict(zip(indices, texts, strict=True))
    return [answers[index] for index in range(len(prompts))]
