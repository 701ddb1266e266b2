"""The error of a trainer that did not start, and the setting that it is about."""

import pytest

from rptrain.tui.run.start_errors import error_of, first_line, setting_of

TRACEBACK = """\
a warning
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    boom()
KeyError: 'layers'
"""
MISTAKES = """\
reading the data
2 mistakes in the config
  rptrain.toml:3: `lora.r` must be greater than 0, not 0
  rptrain.toml:9: unknown key `train.stepz`
"""


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("", ""),
        ("reading the data\n/nope.jsonl: no such data file or folder\n", "/nope.jsonl: no such data file or folder"),
        (TRACEBACK, "KeyError: 'layers'"),
        (MISTAKES, "rptrain.toml:3: `lora.r` must be greater than 0, not 0"),
        (
            "the run cannot start, for 2 reasons\n  this machine: the run needs 2 GiB\n",
            "this machine: the run needs 2 GiB",
        ),
        (
            "it does not fit. What makes it fit:\n- train.micro_batch_size = 1\n\n",
            "it does not fit. What makes it fit:",
        ),
    ],
)
def test_the_first_line(output: str, line: str):
    assert first_line(error_of(output)) == line


@pytest.mark.parametrize(
    ("error", "key"),
    [
        ("rptrain.toml:3: `lora.r` must be greater than 0", "lora.r"),
        ("`train.global_batch_size`: 16 is not a multiple of train.micro_batch_size, 3", "train.global_batch_size"),
        ('engine.devices = "cuda:0", but this machine has no CUDA GPU', "engine.devices"),
        ("`data.train.0.path` must be a path", "data.train.0.path"),
        ("`data.train.2.path` must be a path", "data.train.2.path"),
        ("poems.txt: not UTF-8 text", "data.train.1.path"),
        ("/data/chats.jsonl: no such data file or folder", "data.train.0.path"),
        ("no model 'llama': it is neither", "model.path"),
        ("unknown key `train.max_stepsize`", None),
        ("notes.train.max_steps.txt is missing", None),
        ("KeyError: 'layers'", None),
    ],
)
def test_the_setting(error: str, key: str | None):
    values = {"data.train.0.path": "/data/chats.jsonl", "data.train.1.path": "poems.txt", "model.path": "llama"}
    assert setting_of(error, lambda key: values.get(key, "")) == key


def test_a_value_that_is_not_set_is_in_no_error():
    assert setting_of("KeyError: 'layers'", lambda _: "") is None
