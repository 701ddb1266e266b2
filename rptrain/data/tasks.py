"""Generated questions with one correct answer each, which a tiny model learns in about a minute."""

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Literal

Split = Literal["train", "test"]
TRAIN_QUESTIONS, TEST_QUESTIONS = 8192, 500  # questions of the built-in set in each split
TEST_SHARE = 26  # of 256 payloads are held out


@dataclass(frozen=True)
class Task:
    """A task: a question is the phrase and a payload of 3 to 5 characters of the alphabet."""

    phrase: str
    alphabet: str
    solve: Callable[[str], str]


TASKS = {
    "reverse": Task("Spell backwards: ", string.ascii_lowercase, lambda payload: payload[::-1]),
    "capitals": Task("Write in capitals: ", string.ascii_lowercase, str.upper),
    "sort": Task("Sort the digits: ", string.digits, lambda payload: "".join(sorted(payload))),
}


@dataclass(frozen=True)
class Question:
    task: str
    prompt: str
    answer: str

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.answer}]


def split_of(payload: str) -> Split:
    """The split of a payload, independent of task and seed, so that no payload is in both splits."""
    return "test" if blake2b(payload.encode(), digest_size=1).digest()[0] < TEST_SHARE else "train"


def questions(split: Split, count: int, seed: int = 0) -> list[Question]:
    """`count` questions, alternating between tasks; deterministic."""
    random, names = Random(f"{split} {seed}"), list(TASKS)
    made: list[Question] = []
    while len(made) < count:
        name = names[len(made) % len(names)]
        task = TASKS[name]
        payload = "".join(random.choices(task.alphabet, k=random.randint(3, 5)))
        if split_of(payload) == split:
            made.append(Question(name, task.phrase + payload, task.solve(payload)))
    return made


def score(asked: Sequence[Question], answers: Sequence[str]) -> dict[str, float]:
    """The fraction of exact answers for each task and "overall"."""
    right = [question.answer == answer for question, answer in zip(asked, answers, strict=True)]
    shares = {"overall": sum(right) / len(right)}
    for name in TASKS:
        hits = [hit for question, hit in zip(asked, right, strict=True) if question.task == name]
        if hits:
            shares[name] = sum(hits) / len(hits)
    return shares
